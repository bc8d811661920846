"""The keeper of a fleet: what fills the role `trainer` of a job that has none.

It trains nothing and holds nothing. It keeps the job open until it is stopped, tells the rollout manager how many
instances are wanted, and counts the minutes in which the fleet served: these are the job's steps, so that budgets of
repair are those of a fleet that works, for however many days.

Invariant *the data plane never waits for it*: requests come to the rollout manager, and go on while the keeper is away.

This module must not know what is asked at the door.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from typing import Any

from gyre.config import TRAINER
from gyre.errors import GyreError
from gyre.workloads.base import BaseTrainer
from gyre.workloads.handles import Call
from gyre.workloads.runtime import TrainerRuntime

LOOK_EVERY_S = 1.0
"""Between two looks at the rollout manager."""

ANSWER_WITHIN_S = 1.0
"""For the manager's answer to a look; one that does not come is waited for at the next."""

STEP_S = 60.0
"""A step of the job: so long a time in which the fleet served."""


class FleetKeeper(BaseTrainer):
    """Keeps a fleet open until the job is stopped. It returns how many steps there were."""

    runtime: TrainerRuntime
    _asked: Call | None = None

    def fit(self) -> dict[str, Any]:
        pause = threading.Event()
        looks, served_s, before = 0, 0.0, time.monotonic()
        while not self.runtime.should_stop:
            seen = self._look()
            now = time.monotonic()
            if seen and seen["serving"]:
                served_s += now - before
            before = now
            looks += 1
            self.report_progress(looks=looks, step=int(served_s / STEP_S), **(seen or {}))
            pause.wait(LOOK_EVERY_S)
        return {"served_s": round(served_s, 1)}

    def _look(self) -> dict[str, Any] | None:
        """What the manager answers; None while it does not."""
        wanted = {
            role: self.runtime.membership.wanted(role) for role in self.runtime.spec.roles if role != TRAINER
        }
        if self._asked is None:
            self._asked = self.rollout_manager.control.look.submit(wanted)
        try:
            seen: dict[str, Any] = self._asked.result(ANSWER_WITHIN_S)[0]
        except (TimeoutError, concurrent.futures.TimeoutError):
            return None  # it is being replaced, or busy: the call goes on
        except GyreError:
            seen = {}  # it was lost for good, of which the master knows; the next look asks its successor
        self._asked = None
        return seen or None
