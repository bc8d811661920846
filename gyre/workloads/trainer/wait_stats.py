"""Who waits for whom: the share of the time in which a role had nothing to do, by the role that it waited for."""

from __future__ import annotations

from collections.abc import Mapping

from gyre.graph.elements import Operator
from gyre.graph.flow import Flow

HALF_LIFE_S = 10.0
"""Half-life of a share's past, so that shares describe the present rather than the whole run."""


class WaitStats:
    def __init__(self) -> None:
        self._at: float | None = None
        self._waited: dict[str, float] = {}
        self._total = 0.0

    def observe(self, flow: Flow, operators: Mapping[str, Operator], now: float) -> None:
        """Add the time since the last call to what each idle role waits for. `now` is monotonic seconds."""
        if self._at is not None:
            passed = max(0.0, now - self._at)
            keep = 0.5 ** (passed / HALF_LIFE_S)
            self._total = self._total * keep + passed
            self._waited = {key: value * keep for key, value in self._waited.items()}
            for key in self._idle(flow, operators):
                self._waited[key] = self._waited.get(key, 0.0) + passed
        self._at = now

    def shares(self) -> dict[str, float]:
        """`{"actor waits for reward": 0.41, …}`, the largest first."""
        if self._total <= 0:
            return {}
        found = {key: round(value / self._total, 3) for key, value in self._waited.items()}
        return dict(sorted(((k, v) for k, v in found.items() if v >= 0.01), key=lambda item: -item[1]))

    @staticmethod
    def _idle(flow: Flow, operators: Mapping[str, Operator]) -> list[str]:
        idle: dict[str, str] = {}
        busy = {operator.role for ref, operator in operators.items() if flow.running(ref)}
        for ref, operator in operators.items():
            blocker = flow.blocked_by(ref)
            if operator.role not in busy and operator.role not in idle and blocker:
                idle[operator.role] = blocker.split(".")[0]
        return [f"{role} waits for {other}" for role, other in idle.items() if role != other]
