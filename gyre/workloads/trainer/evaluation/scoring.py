"""The scoring of evaluations that are generated: the reward role scores them like training samples, a few groups a
call, so that every vertex of the role has some and training has its turn.

This module must not know when an evaluation is due, or what becomes of its result.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from gyre.rollouts.samples import Group
from gyre.workloads.gang.gang import Outcome, outcome_of
from gyre.workloads.trainer.evaluation.held_out import EvaluationKey, FiringPart
from gyre.workloads.trainer.firings.result_checks import SCORING
from gyre.workloads.trainer.firings.rollout_scores import to_score, with_scores
from gyre.workloads.trainer.firings.vertex_calls import VertexCalls
from gyre.workloads.trainer.inbox_messages import EvaluationScored, Inbox
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.returns import Expected


@dataclass(slots=True)
class Generated:
    """`groups` are the groups as generated, without scores; `scored` are those with scores, by the call's number."""

    evaluation: EvaluationKey
    groups: list[Group]
    scored: dict[int, list[Group]] = field(default_factory=dict)


class PartScoringCall(NamedTuple):
    """One of the calls that score a part, by its number."""

    part: FiringPart
    at: int


class EvaluationScoring:
    """`each_sample` is whether the reward's class looks at each sample by itself."""

    def __init__(
        self, calls: VertexCalls, retries: Retries, *, groups_per_call: int, each_sample: bool, inbox: Inbox
    ) -> None:
        self._calls = calls
        self._retries = retries
        self._groups_per_call = groups_per_call
        self._each_sample = each_sample
        self._inbox = inbox
        self._generated: dict[FiringPart, Generated] = {}
        self._open: dict[PartScoringCall, list[Group]] = {}
        """The groups of calls that have no result."""
        self._sent: set[PartScoringCall] = set()

    def add(self, part: FiringPart, generated: Generated) -> None:
        self._generated[part] = generated
        groups = [to_score(group) for group in generated.groups] if self._each_sample else generated.groups
        for at in range(0, len(groups), self._groups_per_call):
            self._open[PartScoringCall(part, at)] = groups[at : at + self._groups_per_call]

    def groups_of(self, call: PartScoringCall) -> list[Group]:
        """What the call is to score."""
        return self._open[call]

    @property
    def has_calls(self) -> bool:
        return bool(self._sent)

    def send(self, *, step: int, now: float) -> None:
        """Send what is not being scored, as far as the reward role has room."""
        for call, groups in self._open.items():
            if call in self._sent or not self._retries.may(("evaluation", call), now):
                continue
            member = self._calls.free_member(SCORING.role)
            if member is None:
                return
            expected = Expected(SCORING.method, rewards=True)
            future = self._calls.fire(member, SCORING, groups, step=step, index=0, expected=expected)
            future.add_done_callback(partial(self._call_ended, call, member))
            self._sent.add(call)

    def _call_ended(self, call: PartScoringCall, member: Member, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self._inbox.put(EvaluationScored(call, member, outcome_of(done)))

    def lost(self, call: PartScoringCall) -> None:
        """The vertex that was called died: another one may be called at once."""
        self._sent.discard(call)

    def failed(self, call: PartScoringCall, now: float) -> int:
        """The call failed: it may be repeated after a pause. Returns how often in a row it has failed."""
        self._sent.discard(call)
        return self._retries.failed(("evaluation", call), now)

    def scored(self, call: PartScoringCall, groups: list[Group]) -> tuple[Generated, list[Group]] | None:
        """Take a call's result in. Returns what was generated for its part, and the scored groups, where all of them
        are scored."""
        self._sent.discard(call)
        self._retries.succeeded(("evaluation", call))
        del self._open[call]
        generated = self._generated[call.part]
        generated.scored[call.at] = groups
        if sum(map(len, generated.scored.values())) < len(generated.groups):
            return None
        del self._generated[call.part]
        found = [group for _, some in sorted(generated.scored.items()) for group in some]
        if self._each_sample:
            pairs = zip(generated.groups, found, strict=True)
            found = [with_scores(group, scored.samples) for group, scored in pairs]
        return generated, found
