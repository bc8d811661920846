"""Parts without an engine: the actor in its layouts, PPO's critic, and checkpoints in host memory."""

from __future__ import annotations

import shutil

from gpu_plane.follow import PartFailed, Row, now
from gpu_plane.run import write_results
from training_loop.actors import critic as critic_of
from training_loop.actors import layouts as layouts_of
from training_loop.actors import memory as memory_of
from training_loop.actors.actor import ActorProcess
from training_loop.actors.gang import ActorGang
from training_loop.bench import LoopBench


class ActorAlone(LoopBench):
    """Parts `layouts`, `critic` and `memory`."""

    def layouts(self, out: Row, until: float) -> None:
        """The actor alone, on both GPUs."""
        self._end_small()
        if self.cuda and self.gpus < 2:
            raise PartFailed("it wants two GPUs")
        model = self._written(0, until)
        place = self.weights / "layouts"
        if self.cuda and shutil.disk_usage(self.weights).free < 24 << 30:
            place = self.place / "layouts"  # a checkpoint of 0.6 billion parameters has eight gigabytes
        place.mkdir()
        layouts_of.measure(
            out,
            until,
            shape=self.scale.shape,
            start=lambda ranks: self._new_gang(f"layouts-{ranks}", self.scale, model, ranks),
            place=place,
            bf16=self.cuda,
            wrote=lambda: write_results(self),
        )

    def critic(self, out: Row, until: float) -> None:
        self._end_small()
        scale, model = self.scale, self._written(0, until)
        # By it a step moves the value head's output by some 0.2; returns are 0 and 1.
        rate = 0.2 / scale.model["hidden"]
        changes: Row = {
            "loss": {"adv_estimator": "gae", "tis_imp_ratio_cap": 2.0},
            "critic": {"optim": {"lr": rate, "warmup_steps": 1}},
        }
        out["critic_lr"] = rate

        def start(name: str, work: str, gpu: int) -> ActorProcess:
            found = self._start_rank(f"critic-{name}", scale, model, 0, work=work, gpu=gpu, changes=changes)
            self.actors[f"critic-{name}"] = found
            return found

        critic_of.measure(
            out,
            until,
            shape=scale.shape,
            start=start,
            gpus=self.gpus if self.cuda else 2,
            steps=(14, 4, 4) if self.cuda else (8, 3, 3),
            wrote=lambda: write_results(self),
        )

    def memory(self, out: Row, until: float) -> None:
        self._end_small()
        scale, model = self.scale, self._written(0, until)
        place = self.place / "memory"
        place.mkdir()

        def start(ranks: int, name: str) -> ActorGang:
            directory = place / name
            directory.mkdir(exist_ok=True)
            return ActorGang(
                lambda rank: self._start_rank(
                    f"memory-{name}-{now():.0f}",
                    scale,
                    model,
                    0,
                    rank,
                    ranks,
                    work="memory",
                    directory=directory,
                ),
                ranks,
            )

        try:
            memory_of.measure(
                out,
                until,
                shape=scale.shape,
                start=start,
                place=place,
                instead=self.weights,
                most_ranks=2 if self.gpus > 1 or not self.cuda else 1,
                cuda=self.cuda,
                wrote=lambda: write_results(self),
            )
        finally:
            shutil.rmtree(place, ignore_errors=True)
