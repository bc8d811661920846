"""The part with one engine over both GPUs: versions into both ranks, under load."""

from __future__ import annotations

import asyncio
import time

from gpu_plane.children import Instance
from gpu_plane.endpoint import endpoint_of
from gpu_plane.follow import PartFailed, Row, now
from gpu_plane.machine import gpu_used_mib
from gpu_plane.plane import Plane
from gpu_plane.run import write_results
from training_loop import tensor_parallel as tensor_parallel_of
from training_loop.bench import LoopBench
from training_loop.rates import exact, spread


class TensorParallel(LoopBench):
    """Part `tp2`."""

    def tp2(self, out: Row, until: float) -> None:
        self._end_small()
        if self.cuda and self.gpus < 2:
            raise PartFailed("it wants two GPUs")
        ranks = 2 if self.cuda or self.sglang_cpu else 1  # the embedded engine has one
        scale, models = self.scale, (self.models[0], self.weights / "other")
        other = self._write_model_at(models[1], 7, scale)
        actor = self.actors["tp2"] = self._start_rank("tp2", scale, models[0], 0, work="versions")
        plane = self.planes["tp2"] = Plane(self.place, "tp2")
        trainer = tensor_parallel_of.LoadTrainer(endpoint_of(plane.endpoint), scale.shape)
        plane.trainer = trainer
        plane.start(until)
        began = now()
        instance = self.join(plane, "t", scale, memory=0.3, ranks=ranks)
        trainer.publish(0, self._written(0, until))
        if other.process.wait(max(1.0, until - now())):
            raise PartFailed((self.place / "models.out").read_text()[-2000:])
        out["ranks"] = ranks
        out["loaded"] = self.loaded(plane, instance, until)
        out["joined_s"] = round(now() - began, 2)
        out["engine_start_s"] = instance.log.rows("engine")[-1]["start_s"]
        out["actor"] = actor.call("setup", max(1.0, until - now()))
        out["gpu_used_mib"] = gpu_used_mib()
        folder = self.weights / "published-tp2"
        folder.mkdir()
        versions = tensor_parallel_of.Versions(
            plane,
            actor,
            models,
            folder,
            instance.name,
            exact=not self.cuda,
            window_s=1.0,
            message=tensor_parallel_of.tokens_a_message(scale.engine),
        )
        out["versions"] = rows = []
        trainer.keep_asking(scale.running * 5 // 4 // scale.shape.n)
        self._until_all_run(plane, instance.name, scale.running, until)
        versions.run(8 if self.cuda else 6, until - 25.0, rows.append)
        out["medians"] = {
            key: spread([row[key] for row in rows if key in row])
            for key in ("fetch_s", "load_s", "pause_s", "step_to_served_s", "publish_to_served_s")
        }
        out["rate_tokens_s"] = {
            when: spread([row[f"tokens_s_{when}"] for row in rows]) for when in ("before", "after")
        }
        trainer.no_more()
        trainer.wait_all(until)
        write_results(self)
        out["came"], out["account"] = trainer.checked(), plane.account()
        out["account_exact"] = exact(out["account"])
        out["checked"] = versions.checked(until)
        write_results(self)
        self._load_by_each_way(out, instance, rows[-1]["version"], until)
        wrong = [*trainer.wrong, *(["runs are out of order"] if trainer.out_of_order else [])]
        wrong += [
            f"model {model}: {kind}"
            for model in (0, 1)
            for kind, found in out["checked"][f"model_{model}"].items()
            if not found.get("within_tolerance", True) or found.get("mixtures")
        ]
        if wrong:
            raise PartFailed(f"what came is not what it should be: {wrong[:5]}")

    def _until_all_run(self, plane: Plane, name: str, running: int, until: float) -> None:
        while True:
            rows = plane.log.rows("state")
            told = rows[-1]["instances"].get(name, [0, 0]) if rows else [0, 0]
            if told[0] >= running * 8 and told[1] >= running * 3 // 4:  # and none waits for its first token
                return
            if now() > until:
                raise PartFailed(f"{name} was not given its work")
            time.sleep(0.05)

    def _load_by_each_way(self, out: Row, instance: Instance, version: int, until: float) -> None:
        """The last version again: by each stage of the loader and from the disk, under load; then the engine's own
        checksums. Last, for an engine may end of what it is asked here; that is recorded."""
        folder = next(iter(sorted(self.weights.glob(f"cache-t/*/v{version:08d}"))), None)
        if folder is None:
            raise PartFailed(f"the agent has no folder of version {version}")
        key, url = self._loader_key(instance), instance.engine_url()
        out["loading"] = {"by_loader": bool(key)}
        stages = ("device", "pinned", "host") if key else ()
        within = min(until - 5.0, now() + 40.0 * self.patience)
        asyncio.run(self._load_under_load(out["loading"], url, folder, str(version), key, stages, within))
        try:
            out["ranks_hold"] = asyncio.run(
                tensor_parallel_of.ranks_hold(
                    url, key, folder, folder, str(version), max(2.0, min(15.0, until - now()))
                )
            )
        except Exception as error:  # an engine that cannot tell
            out["ranks_hold_failed"] = f"{type(error).__name__}: {error}"[:1500]
