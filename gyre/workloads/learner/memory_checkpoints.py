"""The state of every rank of a gang in its machine's memory: one whose rank was killed goes on from there bit by bit.
Any other layout is the disk's.

Invariants:
- *all or none*: ranks keep states only if each of them has the room, and take one back only if each has that one whole;
- *one step, one life*: states belong together when they are of one step and of one gang's life (`lineage`). Two gangs
  that made the same step need not have the same bits;
- *copied before changed*: a copy is made beside the passes of the next step, which leave the state as it is; whoever
  changes it calls `settle` before;
- *seldom enough*: training waits for copies for at most `share` of the time, as the first rank measures it, and what a
  checkpoint on the disk needs is copied besides.

Every method but `prepare`, `settle`, `close` and `unlink` is a collective of all ranks. This module must not know what
a step is made of, or where else a state may come from.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from gyre.workloads.base import WorkloadContext
from gyre.workloads.gang.host_memory import HeldSlot, HostMemory, NoHostMemory, plan
from gyre.workloads.gang.state_files import PAGE_BYTES, padded
from gyre.workloads.gang.world import World
from gyre.workloads.learner.devices import DeviceMemory

Named = list[tuple[str, Tensor]]


class Part(Protocol):
    """A tensor of the state, by a name that this rank's layout decides."""

    @property
    def name(self) -> str: ...

    @property
    def tensor(self) -> Tensor: ...


P = TypeVar("P", bound=Part)


class RankState(Protocol[P]):
    """One rank's state, as its back end knows it."""

    @property
    def layout(self) -> str:
        """What decides the parts: states of another layout are not this rank's."""
        ...

    def parts(self) -> list[P]:
        """Everything of this rank that a later step depends on, in the same order each time."""
        ...

    def written(self, parts: Sequence[P]) -> Sequence[P]:
        """Those that this rank writes to a checkpoint on the disk."""
        ...

    def taken(self, parts: Sequence[P]) -> None:
        """Other values were copied into the tensors of the parts: take over what is no tensor of the model."""
        ...


@dataclass(frozen=True, slots=True)
class Copied(Generic[P]):
    """Parts of a state in host memory: the bytes that are written one after another, and where in the file each of the
    `parts` begins. `release` says that nobody reads them any more."""

    pieces: Sequence[memoryview]
    parts: Sequence[P]
    offsets: Sequence[int]
    release: Callable[[], None] = lambda: None


class MemoryCheckpoints(Generic[P]):
    """Of ranks whose state is on `device`. `purpose` names the job and the role: see `HostMemory`. `share` of the time
    may be spent on copies; 1 keeps every step's state."""

    def __init__(
        self, state: RankState[P], ranks: World, purpose: str, *, device: torch.device, share: float
    ) -> None:
        self._state = state
        self._ranks = ranks
        self._share = share
        self._layout = f"{state.layout} of {ranks.world_size}: "
        self._lineage = self._layout + self._ranks.from_first(uuid.uuid4().hex)
        self._has_room = False
        self._making: threading.Thread | None = None
        self._no_room = ""
        self._saved: int | None = None
        """The step whose state the newest slot has."""
        self._is_copying = False
        self._hold_s = 0.0
        """Seconds that the last copy took of the training's time."""
        self._next_at = 0.0
        self._memory: HostMemory | None = None
        self.trouble = ""
        """Why there are none, where there are none."""
        problem = ""
        try:
            self._memory = HostMemory(purpose, self._ranks.rank, memory=DeviceMemory(device))
        except (NoHostMemory, OSError) as error:
            problem = str(error)
        self._together(problem, keep=True)  # a later gang may find what this one cannot take

    @property
    def is_on(self) -> bool:
        return self._memory is not None

    def status(self) -> dict[str, Any]:
        """Facts for people: how long the last copy held training up, of which step it was, and what keeps states from
        being kept."""
        if self._memory is None:
            return {"trouble": self.trouble}
        return {"hold_s": round(self._hold_s, 4), "step": self._saved}

    def prepare(self) -> None:
        """Begin to take the memory, so that the first copy need not wait for it."""
        if self._memory is not None and not self._has_room and self._making is None:
            self._making = threading.Thread(
                target=self._make_room,
                args=(self._memory, named(self._state.parts())),
                name="gyre-host-room",
                daemon=True,
            )
            self._making.start()

    def _make_room(self, memory: HostMemory, tensors: Named) -> None:
        try:
            memory.make_room(tensors)
        except (NoHostMemory, OSError) as error:
            self._no_room = str(error)

    def _have_room(self) -> bool:
        """Whether every rank has room for its states. Where one has none, nobody keeps any from now on."""
        if not self._has_room and self._memory is not None:
            self.prepare()
            self._join()
            self._has_room = self._together(self._no_room, keep=False)
        return self._has_room

    def _join(self) -> None:
        if self._making is not None:
            self._making.join()  # ends when the kernel and the driver have given the memory
            self._making = None

    def save_if_due(self, step: int, metadata: dict[str, Any]) -> bool:
        """After step `step`, whose `metadata` comes back with it: JSON, the same on every rank. Whether it was due."""
        if self._memory is None:
            return False
        due = self._ranks.rank == 0 and time.monotonic() >= self._next_at
        if not self._ranks.sum([float(due)])[0] or not self._have_room():
            return False
        # What fails from here on fails on this rank alone: the others keep a state that no gang will agree on.
        self._save(self._memory, step, metadata, named(self._state.parts()))
        return True

    def settle(self) -> None:
        """Wait until the last copy is made: from here on the state may be changed. No collective."""
        if self._memory is None:
            return
        waited_s = self._memory.settle()
        if self._is_copying:
            self._is_copying = False
            self._hold_s += waited_s
            self._next_at = time.monotonic() + self._hold_s * (1.0 / self._share - 1.0)

    def _save(self, memory: HostMemory, step: int, metadata: dict[str, Any], tensors: Named) -> None:
        began, self._saved = time.monotonic(), None
        try:
            memory.save(tensors, lineage=self._lineage, step=step, book=metadata)
            self._saved, self._is_copying = step, True
        except (NoHostMemory, OSError) as error:
            print(f"step {step} is not in host memory: {error}", flush=True)
        self._hold_s = time.monotonic() - began

    def copied(self, step: int, metadata: dict[str, Any]) -> Copied[P] | None:
        """What this rank writes of the state of `step`, at which it is, for the disk; None where it is not in memory.
        Later copies leave the slot alone until it is released."""
        if self._memory is None or not self._have_room():
            return None
        memory, parts = self._memory, self._state.parts()
        if self._saved != step:
            self._save(memory, step, metadata, named(parts))
        slot = memory.hold(step) if self._saved == step else None
        if slot is None:
            return None
        return _written_of(slot, parts, self._state.written(parts), memory.release)

    def restore(
        self,
        *,
        newer_than: int,
        at_most: int,
        before: Callable[[], None] = lambda: None,
        beside: Callable[[], None] = lambda: None,
    ) -> dict[str, Any] | None:
        """See `StateMemory.restore`."""
        if self._memory is None:
            return None
        self._join()
        parts = self._state.parts()
        tensors = named(parts)
        spans = tuple(plan(tensors)[0])
        mine = {
            (record.lineage, record.step): record
            for record in self._memory.records()
            if newer_than < record.step <= at_most
            and record.lineage.startswith(self._layout)
            and record.spans == spans
        }
        offered = [tuple(key) for key in json.loads(self._ranks.from_first(json.dumps(list(mine))))]
        counts = self._ranks.sum([0.0, *(float(key in mine) for key in offered)])[1:]
        for key, count in zip(offered, counts, strict=True):
            if count < self._ranks.world_size:
                continue
            before()
            if self._all(self._memory.load(mine[key], tensors, beside=beside)):
                self._state.taken(parts)
                self._saved = mine[key].step
                return mine[key].book
        return None

    def changed(self) -> None:
        """The state of this rank was replaced by one from elsewhere. No collective is made of it."""
        self._saved = None

    def drop(self) -> None:
        """The states are of a history that is not gone on with. No collective is made of it."""
        self._join()
        self._saved = None
        if self._memory is not None:
            self._memory.drop()

    def close(self, *, keep: bool) -> None:
        """Leave the states to a successor, or remove them. Nobody may be reading them."""
        self._join()
        if self._memory is not None:
            self._memory.close(keep=keep)
            self._memory = None

    def unlink(self) -> None:
        """Remove this rank's, on another thread than the one that may be at work here. No collective."""
        memory = self._memory
        if memory is not None:
            memory.unlink()

    # -- all ranks together --------------------------------------------------------------------------

    def _together(self, problem: str, *, keep: bool) -> bool:
        """Whether no rank has a problem. If one has, no rank keeps states from now on."""
        if self._all(not problem):
            return True
        self.trouble = problem or "another rank has no room for its state"
        print(f"no checkpoints in host memory: {self.trouble}", flush=True)
        self.close(keep=keep)
        return False

    def _all(self, holds: bool) -> bool:
        return self._ranks.sum([float(not holds)])[0] == 0.0


def purpose_of(context: WorkloadContext) -> str:
    """What names the place of a role's states on a machine: see `HostMemory`."""
    return f"{context.job_id} {context.directory.resolve()} {context.role}"


def named(parts: Sequence[Part]) -> Named:
    """The parts as `HostMemory` takes them."""
    return [(part.name, part.tensor) for part in parts]


def _written_of(
    slot: HeldSlot, parts: Sequence[P], written: Sequence[P], release: Callable[[], None]
) -> Copied[P]:
    """Those of the parts in a slot that are to be `written`: whole pages of the slot, as few runs as there can be."""
    wanted = {id(part) for part in written}
    spans, _ = plan(named(parts))
    runs: list[tuple[int, int]] = []
    offsets, before = [], 0
    for part, span in zip(parts, spans, strict=True):
        if id(part) not in wanted:
            continue
        first, last = span.offset // PAGE_BYTES * PAGE_BYTES, padded(span.offset + span.size_bytes)
        if runs and first <= runs[-1][1]:
            first = runs[-1][0]
            runs[-1] = first, max(last, runs[-1][1])
        else:
            before = sum(end - begin for begin, end in runs)
            runs.append((first, last))
        offsets.append(before + span.offset - first)
    pieces = [piece for first, last in runs for piece in slot[first:last]]
    return Copied(pieces, [part for part in parts if id(part) in wanted], offsets, release)
