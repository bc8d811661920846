"""What the parts of a bench share: its planes and instances, and where its results are."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_plane.children import Instance
from gpu_plane.follow import PartFailed, Row, now
from gpu_plane.plane import Plane
from gpu_plane.scale import Scale


@dataclass
class Bench:
    """Its parts are methods of `(out, until)`: they put what they found into `out`, and end by `until`."""

    scale: Scale
    out: Path
    place: Path
    models: list[Path]
    end_at: float
    gpus: int
    results: Row = field(default_factory=dict)
    planes: dict[str, Plane] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)

    def plane(self, name: str, until: float, **settings: Any) -> Plane:
        if name not in self.planes:
            plane = self.planes[name] = Plane(self.place, name)
            plane.start(until, **settings)
            assert plane.trainer is not None
            plane.trainer.publish(0, self.models[0])
        return self.planes[name]

    def instance(self, plane: Plane, name: str, *, running: int, gpu: int, memory: float) -> Instance:
        options = {
            "name": name,
            "running": running,
            "kv_tokens": self.scale.kv_tokens * running // self.scale.running,
            "cache": str(self.place / "cache" / name),
            "engine": self.scale.engine,
            "endpoint": str(plane.endpoint),
            "gpu": gpu,
            "memory": memory,
            "ready_s": 200.0,
        }
        self.instances[name] = Instance(plane.place, options)
        return self.instances[name]

    def loaded(self, plane: Plane, instance: Instance, until: float, after: float = 0.0) -> Row:
        """The event of its weights. Raises PartFailed as soon as its agent has ended."""
        after = max(after, instance.began)
        while True:
            with contextlib.suppress(PartFailed):
                return plane.log.wait("WeightsLoaded", min(until, now() + 0.5), after, instance=instance.name)
            instance.check()
            refused = plane.log.rows("WeightsRefused", after, instance=instance.name)
            if len(refused) > 1:  # once may be a port that somebody else took
                raise PartFailed(f"{instance.name} has no engine: {refused[-1]['error'][:2500]}")
            if now() > until:
                raise PartFailed(f"{instance.name} did not load its weights in time")

    def living(self, *names: str) -> list[Instance]:
        for name in names:
            if name not in self.instances:
                raise PartFailed(f"instance {name} was not started")
            self.instances[name].check()
        return [self.instances[name] for name in names]

    def _continued(self, plane: Plane, first: float, last: float, lost: str, moved: int) -> Row:
        """When the lost samples were given to others, as far as the log shows them."""
        rows = [
            row for row in plane.log.rows("Continued", first) if row["at"] <= last and row["instance"] != lost
        ]
        found, total = [], 0
        for row in rows:
            if total >= moved:
                break
            total += row["samples"]
            found.append(round(row["at"] - first, 3))
        return {"elsewhere_first_s": found[:1], "elsewhere_last_s": found[-1:], "elsewhere_samples": total}
