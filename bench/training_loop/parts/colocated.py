"""The part in which both GPUs train and both generate in between, in Gyre's local windows and without its plane."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpu_plane.follow import PartFailed, Row, now
from gpu_plane.machine import gpu_used_mib
from gpu_plane.plane import Plane
from gpu_plane.run import tails, write_results
from training_loop import windows as windows_of
from training_loop.bench import LoopBench
from training_loop.colocated import ColocatedLoop, Engine, phases
from training_loop.rates import exact
from training_loop.scales import Scale
from training_loop.trainer import LoopFailed, LoopTrainer


class Colocated(LoopBench):
    """Part `colocated`."""

    def colocated(self, out: Row, until: float) -> None:
        """Both GPUs train data parallel and both generate: in Gyre's own windows, then without Gyre's plane."""
        self._end_small()
        if self.cuda and self.gpus < 2:
            raise PartFailed("it wants two GPUs")
        scale = replace(self.scale, running=self.scale.running // 2, kv_tokens=self.scale.kv_tokens // 2)
        model = self._written(0, until)
        self.new_actor("windows", scale, model, ranks=2)
        plane = self.new_plane("windows", scale, until)
        trainer = plane.trainer
        assert isinstance(trainer, LoopTrainer)
        trainer.publish_folder(0, model)
        names = ["la", "lb"]
        for gpu, name in enumerate(names):
            self.join(plane, name, scale, memory=0.9, gpu=gpu, local=True)
        steps = 10 if self.cuda else 4
        try:
            self._in_windows(out, plane, trainer, scale, model, names, steps, until)
        finally:
            write_results(self)
        self._without_the_plane(out, trainer, scale, names, steps, until)
        for key, other in (("windows", "windows"), ("bare", "bare")):
            mine = out.get(other, {}).get("rates", {}).get("loop_tokens_s")
            loop = self.results["parts"].get("loop", {}).get("rates", {}).get("loop_tokens_s")
            if mine and loop:
                out[f"loop_over_{key}"] = round(loop / mine, 4)

    def _in_windows(
        self,
        out: Row,
        plane: Plane,
        trainer: LoopTrainer,
        scale: Scale,
        model: Path,
        names: list[str],
        steps: int,
        until: float,
    ) -> None:
        found: Row = {}
        out["windows"] = found
        preparing: Row = {}

        def prepare() -> None:
            try:
                trainer.actor = self._prepared(
                    out, "windows", scale, model, min(until, now() + 120.0 * self.patience), 2
                )
                trainer.actor.call("give_back", 20.0)
                preparing["step"] = trainer.actor.call("state", 20.0)["step"]
            except BaseException as error:
                preparing["error"] = error

        def look() -> None:
            """Raises at once where no engine will come."""
            for name in names:
                self.instances[name].check()
                refused = plane.log.rows("WeightsRefused", self.instances[name].began, instance=name)
                if refused:
                    raise PartFailed(f"{name} has no engine: {refused[-1]['error'][:2500]}")
            if "error" in preparing:
                raise preparing["error"]

        # The engines start in the first window, and the actor beside them: it does not train yet.
        thread = threading.Thread(target=prepare, daemon=True)
        thread.start()
        began = now()

        def ready() -> None:
            found["engines_generated_s"] = round(now() - began, 2)
            thread.join(max(1.0, until - now()))
            look()
            trainer.at_step(preparing["step"])

        loop = windows_of.WindowLoop(trainer, look)
        try:
            try:
                loop.run(1, min(until - 60.0, now() + 200.0 * self.patience), ready)
            except (PartFailed, LoopFailed) as error:
                if "error" in preparing or not self.cuda or until - now() < 90.0:
                    raise
                found["with_memory_saver_failed"] = str(error)[-2500:]
                found["tails"] = tails(self)
                for gpu, name in enumerate(list(names)):
                    self.instances[name].kill()
                    names[gpu] = f"{name}-without"
                    self.join(plane, names[gpu], scale, memory=0.9, gpu=gpu, local=True, saver=False)
                loop.run(1, until - 45.0, ready)
            found["engine_start_s"] = {
                name: self.instances[name].log.rows("engine")[-1]["start_s"] for name in names
            }
            found["gpu_used_mib_asleep"] = gpu_used_mib()
            loop.run(steps, min(until - 40.0, now() + 90.0 * self.patience), ready=lambda: None)
        finally:
            rows = [row for row in trainer.steps if row["label"] == "windows"]
            closed = plane.log.rows("WindowClosed", began)
            free = plane.log.rows("DevicesFree", began)
            found["rates"], found["steps"] = windows_of.summary(rows, closed, free), rows
            found["not_released"] = [row["error"] for row in plane.log.rows("MemoryNotReleased", began)][:4]
            found["versions"] = [
                {key: row[key] for key in ("version", "instance", "fetch_s", "load_s", "pause_s", "how")}
                for row in plane.log.rows("WeightsLoaded", began)
            ]
        found["checked"], found["account"] = trainer.checked(), plane.account()
        found["account_exact"] = exact(found["account"])
        out["memory"] = trainer.actor.call("memory", 20.0)

    def _without_the_plane(
        self, out: Row, trainer: LoopTrainer, scale: Scale, names: Sequence[str], steps: int, until: float
    ) -> None:
        """By the same engines and the same actor; agents and manager have nothing to do."""
        found: Row = {}
        out["bare"] = found
        plane = self.planes["windows"]
        engines = []
        for name in names:
            told = plane.log.rows("WeightsLoaded", instance=name)[-1]
            folder = next(iter(sorted(self.weights.glob(f"cache-{name}/*/v{told['version']:08d}"))), None)
            if folder is None:
                raise PartFailed(f"{name} has no folder of version {told['version']}")
            instance = self.instances[name]
            asleep = not plane.log.rows("MemoryNotReleased", instance=name)
            engines.append(Engine(instance.engine_url(), folder, self._loader_key(instance), asleep=asleep))
        loop = ColocatedLoop(
            scale.shape,
            engines,
            train=lambda micro, step, end: self._own_step(trainer.actor, micro, step, end),
            publish=lambda step: Path(trainer.write(step, trainer.way, 60.0)["path"]),
            step=trainer.step,
        )
        try:
            loop.run(steps, min(until, now() + 90.0 * self.patience))
        finally:
            found["rates"], found["steps"] = phases(loop.rows), loop.rows
            found["engines"] = [
                {"loader": bool(engine.key), "releases": engine.releases, "why_not": engine.why_not}
                for engine in engines
            ]
        trainer.step = loop.step
