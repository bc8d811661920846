"""Parts before the loop: the model, the actor alone, and the engine that takes its weights for the first time."""

from __future__ import annotations

import contextlib
import shutil

from gpu_plane.children import Child
from gpu_plane.follow import PartFailed, Row, now
from gpu_plane.machine import gpu_used_mib, machine
from gpu_plane.run import tails
from training_loop.actors.actor import ActorFailed
from training_loop.bench import LoopBench
from training_loop.trainer import LoopTrainer, inputs, synthetic


class Start(LoopBench):
    """Steps `model` and `start`, parts `bare` and `served`."""

    def model(self, out: Row, until: float) -> None:
        """Only begun here: who needs it waits."""
        small = set(self.wanted) - {"big", "more"}
        self._writers = {0: self._write_model(0, self.scale)} if small else {}
        if "big" in self.wanted:
            self._writers[1] = self._write_model(1, self.big_scale)
        free = shutil.disk_usage(self.weights).free
        if self.cuda and free > 20 << 30:
            size = min(free // 2, 16 << 30)
            Child("touch", {"folder": str(self.weights), "size": size}, self.place / "touch.out")
        out["free_gib_for_weights"] = round(free / 2**30, 1)
        self.results["machine"] = machine()
        self.results["gpu_used_mib_before"] = gpu_used_mib()

    def start(self, out: Row, until: float) -> None:
        """Everything at once: what is slow is the engine's start."""
        began = now()
        self.new_actor("small", self.scale, self.models[0])
        plane = self.new_plane("small", self.scale, until)
        self.join(plane, "a", self.scale, memory=0.5)  # it waits for a version
        model = self._written(0, until)
        out["model_written_s"] = round(now() - began, 2)
        self.small()[1].publish_folder(0, model)

    def bare(self, out: Row, until: float) -> None:
        _, trainer = self.small()
        trainer.actor = self._prepared(out, "small", self.scale, self.models[0], until)
        self._baselines(out, trainer, until, bare_steps=6, own_steps=5)
        instance = self.instances.get("a")
        if instance is not None and not instance.log.rows("engine") and until - now() > 30.0:
            out["deterministic"] = self._deterministic(trainer, until)

    def _deterministic(self, trainer: LoopTrainer, until: float) -> Row:
        """What it costs that a replayed step is the step, bit by bit."""
        shape, rows = trainer.shape, []
        count = shape.groups // shape.micro
        groups = synthetic(shape, 910_000_000, count)
        try:
            trainer.actor.call("deterministic", 10.0, on=True)
            for number in range(2):
                more = synthetic(shape, 930_000_000 + number * 1000, count)
                rows.append(self._own_step(trainer.actor, more, trainer.step + 1, until))
                trainer.step += 1
            tokens = sum(inputs(micro) for micro in groups)
            return {"steps": rows, "tokens_s": round(tokens / rows[-1]["seconds"], 1)}
        except ActorFailed as error:
            return {"failed": str(error)[-1500:]}
        finally:
            with contextlib.suppress(ActorFailed):
                trainer.actor.call("deterministic", 10.0, on=False)

    def served(self, out: Row, until: float) -> None:
        plane, trainer = self.small()
        (instance,) = self.living("a")
        try:
            out["loaded"] = self.loaded(plane, instance, until)
        except PartFailed as error:
            if not self.loader or until - now() < 40.0:  # it did not fail, it was slow
                raise
            out["with_loader_failed"] = str(error)[-3000:]
            out["tails"] = tails(self)
            self.loader = False
            instance.kill()
            instance = self.join(plane, "a", self.scale, memory=0.5)
            out["loaded"] = self.loaded(plane, instance, until)
        out["engine_start_s"] = instance.log.rows("engine")[-1]["start_s"]
        out["gpu_used_mib"] = gpu_used_mib()
        if trainer.step:
            try:
                out["first_update"] = self._first_update(
                    plane, trainer, "a", min(until, now() + 60.0 * self.patience)
                )
            except (ActorFailed, PartFailed) as error:
                out["first_update_failed"] = f"by {trainer.way}: {error}"[-3000:]
                self.way = trainer.way = "folder" if trainer.way == "arena" else "arena"
                groups = synthetic(trainer.shape, 940_000_000, 1)  # a version means one set of bytes
                self._own_step(trainer.actor, groups, trainer.step + 1, until)
                trainer.step += 1
                out["first_update"] = self._first_update(plane, trainer, "a", until)
