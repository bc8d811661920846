"""A synchronous loop over Gyre's own local windows: the trainer lends its devices, the rollout manager opens a window
on them and gives them back, then the trainer trains. What a user has who collocates actor and rollout.

The lending side is `gyre.workloads.local_windows`, as in a job; what a step takes is told apart as seen by the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from training_loop.actor import Row, now
from training_loop.trainer import LoopFailed, LoopTrainer


class WindowLoop:
    """Steps of `trainer`, each generated in a window. Make it before the trainer asks for anything."""

    def __init__(self, trainer: LoopTrainer, look: Callable[[], None] = lambda: None) -> None:
        """`look()` raises where nothing will come any more."""
        from gyre.workloads.local_windows import DeviceLending

        self._trainer = trainer
        self._look = look
        self._lending = DeviceLending(trainer.client.lend, last_share=1.0, now=now())
        trainer.on_window = self._lending.hear
        trainer.on_tokens = self._lending.arrived

    def run(self, steps: int, until: float, ready: Callable[[], None]) -> list[Row]:
        """`ready()` returns when the trainer can train its first step: it may change the trainer's step, to which the
        first groups then belong. Raises LoopFailed, and what `look` raises."""
        while not self._lending.need(now()):  # its own first
            self._lending.look(now(), training=False, could_train=True, waits=False)
            self._wait(0.05, until, "the devices were not given back at the beginning")
        rows = []
        for number in range(steps):
            step = self._trainer.step + 1
            began = now()
            self._trainer.ask(step, step - 1)
            came_at = self._window(step, until)
            back_at = now()
            if number == 0:
                ready()
                step = self._trainer.step + 1
            self._lending.look(now(), training=True, could_train=True, waits=False)
            row = self._trainer._step(step, until, None)
            self._trainer.wait_published(until)
            self._lending.look(now(), training=False, could_train=True, waits=False)
            self._lending.step_done()
            row |= {
                "label": "windows",
                "window_s": round(back_at - began, 4),
                "samples_came_s": round(came_at - began, 4),
                "handed_back_after_s": round(back_at - came_at, 4),
                "closed_because": self._lending.closed_because,
                "began_at": began,
                "seconds": now() - began,
            }
            rows.append(row)
            self._trainer.steps.append(row)
        return rows

    def _window(self, step: int, until: float) -> float:
        """Until every group of `step` came and the devices are back; when the last came."""
        came_at = 0.0
        while True:
            missing = self._trainer.missing(step)
            if not missing and not came_at:
                came_at = now()
            self._lending.look(now(), training=False, could_train=False, waits=bool(missing))
            if came_at and not self._lending.is_lent:
                return came_at
            self._wait(0.005, until, f"{missing} groups of step {step} did not come, or the devices are lent")

    def _wait(self, seconds: float, until: float, else_what: str) -> None:
        self._look()
        if now() > until:
            raise LoopFailed(f"{else_what}; {self._trainer.last_errors()}")
        self._trainer.wait_for_news(seconds)


def summary(rows: Sequence[Row], windows: Sequence[Row], since: int = 2) -> Row:
    """Means over the steps from `since` on, and tokens/s of the whole loop. `windows` are the manager's events."""
    kept = list(rows)[since:]
    if not kept:
        return {}
    tokens = sum(row["input_tokens"] for row in kept)
    wall = kept[-1]["began_at"] + kept[-1]["seconds"] - kept[0]["began_at"]

    def mean(key: str) -> float:
        return round(float(sum(row[key] for row in kept)) / len(kept), 4)

    found: dict[str, Any] = {
        "steps": len(kept),
        "step_s": round(wall / len(kept), 4),
        "window_s": mean("window_s"),
        "samples_came_s": mean("samples_came_s"),
        "handed_back_after_s": mean("handed_back_after_s"),
        "train_s": mean("train_s"),
        "input_tokens_a_step": tokens // len(kept),
        "loop_tokens_s": round(tokens / wall, 1),
        "response_tokens_s": round(sum(row["response_tokens"] for row in kept) / wall, 1),
        "windows": [{key: row[key] for key in ("open_s", "tokens", "reason")} for row in windows],
    }
    return found
