"""The scoring of evaluations that the rollout plane has generated: the reward role scores them like training samples.

This module must not know when an evaluation is due, or what becomes of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from gyre.errors import VertexLost
from gyre.graph.flow import Firing
from gyre.rollouts.samples import Group
from gyre.workloads.gang.gang import Outcome, outcome_of
from gyre.workloads.trainer.firings.result_checks import SCORE
from gyre.workloads.trainer.firings.vertex_calls import VertexCalls
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.returns import Expected

REWARD, _, METHOD = SCORE.partition(".")


class EvaluationScoring:
    """`on_result(version, member, outcome)` is called on the transport's thread."""

    def __init__(
        self,
        calls: VertexCalls,
        retries: Retries,
        *,
        on_result: Callable[[int, Member, Outcome | VertexLost], None],
    ) -> None:
        self._calls = calls
        self._retries = retries
        self._on_result = on_result
        self._unscored: dict[int, tuple[Firing, list[Group]]] = {}
        """By policy version."""
        self._sent: set[int] = set()

    def add(self, version: int, firing: Firing, groups: list[Group]) -> None:
        self._unscored[version] = (firing, groups)

    def groups_of(self, version: int) -> list[Group]:
        """The groups of an evaluation as they were generated, before they are scored."""
        return self._unscored[version][1]

    def send(self, *, step: int, now: float) -> None:
        """Send the evaluations that are not being scored, as far as the reward role has room."""
        for version in self._unscored.keys() - self._sent:
            _, groups = self._unscored[version]
            member = self._calls.free_member(REWARD)
            if member is None or not self._retries.may(("evaluation", version), now):
                continue
            expected = Expected(METHOD, rewards=True)
            future = self._calls.submit(
                member, METHOD, groups, _gyre_step=step, _gyre_index=0, _gyre_expected=expected
            )
            future.add_done_callback(partial(self._call_ended, version, member))
            self._sent.add(version)

    def _call_ended(self, version: int, member: Member, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self._on_result(version, member, outcome_of(done))

    def lost(self, version: int) -> None:
        """The vertex that was to score it died: it may be sent to another one at once."""
        self._sent.discard(version)

    def failed(self, version: int, now: float) -> int:
        """The scoring failed: it may be sent again after a pause. Returns how often in a row it has failed."""
        self._sent.discard(version)
        return self._retries.failed(("evaluation", version), now)

    def scored(self, version: int, groups: list[Group]) -> tuple[Firing, list[int], dict[str, Any]]:
        """Take an evaluation out. Returns its firing, the ids that were generated for it, and its result for the
        log."""
        self._sent.discard(version)
        self._retries.succeeded(("evaluation", version))
        firing, generated = self._unscored.pop(version)
        rewards = [sample.reward or 0.0 for group in groups for sample in group.samples]
        right = sum(reward >= 1.0 for reward in rewards)
        row = {"version": version, "accuracy": right / max(1, len(rewards)), "count": len(rewards)}
        return firing, [group.id for group in generated], row
