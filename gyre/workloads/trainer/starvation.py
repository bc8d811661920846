"""How long the trainer had nothing to do but wait for samples, as it tells the rollout manager.

This module must not know what the manager makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from gyre.graph.elements import Dispatch, Operator
from gyre.graph.flow import Flow
from gyre.rollouts.protocol.frames import TrainerStatus

PULSE_S = 0.5
"""Time between two pulses."""


class Starvation:
    def __init__(self) -> None:
        self._observed_at: float | None = None
        self._sent_at: float | None = None
        self._starves = False
        """As of the last look. What is seen after a call that blocked says nothing about the time before it."""
        self._waited_s = 0.0

    def observe(
        self, flow: Flow, operators: Mapping[str, Operator], *, wanted: Mapping[str, int], now: float
    ) -> TrainerStatus | None:
        """Called in every turn of the trainer's loop; `now` is monotonic seconds, `wanted` how many vertices each role
        of instances should have. Returns what is to be sent to the manager, every half second."""
        if self._observed_at is not None and self._starves:
            self._waited_s += now - self._observed_at
        self._observed_at = now
        running = {operator.dispatch for ref, operator in operators.items() if flow.running(ref)}
        self._starves = running == {Dispatch.PLANE}
        if self._sent_at is not None and now - self._sent_at < PULSE_S:
            return None
        self._sent_at = now
        return TrainerStatus(at_s=now, waited_s=self._waited_s, wanted=dict(wanted))
