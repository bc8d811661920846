"""A synchronous loop over Gyre's own local windows: the trainer lends its devices, the rollout manager opens a window
on them and gives them back, then the trainer trains. What a user has who collocates actor and rollout.

The lending side is `gyre.workloads.trainer.device_lending`, as in a job; what a step takes is told apart as seen by
the trainer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from training_loop.actors.actor import Row, now
from training_loop.trainer import LoopFailed, LoopTrainer

LOOK_EVERY_S = 0.25
"""`look` reads logs: oftener it would take time from the client's thread, which unpacks what comes."""


class WindowLoop:
    """Steps of `trainer`, each generated in a window. Make it before the trainer asks for anything."""

    def __init__(self, trainer: LoopTrainer, look: Callable[[], None] = lambda: None) -> None:
        """`look()` raises where nothing will come any more."""
        from gyre.workloads.trainer.device_lending import DeviceLending

        self._trainer = trainer
        self._look = look
        self._looked_at = 0.0
        self._lending = DeviceLending(trainer.client.lend, last_share=1.0, now=now())
        trainer.on_window = self._lending.on_frame
        trainer.on_tokens = self._lending.delivered

    def run(self, steps: int, until: float, ready: Callable[[], None]) -> list[Row]:
        """`ready()` returns when the trainer can train its first step: it may change the trainer's step, to which the
        first groups then belong. Raises LoopFailed, and what `look` raises."""
        while not self._lending.take_back(now()):  # its own first
            self._lending.observe(now(), training=False, could_train=True, waits=False)
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
            self._lending.observe(now(), training=True, could_train=True, waits=False)
            row = self._trainer._step(step, until, None)
            trained_at = now()
            self._trainer.wait_published(until)
            published = self._trainer.publications[step]
            self._lending.observe(now(), training=False, could_train=True, waits=False)
            self._lending.step_done()
            row |= {
                "label": "windows",
                "window_s": round(back_at - began, 4),
                "samples_came_s": round(came_at - began, 4),
                "handed_back_after_s": round(back_at - came_at, 4),
                "publish_s": round(now() - trained_at, 4),
                **{key: round(published[key], 4) for key in ("export_s", "write_s")},
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
            self._lending.observe(now(), training=False, could_train=False, waits=bool(missing))
            if came_at and not self._lending.is_lent:
                return came_at
            self._wait(0.005, until, f"{missing} groups of step {step} did not come, or the devices are lent")

    def _wait(self, seconds: float, until: float, else_what: str) -> None:
        if now() - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now()
            self._look()
        if now() > until:
            raise LoopFailed(f"{else_what}; {self._trainer.last_errors()}")
        self._trainer.wait_for_news(seconds)


_IN_WINDOW = ("awake_s", "loaded_s", "working_s", "last_ended_s", "open_s")
"""Of the manager's account of a window, in their order: seconds from its opening."""


def summary(rows: Sequence[Row], closed: Sequence[Row], free: Sequence[Row], since: int = 3) -> Row:
    """Means over the steps from `since` on, and tokens/s of the whole loop. `closed` and `free` are the manager's
    events of windows that closed and of devices that were free then.

    The first three versions are written into memory that nobody has touched before, which takes half a second each."""
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
        "median_step_s": round(statistics.median(row["seconds"] for row in kept), 4),
        "window_s": mean("window_s"),
        "samples_came_s": mean("samples_came_s"),
        "handed_back_after_s": mean("handed_back_after_s"),
        "train_s": mean("train_s"),
        "publish_s": mean("publish_s"),
        "input_tokens_a_step": tokens // len(kept),
        "loop_tokens_s": round(tokens / wall, 1),
        "response_tokens_s": round(sum(row["response_tokens"] for row in kept) / wall, 1),
        "windows": [_account(row, rows, free) for row in closed],
    }
    return found


def _account(closed: Row, rows: Sequence[Row], free: Sequence[Row]) -> Row:
    """Of one window, seconds from its opening: as the manager tells it until it closed, until its engines slept, and
    until the trainer had its devices (`told_s`), and the last samples (`came_s`)."""
    opened_at = closed["at"] - closed["open_s"]
    account = {key: closed[key] for key in _IN_WINDOW if key in closed}
    after = next((row for row in free if row["at"] >= closed["at"]), None)
    if after is not None:
        account["asleep_s"] = round(after["at"] - opened_at, 4)
    row = next(
        (row for row in rows if row["began_at"] <= closed["at"] < row["began_at"] + row["seconds"]), None
    )
    if row is not None:
        account["asked_s"] = round(row["began_at"] - opened_at, 4)
        account["came_s"] = round(row["began_at"] + row["samples_came_s"] - opened_at, 4)
        account["told_s"] = round(row["began_at"] + row["window_s"] - opened_at, 4)
    return {**account, "tokens": closed["tokens"], "reason": closed["reason"]}
