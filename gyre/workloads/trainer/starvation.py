"""How the trainer fares, for the rollout manager: how long it had nothing to do but to wait for samples.

This module must not know what the manager makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from gyre.graph.flow import Flow
from gyre.graph.model import Dispatch, Operator
from gyre.rollouts.protocol.frames import Pulse

PULSE_S = 0.5


class Starvation:
    def __init__(self) -> None:
        self._looked_at: float | None = None
        self._told_at: float | None = None
        self._waits = False
        """As of the last look: what is found after a call that blocked says nothing of the time before it."""
        self._waited_s = 0.0

    def look(self, flow: Flow, operators: Mapping[str, Operator], *, wanted: int, now: float) -> Pulse | None:
        """Every turn of the trainer's loop. `now` is monotonic seconds, `wanted` the rollout vertices that there are to
        be. What is to be told, every half second."""
        if self._looked_at is not None and self._waits:
            self._waited_s += now - self._looked_at
        self._looked_at = now
        running = {operator.dispatch for ref, operator in operators.items() if flow.running(ref)}
        self._waits = running == {Dispatch.PLANE}
        if self._told_at is not None and now - self._told_at < PULSE_S:
            return None
        self._told_at = now
        return Pulse(at_s=now, waited_s=self._waited_s, wanted=wanted)
