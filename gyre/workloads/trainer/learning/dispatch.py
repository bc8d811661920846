"""Feeding the gangs: micro-batches as far as they have room, and the calls that are on their way to them.

Every learner is sent the same micro-batches, those that the ledger has first, and steps its optimizer when it has taken
all of a step's. What is on its way belongs to one gang: when that is dropped, all of it is sent again to the next.

This module must not know how micro-batches are made, or what a step means to anybody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gyre.errors import VertexLost
from gyre.graph.flow import Firing, Flow
from gyre.graph.model import Operator
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.sample_ledger import RecordedBatch
from gyre.workloads.gang.gang import PEERS_S, Gang, Outcome, is_failure, outcome_of
from gyre.workloads.trainer.group_state import GroupState
from gyre.workloads.trainer.learning.learners import Learner
from gyre.workloads.trainer.learning.lifecycle import GangLifecycle
from gyre.workloads.trainer.micro_batches import StepAssembly, is_made

GANG_CALLS = 2
"""Micro-batches that a gang has at a time: one in work, one waiting. What comes meanwhile makes the next one larger."""


@dataclass(slots=True)
class GangCall:
    """`batch` is the micro-batch that is taken; None where the optimizer steps."""

    firing: Firing
    batch: RecordedBatch | None
    gang: Gang
    outcomes: list[Outcome | VertexLost | None]
    failed_at: float | None = None
    """When the first rank failed, in monotonic seconds, while others have not ended."""

    @property
    def key(self) -> tuple[str, int]:
        """Which call it is, among all of a step: the operator, and the micro-batch it takes."""
        return self.firing.operator, self.batch.index if self.batch is not None else -1


@dataclass(slots=True)
class _Fed:
    """The micro-batches of the current step, by index, that a gang was sent, and those that it has taken."""

    sent: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)

    @property
    def has_room(self) -> bool:
        return len(self.sent) - len(self.taken) < GANG_CALLS


class GangDispatch:
    """The first of `learners` leads. `check(shares, step)` may refuse what is about to be sent; `hear(call, rank,
    outcome)` is called on the transport's thread."""

    def __init__(
        self,
        book: GroupState,
        flow: Flow,
        keeper: GangLifecycle,
        assembly: StepAssembly,
        learners: Sequence[Learner],
        *,
        streamed: bool,
        check: Callable[[list[list[Group]], int], None],
        hear: Callable[[GangCall, int, Outcome | VertexLost], None],
    ) -> None:
        self._book = book
        self._flow = flow
        self._keeper = keeper
        self._assembly = assembly
        self._learners: Mapping[str, Learner] = {learner.role: learner for learner in learners}
        self._leader = learners[0]
        self._streamed = streamed
        self._check = check
        self._hear = hear
        self._calls: dict[tuple[str, int], GangCall] = {}
        self._fed = {role: _Fed() for role in self._learners}

    @property
    def is_calling(self) -> bool:
        return bool(self._calls)

    def rewind(self) -> None:
        """The gangs are new, and stand at the book's last step: whatever was on its way is not any more."""
        for learner in self._learners.values():
            self._flow.rewind(learner.taker.ref, 0)
            self._flow.mark_done(learner.taker.ref, range(self._book.step * learner.micro_batches))
            self._flow.rewind(learner.pace.ref, 0)
            self._flow.mark_done(learner.pace.ref, range(self._book.step))
        self._calls.clear()
        self.begin_step()

    def begin_step(self) -> None:
        self._fed = {role: _Fed() for role in self._learners}

    # -- sending ------------------------------------------------------------------------------------

    def feed(self) -> None:
        """Micro-batches as far as there is room: first those that are recorded and were not sent to this gang, then
        new ones."""
        again = True
        while again:
            for learner in self._learners.values():
                self._feed(learner)
            again = self._fed[self._leader.role].has_room and self._assembly.take() is not None

    def _feed(self, learner: Learner) -> None:
        gang, fed, step = self._keeper.gang_of(learner.role), self._fed[learner.role], self._book.step + 1
        if gang is None:
            return
        for batch in self._book.batches.get(step, []):
            if batch.index in fed.sent:
                continue
            if not fed.has_room:
                return
            shares = self._book.shares(batch, gang.size)
            self._check(shares, step)
            firing = self._taking(learner, batch)
            if firing.index not in self._flow.running(firing.operator):
                self._flow.start(firing)
            fed.sent.add(batch.index)
            per_rank = [(share,) for share in shares]
            call = GangCall(firing, batch, gang, [None] * gang.size)
            self._send(call, learner.taker, per_rank, _gyre_step=step, _gyre_index=batch.index)

    def _taking(self, learner: Learner, batch: RecordedBatch) -> Firing:
        """The firing that a micro-batch belongs to: its own, or where they are streamed that of the whole step."""
        index = (batch.step - 1) * learner.micro_batches + (0 if self._streamed else batch.index)
        return Firing(learner.taker.ref, index)

    def step_optimizer(self, operator: Operator, firing: Firing) -> None:
        """Where the operator is what steps it, and the gang is there; a taker is fed, not fired."""
        gang, learner = self._keeper.gang_of(operator.role), self._learners[operator.role]
        if gang is None or operator.ref != learner.pace.ref:
            return
        self._flow.start(firing)
        step = firing.index + 1
        self._send(
            GangCall(firing, None, gang, [None] * gang.size),
            operator,
            [()] * gang.size,
            _gyre_step=step,
            _gyre_indices=len(self._book.batches[step]),
            _gyre_group_ids=self._book.ids_of(step),
        )

    def _send(
        self, call: GangCall, operator: Operator, per_rank: Sequence[tuple[Any, ...]], **kwargs: Any
    ) -> None:
        self._calls[call.key] = call
        for rank, future in enumerate(call.gang.submit(operator.method, per_rank, **kwargs)):
            future.add_done_callback(partial(self._heard, call, rank))

    def _heard(self, call: GangCall, rank: int, done: Future[Outcome]) -> None:
        """On the transport's thread."""
        self._hear(call, rank, outcome_of(done))

    # -- taking results in --------------------------------------------------------------------------

    def is_current(self, call: GangCall) -> bool:
        """Whether anybody waits for it: it may be the answer of a gang that is no more."""
        return self._calls.get(call.key) is call

    def ended(self, call: GangCall) -> list[Any] | None:
        """What the ranks returned, or None while some have not. Raises as `Gang.settle`."""
        if any(got is None for got in call.outcomes):
            if call.failed_at is None and any(is_failure(got) for got in call.outcomes):
                call.failed_at = time.monotonic()
            return None
        values = call.gang.settle(call.firing.operator, call.outcomes)
        del self._calls[call.key]
        return values

    def check_failed(self, now: float) -> None:
        """Raises as `Gang.settle` for a call in which a rank failed, and others do not come out."""
        for call in self._calls.values():
            if call.failed_at is not None and now - call.failed_at >= PEERS_S:
                call.gang.settle(call.firing.operator, call.outcomes)

    def taken(self, role: str, batch: RecordedBatch) -> None:
        """The role's ranks have taken a micro-batch."""
        fed, firing = self._fed[role], self._taking(self._learners[role], batch)
        fed.taken.add(batch.index)
        made = is_made(self._book, batch.step) and len(fed.taken) == len(self._book.batches[batch.step])
        if made or not self._streamed:
            self._flow.complete(firing)
        elif fed.taken == fed.sent:
            self._flow.cancel(firing)  # it waits for samples, and goes on when there are some
