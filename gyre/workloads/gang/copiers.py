"""Threads that carry a state's bytes between tensors and files, a piece at a time, and their checksum.

Invariant *hardly a lock*: each thread goes through the pieces of its own files, which are large, and takes the
interpreter's lock three times for one. Training runs beside, and wants that lock for itself. Pieces that fit into a
core's cache are copied twice as fast by a process that does nothing else; beside a pass they took twice as long.

This module must not know what the bytes are, or which state they belong to.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from gyre.workloads.gang.machine_memory import MachineMemory

PIECE_BYTES = 64 << 20
"""What one thread copies and hashes at once, and page-locks. It decides the checksum: another size is another
format."""

COPIERS = 8
"""Threads that copy beside each other, and the files of a slot. One thread writes some 3 GB a second into the machine's
memory, a device sends 50; and the kernel lets one thread at a time write into a file."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`size` bytes at an offset of one of the files, and those of a tensor."""

    file: int
    offset: int
    size: int
    bytes: Tensor


class Copiers:
    """Each thread has a buffer of its own, which is pinned."""

    def __init__(self, memory: MachineMemory) -> None:
        self._memory = memory
        self._own = threading.local()
        self._unpin: list[Callable[[], None]] = []
        count = min(COPIERS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(count, "gyre-host-copy")  # no thread before it is used

    def close(self) -> None:
        """Unpin the buffers, which nobody uses."""
        self._pool.shutdown()
        for unpin in self._unpin:
            unpin()
        self._unpin = []

    @staticmethod
    def ready(tensors: Sequence[Tensor]) -> Any:
        """What says that a device has done whatever it was given for the tensors until now; None on a CPU."""
        if any(tensor.is_cuda for tensor in tensors):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            return event
        return None

    def write(self, files: Sequence[Path], pieces: Sequence[Piece], ready: Any) -> str:
        """Copy the pieces' bytes into the files; their checksum. Raises OSError."""

        def carry(descriptor: int, piece: Piece, buffer: Tensor, view: memoryview) -> bytes:
            self._cross(buffer, piece.bytes)
            digest = xxhash.xxh3_128_digest(view)
            _write_at(descriptor, view, piece.offset)
            return digest

        return self._each(files, os.O_WRONLY, pieces, ready, carry)

    def read(
        self, files: Sequence[Path], pieces: Sequence[Piece], ready: Any, beside: Callable[[], None]
    ) -> str:
        """Copy the files' bytes into the pieces, and call `beside` meanwhile; their checksum. Raises OSError, and what
        `beside` raises."""

        def carry(descriptor: int, piece: Piece, buffer: Tensor, view: memoryview) -> bytes:
            _read_at(descriptor, view, piece.offset)
            digest = xxhash.xxh3_128_digest(view)
            self._cross(piece.bytes, buffer)
            return digest

        return self._each(files, os.O_RDONLY, pieces, ready, carry, beside)

    def _each(
        self,
        files: Sequence[Path],
        flags: int,
        pieces: Sequence[Piece],
        ready: Any,
        carry: Callable[[int, Piece, Tensor, memoryview], bytes],
        beside: Callable[[], None] = lambda: None,
    ) -> str:
        """Carry each piece, those of one file one after another; the checksum of them all."""
        digests = [b""] * len(pieces)

        def of_file(number: int, path: Path) -> None:
            whole = self._buffer()
            memory = memoryview(whole.numpy().data)
            with _opened(path, flags) as descriptor, torch.no_grad(), self._after(ready, pieces):
                for place, piece in enumerate(pieces):
                    if piece.file == number:
                        buffer = whole if piece.size == PIECE_BYTES else whole[: piece.size]
                        digests[place] = carry(descriptor, piece, buffer, memory[: piece.size])

        running = [self._pool.submit(of_file, number, path) for number, path in enumerate(files)]
        try:
            beside()
        finally:
            wait(running)  # also where one fails: the others use the tensors
        for one in running:
            one.result()
        if not all(digests):
            raise OSError("a file of the slot is gone")
        return xxhash.xxh3_128_hexdigest(b"".join(digests))

    @contextlib.contextmanager
    def _after(self, ready: Any, pieces: Sequence[Piece]) -> Iterator[None]:
        """Copies of this thread are on a stream of its own, after what is `ready`."""
        if ready is None:
            yield
            return
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(pieces[0].bytes.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._own.stream):
            self._own.stream.wait_event(ready)
            yield

    def _cross(self, into: Tensor, of: Tensor) -> None:
        """Copy, and wait for the copy in the same call: another one would take the interpreter's lock once more."""
        if into.is_cuda or of.is_cuda:
            into.copy_(of)
        else:
            self._memory.copy(into, of)

    def _buffer(self) -> Tensor:
        """This thread's."""
        if not hasattr(self._own, "buffer"):
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
            self._unpin.append(self._memory.pin(buffer))
            self._own.buffer = buffer
        found: Tensor = self._own.buffer
        return found


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _read_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Raises OSError where the file ends too early."""
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise OSError(f"the file ends before byte {offset + len(view)}")
        view, offset = view[count:], offset + count
