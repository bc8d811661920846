"""Parts in which an engine generates and an actor trains: overlapped, synchronous, and with a bigger model."""

from __future__ import annotations

from gpu_plane.follow import Row
from training_loop.bench import LoopBench
from training_loop.rates import rates, versions_served
from training_loop.trainer import LoopTrainer


class Overlapped(LoopBench):
    """Parts `loop`, `sync` and `big`."""

    def loop(self, out: Row, until: float) -> None:
        plane, trainer = self.serving()
        try:
            self._loop(out, plane, trainer, "a", self.scale.steps, until)
        finally:
            self._compare(out, self.results["parts"].get("bare", {}))

    def sync(self, out: Row, until: float) -> None:
        plane, trainer = self.serving()
        first = trainer.step + 1
        steps = 5 if self.cuda else 3
        rows = trainer.run(steps, until, staleness=0, label="sync")
        out["rates"], out["steps"] = rates(rows, since=1), rows
        out["versions"] = versions_served(plane, trainer, first, trainer.step)
        out["oldest_age"] = max((age for row in rows for age in row["tokens_by_age"]), default=None)
        overlapped = self.results["parts"].get("loop", {}).get("rates")
        if overlapped:
            out["loop_over_sync"] = round(overlapped["loop_tokens_s"] / out["rates"]["loop_tokens_s"], 4)
        out["checked"] = trainer.checked()

    def big(self, out: Row, until: float) -> None:
        self._end_small()
        self._begin_big(until)
        scale, model = self.big_scale, self.models[1]
        plane, instance = self.planes["big"], self.instances["d"]
        trainer = plane.trainer
        assert isinstance(trainer, LoopTrainer)
        trainer.actor = self._prepared(out, "big", scale, model, until)
        self._baselines(out, trainer, until, bare_steps=3, own_steps=2)
        out["loaded"] = self.loaded(plane, instance, until)
        out["engine_start_s"] = instance.log.rows("engine")[-1]["start_s"]
        out["first_update"] = self._first_update(plane, trainer, "d", until)
        try:
            self._loop(out, plane, trainer, "d", scale.steps, until)
        finally:
            self._compare(out, out)
