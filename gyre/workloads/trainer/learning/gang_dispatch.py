"""The calls of the gangs: micro-batches as far as they have room, then the optimizer's step.

Every learner is sent the same micro-batches, those that the ledger has first, and steps its optimizer after it has
taken all of a step's. A call belongs to the gang that it was sent to: when that gang is lost, all of the step is sent
again to the next one.

This module must not know how micro-batches are made, or what a step means to anybody else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gyre.errors import NOT_FINITE, VertexDied
from gyre.graph.elements import Operator
from gyre.graph.flow import Firing, Flow
from gyre.rollouts.trainer.sample_ledger import RecordedBatch
from gyre.workloads.gang.gang import PEERS_S, Outcome, is_failure, outcome_of
from gyre.workloads.gang.learner_gang import LearnerGang, Sent
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.groups.micro_batches import StepAssembly, check_staleness, is_made
from gyre.workloads.trainer.inbox_messages import GangCallEnded, Inbox
from gyre.workloads.trainer.job_graph import TrainedGang
from gyre.workloads.trainer.learning.lifecycle import GangLifecycle

GANG_CALLS = 2
"""Micro-batches that a gang has at a time: one in work, one waiting. Samples that arrive meanwhile make the next one
larger."""


@dataclass(slots=True)
class GangCall:
    """`batch` is the micro-batch that is taken; None where the optimizer steps."""

    firing: Firing
    batch: RecordedBatch | None
    gang: LearnerGang
    outcomes: list[Outcome | VertexDied | None]
    skips: bool = False
    """Whether the optimizer's step is to leave the weights as they are."""
    failed_at: float | None = None
    """When the first rank failed, in monotonic seconds, while others have not ended."""

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the call among all calls of a step: the operator, and the micro-batch that it takes."""
        return self.firing.operator, self.batch.index if self.batch is not None else -1


@dataclass(slots=True)
class _Progress:
    """The micro-batches of the current step, by index, that a gang was sent, and those that it has taken."""

    sent: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)

    @property
    def has_room(self) -> bool:
        return len(self.sent) - len(self.taken) < GANG_CALLS


class GangDispatch:
    """The first of `learners` leads. No micro-batch of tokens that are older than `max_staleness` is sent; None where a
    user's function has judged its groups."""

    def __init__(
        self,
        groups: GroupState,
        flow: Flow,
        gangs: GangLifecycle,
        assembly: StepAssembly,
        learners: Sequence[TrainedGang],
        *,
        streamed: bool,
        skips_at_most: int,
        max_staleness: int | None,
        inbox: Inbox,
    ) -> None:
        self._groups = groups
        self._flow = flow
        self._gangs = gangs
        self._assembly = assembly
        self._learners: Mapping[str, TrainedGang] = {learner.role: learner for learner in learners}
        self._leader = learners[0]
        self._streamed = streamed
        self._skips_at_most = skips_at_most
        self._max_staleness = max_staleness
        self._inbox = inbox
        self._calls: dict[tuple[str, int], GangCall] = {}
        self._progress = {role: _Progress() for role in self._learners}

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer steps now. A step that is not done by then is published."""
        return any(call.batch is None for call in self._calls.values())

    @property
    def could_train(self) -> bool:
        """Whether there is something for the gangs to do, or no gang to do it."""
        gang_refs = {
            operator.ref
            for learner in self._learners.values()
            for operator in (learner.accumulate_op, learner.apply_op)
        }
        return (
            self._gangs.leader is None
            or self._assembly.has_news
            or any(firing.operator in gang_refs for firing in self._flow.enabled())
        )

    def rewind(self) -> None:
        """The gangs are new and stand at the ledger's last step, or there are none: forget the calls to the gangs
        before them. A step of the leader's is done when its weights are out."""
        for learner in self._learners.values():
            self._flow.rewind(learner.accumulate_op.ref, 0)
            self._flow.mark_done(learner.accumulate_op.ref, range(self._groups.step * learner.micro_batches))
            self._flow.rewind(learner.apply_op.ref, 0)
            stepped = self._gangs.published_step if learner is self._leader else self._groups.step
            self._flow.mark_done(learner.apply_op.ref, range(stepped))
        self._calls.clear()
        self.begin_step()

    def begin_step(self) -> None:
        self._progress = {role: _Progress() for role in self._learners}

    # -- sending ------------------------------------------------------------------------------------

    def send_micro_batches(self) -> None:
        """Send as many as the gangs have room for: first those that are recorded and were not sent to these gangs, then
        new ones."""
        again = True
        while again:
            for learner in self._learners.values():
                self._send_recorded(learner)
            again = self._progress[self._leader.role].has_room and self._assembly.take() is not None

    def _send_recorded(self, learner: TrainedGang) -> None:
        gang, progress = self._gangs.gang_of(learner.role), self._progress[learner.role]
        step = self._groups.step + 1
        if gang is None:
            return
        for batch in self._groups.batches.get(step, []):
            if batch.index in progress.sent:
                continue
            if not progress.has_room:
                return
            shares = self._groups.shares(batch, gang.size)
            if self._max_staleness is not None:
                check_staleness(shares, step, max_staleness=self._max_staleness)
            firing = self._firing_of(learner, batch)
            if firing.index not in self._flow.running(firing.operator):
                self._flow.start(firing)
            progress.sent.add(batch.index)
            call = GangCall(firing, batch, gang, [None] * gang.size)
            self._await(call, gang.accumulate(shares, step=step, index=batch.index))

    def _firing_of(self, learner: TrainedGang, batch: RecordedBatch) -> Firing:
        """The accumulate operator's firing that a micro-batch belongs to: its own, or that of the whole step where
        micro-batches are streamed."""
        index = (batch.step - 1) * learner.micro_batches + (0 if self._streamed else batch.index)
        return Firing(learner.accumulate_op.ref, index)

    def step_optimizer(self, operator: Operator, firing: Firing) -> None:
        """Start an enabled firing of an apply operator, if the gang is there. An accumulate operator is not started
        here: `send_micro_batches` does that."""
        gang, learner = self._gangs.gang_of(operator.role), self._learners[operator.role]
        if gang is None or operator.ref != learner.apply_op.ref:
            return
        self._flow.start(firing)
        step = firing.index + 1
        indices, ids = len(self._groups.batches[step]), self._groups.ids_of(step)
        call = GangCall(firing, None, gang, [None] * gang.size)
        self._await(call, gang.apply(step=step, indices=indices, group_ids=ids))

    def skip_batch(self, call: GangCall) -> str:
        """Have the ranks skip the step that all of them refuse because its gradient is not finite, which leaves them
        as they were. Returns what they said; "" where it is not to be skipped. A job with an auxiliary learner skips
        nothing, because that one has taken the batch."""
        step = self._groups.step + 1
        failures = [got[1] for got in call.outcomes if isinstance(got, tuple) and got[0] == "error"]
        refused = len(failures) == call.gang.size and all(one.code == NOT_FINITE for one in failures)
        spent = self._groups.skipped_in_a_row >= self._skips_at_most
        if call.batch is not None or call.skips or not refused or spent or len(self._learners) > 1:
            return ""
        skipping = GangCall(call.firing, None, call.gang, [None] * call.gang.size, skips=True)
        # With all that an apply has, so that a class that knows no skipping refuses the batch again.
        indices, ids = len(self._groups.batches[step]), self._groups.ids_of(step)
        self._await(skipping, call.gang.apply(step=step, indices=indices, group_ids=ids, skip=True))
        return str(failures[0].error)

    def _await(self, call: GangCall, sent: Sent[Any]) -> None:
        self._calls[call.key] = call
        for rank, future in enumerate(sent.futures):
            future.add_done_callback(partial(self._rank_ended, call, rank))

    def _rank_ended(self, call: GangCall, rank: int, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self._inbox.put(GangCallEnded(call, rank, outcome_of(done)))

    # -- taking results in --------------------------------------------------------------------------

    def is_current(self, call: GangCall) -> bool:
        """Whether the call is still waited for, rather than one to a gang that was lost."""
        return self._calls.get(call.key) is call

    def results_of(self, call: GangCall) -> list[Any] | None:
        """What the ranks returned, or None while some have not. Raises like `Gang.settle`."""
        if any(got is None for got in call.outcomes):
            if call.failed_at is None and any(is_failure(got) for got in call.outcomes):
                call.failed_at = time.monotonic()
            return None
        values = call.gang.settle(call.firing.operator, call.outcomes)
        del self._calls[call.key]
        return values

    def check_failed(self, now: float) -> None:
        """Raises like `Gang.settle` for a call that one rank failed and others have not left within `PEERS_S`."""
        for call in self._calls.values():
            if call.failed_at is not None and now - call.failed_at >= PEERS_S:
                call.gang.settle(call.firing.operator, call.outcomes)

    def micro_batch_taken(self, role: str, batch: RecordedBatch) -> None:
        """The role's ranks have taken a micro-batch."""
        progress, firing = self._progress[role], self._firing_of(self._learners[role], batch)
        progress.taken.add(batch.index)
        is_last = is_made(self._groups, batch.step) and len(progress.taken) == len(
            self._groups.batches[batch.step]
        )
        if is_last or not self._streamed:
            self._flow.complete(firing)
        elif progress.taken == progress.sent:
            self._flow.cancel(firing)  # it waits for samples, and is started again when there are some
