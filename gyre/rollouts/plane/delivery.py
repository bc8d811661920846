"""Complete groups on their way from the rollout manager to the trainer.

Invariants:
- *delivered until taken*: a group that is complete stays here until the trainer says that it is in its ledger, and goes
  to each trainer that attaches;
- *asked again, answered again*: a trainer lays aside what it did not ask for; it gets it once more when it does;
- *delivered in full*: a group that no frame can hold goes in several, one after another;
- *a window*: no more is on its way than the trainer reads; what is complete beyond it waits here, as it does in the
  manager's ledger;
- *ahead, and again*: a trainer that wants it is told of samples when they have finished, while the ledger writes them
  and their groups may lack others. That is for its scoring alone: they are delivered with their groups all the same.

This module must not know who generated a group.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from gyre.rollouts.plane.requests import InFlightSample
from gyre.rollouts.protocol.frames import Done, Finished, FinishedSample
from gyre.rollouts.samples import Group, Sample, pack_groups

GROUPS_PER_FRAME = 64
PORTION_BYTES = 4 << 20
"""Of one frame, well below the frame limit; a group that is larger goes in several."""

WINDOW_BYTES = 32 << 20
"""Most bytes that are on their way to the trainer."""


_BYTES_A_TOKEN = 8
"""An id and a log-prob; the rest of a sample is small beside them."""


class Deliverable(Protocol):
    """A requested group, which has a number of its own."""

    @property
    def number(self) -> int: ...
    @property
    def purpose(self) -> str: ...
    @property
    def group(self) -> Group: ...
    def complete(self) -> Group:
        """The group with its samples, which are all there."""
        ...


class _Portion(NamedTuple):
    """What one frame brings."""

    purpose: str
    groups: list[Group]
    more: bool = False
    """The last group goes on in the next one."""


class Delivery:
    """`open_requests` are those of the open groups, by number: a group that was closed is not delivered."""

    def __init__(self, open_requests: Mapping[int, Deliverable]) -> None:
        self.requests = open_requests
        self._samples_ahead = False
        self._ready: dict[str, dict[int, Deliverable]] = defaultdict(dict)
        """Complete groups in the ledger that the trainer has not taken, by purpose and group."""
        self._outbox: dict[int, Deliverable] = {}
        """Of these, what goes to the trainer that is attached, and which of them it was sent."""
        self._sent: set[int] = set()
        self._parts: deque[_Portion] = deque()
        """The rest of a group that is too large for one frame; nothing else is sent before it."""

    def attached(self, *, samples_ahead: bool = False) -> None:
        """Another trainer has attached, which was sent nothing yet. `samples_ahead`: it wants to be told of finished
        samples."""
        self._samples_ahead = samples_ahead
        self._outbox, self._sent, self._parts = {}, set(), deque()

    @property
    def is_due(self) -> bool:
        """Whether there is something to send."""
        return bool(self._outbox or self._parts)

    def complete(self, requests: Iterable[Deliverable]) -> None:
        """Deliver these groups, which are complete in the ledger."""
        open_ones = [request for request in requests if request.number in self.requests]
        for request in open_ones:
            self._ready[request.purpose][request.group.id] = request
        self._deliver(open_ones)

    def finished(self, samples: Iterable[InFlightSample]) -> Iterator[Finished]:
        """These samples have finished: the notice of it, for a trainer that wants it and reads that fast."""
        if not self._samples_ahead:
            return
        by_purpose: dict[str, list[FinishedSample]] = defaultdict(list)
        for sample in samples:
            if sample.finish:
                tokens = sample.tokens()[0].astype("<i4").tobytes()
                told = FinishedSample(
                    group=sample.request.group.id, index=sample.index, tokens=tokens, finish=sample.finish
                )
                by_purpose[sample.request.purpose].append(told)
        for purpose, told_samples in by_purpose.items():
            for portion in _portions_of(told_samples):
                yield Finished(purpose=purpose, samples=portion)

    def holds(self, purpose: str) -> bool:
        """Whether anything of it is complete and not taken."""
        return purpose in self._ready

    def again(self, purpose: str, ids: Iterable[int]) -> None:
        """The trainer asks for these groups: those that are complete go out now, also if they were sent before. So does
        the rest of the purpose that was not: an earlier trainer may have had it, and this one says so."""
        ready = self._ready.get(purpose, {})
        self._sent.difference_update(ready[group_id].number for group_id in ids if group_id in ready)
        self._deliver(list(ready.values()))

    def taken(self, purpose: str, ids: Iterable[int]) -> None:
        ready = self._ready.get(purpose, {})
        for group_id in ids:
            if (request := ready.pop(group_id, None)) is not None:
                self._sent.discard(request.number)
        if not ready:
            self._ready.pop(purpose, None)

    def _deliver(self, requests: list[Deliverable]) -> None:
        self._outbox.update(
            {request.number: request for request in requests if request.number not in self._sent}
        )

    def next_frame(self) -> Done | None:
        """The next portion of complete groups, of one purpose; None where there is none. To be asked for as fast as
        the trainer reads."""
        portion = self._parts.popleft() if self._parts else self._next_portion()
        return _frame_of(portion) if portion is not None else None

    def _next_portion(self) -> _Portion | None:
        groups: list[Group] = []
        purpose, size = "", 0
        for number, request in list(self._outbox.items()):
            if number not in self.requests:
                del self._outbox[number]
                continue
            if groups and request.purpose != purpose:
                continue
            purpose, group = request.purpose, request.complete()
            group_bytes = _BYTES_A_TOKEN * group.positions
            if groups and size + group_bytes > PORTION_BYTES:
                break
            self._sent.add(number)
            del self._outbox[number]
            if group_bytes > PORTION_BYTES:
                self._parts.extend(_parts_of(purpose, group))
                return self._parts.popleft()
            groups.append(group)
            size += group_bytes
            if len(groups) == GROUPS_PER_FRAME:
                break
        return _Portion(purpose, groups) if groups else None


def _portions_of(samples: Iterable[FinishedSample]) -> Iterator[list[FinishedSample]]:
    portion: list[FinishedSample] = []
    size = 0
    for sample in samples:
        portion.append(sample)
        size += len(sample.tokens)
        if size >= PORTION_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _parts_of(purpose: str, group: Group) -> list[_Portion]:
    """The group in portions: each has some of its samples, the first its prompt too."""
    portions: list[list[Sample]] = []
    size = 0
    for sample in group.samples:
        size += _BYTES_A_TOKEN * len(sample.token_ids)
        if not portions or size > PORTION_BYTES:
            portions.append([])
            size = _BYTES_A_TOKEN * len(sample.token_ids)
        portions[-1].append(sample)
    first = Group(group.id, group.prompt_ids, group.meta, portions[0])
    rest = [Group(group.id, group.prompt_ids[:0], {}, samples) for samples in portions[1:]]
    parts = [first, *rest]
    return [_Portion(purpose, [part], more=part is not parts[-1]) for part in parts]


def _frame_of(portion: _Portion) -> Done:
    return Done(purpose=portion.purpose, groups=pack_groups(portion.groups), more=portion.more)
