"""The part that publishes and loads one version by every way, under load."""

from __future__ import annotations

import asyncio

from gpu_plane.follow import PartFailed, Row, now
from training_loop.actors.actor import ActorFailed
from training_loop.bench import LoopBench
from training_loop.trainer import LoopTrainer


class Loading(LoopBench):
    """Part `loading`."""

    def loading(self, out: Row, until: float) -> None:
        plane, trainer = self.small()
        out["publishing"] = self._publishing(trainer, until)
        self.serving()
        (instance,) = self.living("a")
        told = [row for row in plane.log.rows("WeightsLoaded", instance=instance.name) if row["version"]]
        if not told:
            raise PartFailed("it serves no version that was published by the actor")
        version = told[-1]["version"]
        folder = next(iter(sorted(self.weights.glob(f"cache-a/*/v{version:08d}"))), None)
        if folder is None:
            raise PartFailed(f"the agent has no folder of version {version}")
        key = self._loader_key(instance)
        stages = ("device", "pinned", "host") if key else ()
        out["version"], out["folder"], out["by_loader"] = version, str(folder), bool(key)
        asyncio.run(
            self._load_under_load(out, instance.engine_url(), folder, str(version), key, stages, until)
        )

    def _publishing(self, trainer: LoopTrainer, until: float) -> Row:
        """The newest weights written again by each way, while nothing else is computed; nobody is told."""
        found: Row = {}
        for way in ("arena", "folder"):
            rows: list[Row] = []
            for _ in range(3):
                try:
                    told = trainer.write(trainer.step, way, max(1.0, until - now()))
                except ActorFailed as error:
                    found[f"{way}_failed"] = str(error)[-1500:]
                    break
                rows.append({key: round(told[key], 4) for key in told if key.endswith("_s")})
            found[way] = rows
        return found
