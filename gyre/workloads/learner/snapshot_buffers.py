"""Host memory that holds a whole model's weights, taken once and used again for every later step.

A buffer is free when no tensor in it is left, whoever had it: the actor, or a thread that publishes what is in it.
There are as many buffers as were ever in use at once, and on a CUDA device `MADE_READY` from the beginning.

Invariant *nobody's memory is written*: a new snapshot goes into a free buffer, so a tensor's content stays as long as
somebody has the tensor, or a view of it.

Memory of a CUDA device's host is page-locked, which takes longer than many copies. This module must not know whose
tensors are copied, or who reads them.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from gyre.workloads.learner.devices import page_locked

SLAB_BYTES = 64 << 20
LARGEST_SLAB_BYTES = 1 << 30
"""Of one allocation: each has twice the bytes of the one before, for several threads make and page-lock memory where
there is much of it. A larger tensor has its own."""

ALIGNMENT = 256

MADE_READY = 2
"""Buffers that are made beside whatever comes first: a step must not wait for the second when the publication of the
step before is not over, and page-locking 7 GB takes five seconds."""


class SnapshotBuffer:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._slabs: list[torch.Tensor] = []
        self._last = -1
        """The last slab of which something is given away."""
        self._used = 0
        """Bytes of it that are."""
        self._places: dict[str, tuple[int, int, int]] = {}
        """By name: the slab, the first byte, and the number of bytes."""
        self._placed = 0
        self._gone: deque[None] = deque()
        """As many as of the tensors that were placed are gone; changed by whichever thread drops the last of one."""
        self._unpin: list[Callable[[], None]] = []
        self.ready = threading.Event()
        """Nobody makes its memory ready at this moment."""
        self.ready.set()

    @property
    def is_free(self) -> bool:
        return len(self._gone) == self._placed

    def forget(self) -> None:
        """Forget the tensors that were placed, all of which are gone."""
        self._placed = 0
        self._gone.clear()

    def place(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor for this name, whose content is undefined: in the same place each time."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        if name not in self._places or self._places[name][2] != nbytes:
            self._places[name] = self._room(nbytes)
        slab, first, _ = self._places[name]
        memory = self._slabs[slab].numpy()[first : first + nbytes]
        self._placed += 1
        weakref.finalize(memory, self._gone.append, None)  # a tensor keeps it until its last view is gone
        return torch.from_numpy(memory).view(dtype).view(shape)

    def prepare(self, nbytes: int) -> None:
        """Have page-locked memory for tensors of so many bytes. Nothing is placed meanwhile."""
        while self._pinned and sum(slab.numel() for slab in self._slabs) < nbytes:
            self._add(0)

    def _room(self, nbytes: int) -> tuple[int, int, int]:
        while self._last < 0 or self._used + nbytes > self._slabs[self._last].numel():
            self._last, self._used = self._last + 1, 0
            if self._last == len(self._slabs):
                self._add(nbytes)
        first, self._used = self._used, -(-(self._used + nbytes) // ALIGNMENT) * ALIGNMENT
        return self._last, first, nbytes

    def _add(self, nbytes: int) -> None:
        least = min(SLAB_BYTES << len(self._slabs), LARGEST_SLAB_BYTES) if self._pinned else 0
        slab = torch.empty(max(least, nbytes), dtype=torch.uint8)
        if self._pinned:
            self._unpin.append(page_locked(slab, self._device))
        self._slabs.append(slab)

    def close(self) -> None:
        """Unlock the pages. Tensors may still be read."""
        for unpin in self._unpin:
            unpin()
        self._unpin = []


class SnapshotBuffers:
    """For one thread that takes; anybody may drop tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.all: list[SnapshotBuffer] = []
        self._preparing: threading.Thread | None = None

    def prepare(self, nbytes: int) -> None:
        """Begin to have page-locked memory for snapshots of so many bytes, beside whatever the caller does next."""
        if self._device.type != "cuda" or not nbytes:
            return
        made = [SnapshotBuffer(self._device) for _ in range(MADE_READY)]
        for buffer in made:
            buffer.ready.clear()
        self.all += made
        self._preparing = threading.Thread(
            target=_make_ready, args=(made, nbytes), name="gyre-snapshot-memory", daemon=True
        )
        self._preparing.start()

    def take(self) -> SnapshotBuffer:
        """A free buffer, a new one if there is none. It is free again unless something is placed in it."""
        free = [buffer for buffer in self.all if buffer.is_free]
        if not free:
            self.all.append(SnapshotBuffer(self._device))
            return self.all[-1]
        found = next((buffer for buffer in free if buffer.ready.is_set()), free[0])
        found.ready.wait()  # ends when the kernel and the driver have given the memory
        found.forget()
        return found

    def close(self) -> None:
        if self._preparing is not None:
            self._preparing.join()  # as `take` waits
        for buffer in self.all:
            buffer.close()


def _make_ready(buffers: list[SnapshotBuffer], nbytes: int) -> None:
    for buffer in buffers:
        try:
            buffer.prepare(nbytes)
        finally:
            buffer.ready.set()
