"""Each kind of process of one running job, killed one after another, and how long until it trains again.

A process is killed when the job has made its next step and three more since the last kill. All is measured by the
times in the job's journal; a step ends when the trainer says that it did (its metric `at`), which the journal may hear
later.
"""

from __future__ import annotations

import contextlib
import random
import signal
import statistics
import time
from collections.abc import Sequence
from itertools import zip_longest

import psutil
from job_plane.account import rate, steps_of
from job_plane.case import Row
from job_plane.kills import Attack, engines_below

KINDS = {
    "actor": "actor-",
    "trainer": "trainer-",
    "engine": "rollout-",
    "master": "master",
    "agent": "rollout-",
    "manager": "rollout_manager-",
    "reward": "reward-",
    "sessions": "agent-",
}
"""By kind, what the names of its vertices begin with. An engine is below its agent; `sessions` are run by those."""

USUAL = ("actor", "trainer", "engine", "master", "agent")

NEEDED = ("actor", "trainer")
"""Without whom no step is made: one that ends just after their death was made before it."""

CALM_STEPS = 5
"""Before the first kill, for the rate that the job has by itself."""

MORE_STEPS = 3
"""After the first step that follows a kill, until the next kill."""

GIVEN_UP_S = 300.0
"""After a kill without a step: the job does not come back."""


class Chaos(Attack):
    """SIGKILL to one of each of `kinds` in turn, `times` times. Engines and agents are killed while all of the job's
    `engines` serve; kinds behind them in the row come first where one does not. Who dies goes in turn, and when in a
    step is drawn."""

    def __init__(self, kinds: Sequence[str], times: int, engines: int) -> None:
        super().__init__()
        self._left = [kind for _ in range(times) for kind in kinds]
        self._engines = engines
        self._draw = random.Random(1)

    def _run(self) -> None:
        while not self._end.wait(0.2):
            events = self._watch.events()
            if self.rows and time.time() - self._began - self.rows[-1]["at_s"] > GIVEN_UP_S:
                self.rows[-1]["error"] = f"no {MORE_STEPS + 1} steps within {GIVEN_UP_S:.0f} s"
                break
            if not self._is_calm(events):
                continue
            if not self._left:
                break
            kind = next((kind for kind in self._left if self._may_strike(kind)), None)
            if kind is not None and self._end.wait(self._draw.uniform(0.0, _last_lap(events))):
                break
            if kind is not None and self._kill(kind, events):
                self._left.remove(kind)
        self.ended_s = self.ended_s or time.time() - self._began
        self.over = True

    def _is_calm(self, events: Sequence[Row]) -> bool:
        if not self.rows:
            return len(steps_of(events)) >= CALM_STEPS
        return recovery(events, self.rows[-1])["more_steps_s"] is not None

    def _may_strike(self, kind: str) -> bool:
        return kind not in ("engine", "agent") or self._watch.all_serve(self._engines)

    def _kill(self, kind: str, events: Sequence[Row]) -> bool:
        """Whether somebody was there to be killed."""
        found = self._watch.master() if kind == "master" else self._watch.vertices(KINDS[kind])
        turn = sum(row["kind"] == kind for row in self.rows)
        for name in sorted(found)[turn % len(found) :] if found else ():
            victims = engines_below(found[name]) if kind == "engine" else _actor(found[name])
            # Before the signal: what follows from it is later than it.
            at_s = round(time.time() - self._began, 3)
            struck = [victim.pid for victim in victims if _killed(victim)]
            if struck:
                self.rows.append({"kind": kind, "vertex": name, "pids": struck, "at_s": at_s})
                return True
        return False

    def summary(self, events: Sequence[Row]) -> Row:
        """Each kill with what came of it, and all of them together."""
        rows = [
            row | recovery(events, row, until_s=later["at_s"] if later else float("inf"))
            for row, later in zip_longest(self.rows, self.rows[1:])
        ]
        steps = steps_of(events)
        first = rows[0]["at_s"] if rows else float("inf")
        before = [step for step in steps if step["at_s"] < first]
        calm = rate(before, before[1]["at_s"], before[-1]["at_s"]) if len(before) > 2 else None
        return {
            "kills": rows,
            "left": list(self._left),
            "undisturbed_tokens_s": calm,
            "by_kind": {kind: _of_kind(rows, kind) for kind in dict.fromkeys(row["kind"] for row in rows)},
            "steps_redone": sum(row["steps_redone"] for row in rows),
            "deaths_of_others": _others(events, rows),
        }


def recovery(events: Sequence[Row], killed: Row, until_s: float = float("inf")) -> Row:
    """What came after a kill, and before `until_s`, the next one: seconds from it on, None where it has not happened.
    `next_step_s` and `more_steps_s` are to the first and to the fourth step that was never made before, and of who is
    needed for a step, of those since it is back; `back_s`, until the vertex runs again, or an agent's engine does;
    `steps_redone` were made before the restores and are made again."""
    at_s = killed["at_s"]
    ended = _ends_of_steps(events)
    before = max((step for step, end_s in ended.items() if end_s <= at_s), default=0)
    back = [event["at_s"] - at_s for event in events if event["at_s"] > at_s and _is_back(event, killed)]
    since_s = at_s if killed["kind"] not in NEEDED else at_s + back[0] if back else float("inf")
    after = sorted(end_s for step, end_s in ended.items() if step > before and end_s > since_s)
    restored = [
        {"after_s": round(event["at_s"] - at_s, 3)}
        | {name: event["body"][name] for name in ("role", "source", "step", "seconds")}
        for event in events
        if event["kind"] == "GangRestored" and at_s < event["at_s"] <= until_s
    ]
    return {
        "step": before,
        "next_step_s": round(after[0] - at_s, 3) if after else None,
        "more_steps_s": round(after[MORE_STEPS] - at_s, 3) if len(after) > MORE_STEPS else None,
        "back_s": round(back[0], 3) if back else None,
        "restored": restored,
        "steps_redone": sum(
            max([0, *(step for step, end_s in ended.items() if end_s <= at_s + one["after_s"])]) - one["step"]
            for one in restored
        ),
    }


def _is_back(event: Row, killed: Row) -> bool:
    """Whether the event says that who was killed does its work again."""
    kind, body = event["kind"], event["body"]
    if killed["kind"] == "master":
        return bool(kind == "MasterStarted")
    if killed["kind"] in ("engine", "agent"):
        started = kind == "RolloutsChanged" and body["what"] == "EngineStarted"
        return started and body["details"]["instance"] == killed["vertex"]
    return bool(kind == "VertexStarted" and body["vertex"] == killed["vertex"])


def _ends_of_steps(events: Sequence[Row]) -> dict[int, float]:
    """When each step was made first, by the trainer's word where it has one."""
    began = None
    found: dict[int, float] = {}
    for event in events:
        if event["kind"] == "JobSubmitted" and "at" in event:
            began = event["at"] - event["at_s"]
        if event["kind"] == "StepCompleted":
            told = event["body"]["metrics"].get("at")
            end_s = told - began if told is not None and began is not None else event["at_s"]
            found.setdefault(event["body"]["step"], min(end_s, event["at_s"]))
    return found


def _last_lap(events: Sequence[Row]) -> float:
    """Seconds of the last step."""
    ended = sorted(_ends_of_steps(events).values())
    return ended[-1] - ended[-2] if len(ended) > 1 else 0.0


def _of_kind(rows: Sequence[Row], kind: str) -> Row:
    found: Row = {}
    for key in ("next_step_s", "more_steps_s", "back_s"):
        values = [row[key] for row in rows if row["kind"] == kind and row[key] is not None]
        found[key] = round(statistics.median(values), 1) if values else None
    return found | {"times": sum(row["kind"] == kind for row in rows)}


def _others(events: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Vertices that were lost though nobody killed them or a rank of their gang just before: false alarms that cost."""
    found = []
    for event in events:
        if event["kind"] != "VertexLost":
            continue
        vertex, cause = event["body"]["vertex"], event["body"]["cause"]
        last = next((row["vertex"] for row in reversed(rows) if row["at_s"] <= event["at_s"]), "")
        if cause in ("silent", "stalled") or vertex.rpartition("-")[0] != last.rpartition("-")[0]:
            found.append({"at_s": event["at_s"], "vertex": vertex, "cause": cause})
    return found


def _actor(pid: int) -> list[psutil.Process]:
    """The process, if it is one that Ray runs an actor in."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if any(part.startswith("ray::") for part in process.cmdline()[:1]):
            return [process]
    return []


def _killed(victim: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.send_signal(signal.SIGKILL)  # psutil compares the start time
        return True
    return False
