"""Evaluations that the rollout plane has answered and the reward role has not judged yet.

What is generated for an evaluation is scored like everything else that is generated.

This module must not know when an evaluation is due, or what becomes of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from gyre.graph.flow import Firing
from gyre.rollouts.samples import Group
from gyre.workloads.gang.gang import Outcome, outcome_of
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.trainer.vertex_calls import VertexCalls
from gyre.workloads.vertex.membership import Member


class EvaluationScoring:
    """`hear(version, member, outcome)` is called on the transport's thread."""

    def __init__(
        self, calls: VertexCalls, retries: Retries, *, hear: Callable[[int, Member, Any], None]
    ) -> None:
        self._calls = calls
        self._retries = retries
        self._hear = hear
        self._open: dict[int, tuple[Firing, list[Group]]] = {}
        self._sent: set[int] = set()

    def add(self, version: int, firing: Firing, groups: list[Group]) -> None:
        self._open[version] = (firing, groups)

    def send(self, *, step: int, now: float) -> None:
        """What is not on its way, as far as somebody can judge it."""
        for version in self._open.keys() - self._sent:
            _, groups = self._open[version]
            member = self._calls.free_member("reward")
            if member is None or not self._retries.may(("judge", version), now):
                continue
            future = self._calls.submit(member, "score", groups, _gyre_step=step, _gyre_index=0)
            future.add_done_callback(partial(self._heard, version, member))
            self._sent.add(version)

    def _heard(self, version: int, member: Member, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self._hear(version, member, outcome_of(done))

    def again(self, version: int) -> None:
        """Who was to judge it is lost."""
        self._sent.discard(version)

    def failed(self, version: int, now: float) -> None:
        self._sent.discard(version)
        self._retries.failed(("judge", version), now)

    def judged(self, version: int, scored: list[Group]) -> tuple[Firing, list[int], dict[str, Any]]:
        """The firing that is done now, the groups that it was about, and what came of it."""
        self._sent.discard(version)
        self._retries.succeeded(("judge", version))
        firing, groups = self._open.pop(version)
        rewards = [sample.reward or 0.0 for group in scored for sample in group.samples]
        right = sum(reward >= 1.0 for reward in rewards)
        row = {"version": version, "accuracy": right / max(1, len(rewards)), "count": len(rewards)}
        return firing, [group.id for group in groups], row
