"""The scoring of evaluations that are generated: the reward role scores them like training samples.

This module must not know when an evaluation is due, or what becomes of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from gyre.errors import VertexLost
from gyre.rollouts.samples import Group
from gyre.workloads.gang.gang import Outcome, outcome_of
from gyre.workloads.trainer.evaluation.evaluation import Evaluation, Part
from gyre.workloads.trainer.firings.result_checks import SCORE
from gyre.workloads.trainer.firings.vertex_calls import VertexCalls
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.returns import Expected

REWARD, _, METHOD = SCORE.partition(".")


@dataclass(frozen=True, slots=True)
class Generated:
    """`groups` as they were generated, before they are scored."""

    evaluation: Evaluation
    groups: list[Group]


class EvaluationScoring:
    """`on_result(part, member, outcome)` is called on the transport's thread."""

    def __init__(
        self,
        calls: VertexCalls,
        retries: Retries,
        *,
        on_result: Callable[[Part, Member, Outcome | VertexLost], None],
    ) -> None:
        self._calls = calls
        self._retries = retries
        self._on_result = on_result
        self._unscored: dict[Part, Generated] = {}
        self._sent: set[Part] = set()

    def add(self, part: Part, generated: Generated) -> None:
        self._unscored[part] = generated

    def generated(self, part: Part) -> Generated:
        return self._unscored[part]

    @property
    def has_calls(self) -> bool:
        return bool(self._sent)

    def send(self, *, step: int, now: float) -> None:
        """Send the evaluations that are not being scored, as far as the reward role has room."""
        for part, generated in self._unscored.items():
            if part in self._sent or not self._retries.may(("evaluation", part), now):
                continue
            member = self._calls.free_member(REWARD)
            if member is None:
                return
            future = self._calls.submit(
                member,
                METHOD,
                generated.groups,
                _gyre_step=step,
                _gyre_index=0,
                _gyre_expected=Expected(METHOD, rewards=True),
            )
            future.add_done_callback(partial(self._call_ended, part, member))
            self._sent.add(part)

    def _call_ended(self, part: Part, member: Member, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self._on_result(part, member, outcome_of(done))

    def lost(self, part: Part) -> None:
        """The vertex that was to score it died: it may be sent to another one at once."""
        self._sent.discard(part)

    def failed(self, part: Part, now: float) -> int:
        """The scoring failed: it may be sent again after a pause. Returns how often in a row it has failed."""
        self._sent.discard(part)
        return self._retries.failed(("evaluation", part), now)

    def scored(self, part: Part) -> Generated:
        """Take an evaluation out: it is scored."""
        self._sent.discard(part)
        self._retries.succeeded(("evaluation", part))
        return self._unscored.pop(part)
