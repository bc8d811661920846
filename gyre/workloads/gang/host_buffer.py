"""Host memory of this process into which a rank's state is copied before it is written, kept from one checkpoint to the
next, for taking and page-locking it takes longer than the copy.

Invariants:
- *taken beside the training*: `prepare` returns at once, and a thread takes the memory;
- *not the machine's last*: memory is taken only if a tenth of the machine's stays free (`machine_memory.LEFT_FREE`);
- *pinned while mapped*: the memory is unpinned before it is given back.

This module must not know what is copied, or who reads it.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gyre.workloads.gang.machine_memory import LEFT_FREE, MachineMemory
from gyre.workloads.gang.state_files import padded


class HostBuffer:
    def __init__(self, machine: MachineMemory) -> None:
        self._machine = machine
        self._memory: Tensor | None = None
        self._unpin: Callable[[], None] = lambda: None
        self._taking: threading.Thread | None = None
        self.trouble = ""
        """Why there is no memory, where there is none."""

    def prepare(self, size: int) -> None:
        """Begin to take room for `size` bytes."""
        self._join()
        if self._memory is None or self._memory.numel() < size:
            self._give_back()
            self._taking = threading.Thread(
                target=self._take, args=(padded(size),), name="gyre-host-buffer", daemon=True
            )
            self._taking.start()

    def copy(self, tensors: Sequence[Tensor]) -> tuple[memoryview, list[int]] | None:
        """Copy the tensors, each to a multiple of a page: the bytes, and where each tensor begins. They may be changed
        when this returns, and the bytes stay until the next call. None where there is no room: see `trouble`."""
        offsets, size = placed(tensors)
        self.prepare(size)
        self._join()
        memory = self._memory
        if memory is None:
            return None
        devices = set()
        with torch.no_grad():
            for tensor, offset in zip(tensors, offsets, strict=True):
                source = tensor.detach()
                if source.numel():
                    place = memory[offset : offset + source.nbytes].view(source.dtype).view(source.shape)
                    place.copy_(source, non_blocking=True)
                    devices.add(source.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return memoryview(memory.numpy().data)[:size], offsets

    def close(self) -> None:
        """Give the memory back. Nobody may be reading it. Safe to call twice."""
        self._join()
        self._give_back()

    def _take(self, size: int) -> None:
        available, total = self._machine.available()
        if available - size < LEFT_FREE * total:
            self.trouble = (
                f"a copy of {size} bytes would leave less than {LEFT_FREE:.0%} of the machine's memory: "
                f"{available} of {total} bytes are available"
            )
            return
        try:
            mapped = mmap.mmap(-1, size)
        except OSError as error:
            self.trouble = f"the machine has no {size} bytes: {error}"
            return
        with contextlib.suppress(OSError, AttributeError):  # a wish: fewer pages to make and to pin
            mapped.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._unpin = self._machine.pin(memory)
        self._memory, self.trouble = memory, ""

    def _join(self) -> None:
        if self._taking is not None:
            self._taking.join()  # ends when the kernel and the driver have given the memory
            self._taking = None

    def _give_back(self) -> None:
        self._unpin()
        self._unpin, self._memory = lambda: None, None


def placed(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each of the tensors begins when they lie one after another, each at a multiple of a page; and the size."""
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += padded(tensor.nbytes)
    return offsets, size
