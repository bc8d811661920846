"""One checkpoint of ranks that share a model, on its way to the disk: what Megatron's and FSDP2's ranks have in common.

Training stands while the state is copied to host memory, which is kept from one checkpoint to the next; then a thread
writes. Where the machine has no room for the copy, training stands until the state is written.

Invariants:
- *written from copies*: what is written is what the state was when the write began, whatever is trained meanwhile;
- *one at a time*: there is one copy, so a write that is not done is waited for, or stopped, before the next begins;
- *last is whole*: `actor.json` is there only when every rank's part is on the disk, and so are the names in the folder.

This module must not know what a state is made of, or how it is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.workloads.gang.host_buffer import HostBuffer, placed
from gyre.workloads.gang.state_files import sealed, write_json, write_state
from gyre.workloads.gang.world import World
from gyre.workloads.learner.checkpoint_identity import METADATA
from gyre.workloads.learner.devices import DeviceMemory
from gyre.workloads.learner.errors import CheckpointMismatch


def _nothing() -> None:
    """There is nothing to be done."""


@dataclass(frozen=True, slots=True)
class RankWrite:
    """What one rank writes. `write` does it, on a thread, and ends soon after the event it gets is set."""

    write: Callable[[threading.Event], None]
    reads_state: bool = False
    """Whether it reads the state itself, which must then stay as it is until all is written."""
    finish: Callable[[], None] = _nothing
    """What all ranks call together when all have written."""
    release: Callable[[], None] = _nothing
    """Called when nobody reads any more what is written."""


class CheckpointWriter:
    """`begin` and `is_written` are calls of all `ranks`; `device` is where the model is."""

    def __init__(self, ranks: World, device: torch.device) -> None:
        self._ranks = ranks
        self._is_cuda = device.type == "cuda"
        self._is_prepared = False
        self._buffer = HostBuffer(DeviceMemory(device))
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._finish: Callable[[], None] = _nothing
        self._path = Path()
        self._content: dict[str, Any] = {}
        self.hold_s = 0.0
        """Seconds that the last checkpoint took of the training's time."""

    def status(self) -> dict[str, Any]:
        """Facts for people: how long the last checkpoint held training up, and why it had to, where it had."""
        trouble = {"trouble": self._buffer.trouble} if self._buffer.trouble else {}
        return {"hold_s": round(self.hold_s, 4), **trouble}

    def prepare(self, tensors: Callable[[], Sequence[Tensor]]) -> None:
        """Begin to take the memory for copies of the tensors, so that the first checkpoint need not wait for it. On a
        CPU there is nothing to be page-locked, and nothing to be gained."""
        if self._is_cuda and not self._is_prepared:
            self._is_prepared = True
            self._buffer.prepare(placed(tensors())[1])

    def begin(
        self,
        path: Path,
        content: Callable[[str | None], dict[str, Any]],
        digest: Callable[[], str | None],
        copied: Callable[[], RankWrite],
    ) -> None:
        """Start to write below `path` what `copied` returns, which copies the state. The first rank's `actor.json` will
        hold what `content` makes of what `digest` returns, which are called on a thread. An earlier write that is not
        done is stopped, and its folder will never be whole."""
        began = time.monotonic()
        self.abandon()
        self._path, self._error, self._stop = path, None, threading.Event()
        mine = copied()
        self._finish = mine.finish
        self._thread = threading.Thread(
            target=self._write,
            args=(mine, lambda: content(digest())),
            name="gyre-checkpoint",
            daemon=True,
        )
        self._thread.start()
        if mine.reads_state:
            self._thread.join()  # ends with the disk's write
        self.hold_s = time.monotonic() - began

    def of_tensors(
        self,
        path: Path,
        tensors: Sequence[Tensor],
        record: Callable[[Sequence[int]], dict[str, Any]],
        *,
        are_copies: bool = False,
    ) -> RankWrite:
        """What writes the tensors into the file `path`, from a copy of them; from themselves where there is no room for
        one, or they `are_copies`. `record` says what they are, by where each begins in the file."""
        copied = None if are_copies else self._buffer.copy(tensors)
        if copied is not None:
            return of_bytes(path, [copied[0]], record(copied[1]))
        pieces, content = _bytes_of(tensors), record(placed(tensors)[0])
        return RankWrite(
            lambda stop: _write_files(path, pieces, content, stop, {"threads": 1}),  # one piece after another
            reads_state=not are_copies,
        )

    def _write(self, mine: RankWrite, content: Callable[[], dict[str, Any]]) -> None:
        try:
            mine.write(self._stop)
            if self._ranks.rank == 0:
                self._content = content()
        except Exception as error:  # told to whoever asks whether it is written
            self._error = error
        finally:
            mine.release()

    def is_written(self, *, wait: bool) -> bool:
        """Whether all ranks have written, and the folder is whole. With `wait`, when they have. Raises
        CheckpointMismatch on all ranks, where one of them could not."""
        if self._thread is None:
            return True
        if wait:
            self._thread.join()  # ends with the disk's write; the caller's own deadline is above it
        writing, failed = self._ranks.sum([self._thread.is_alive(), self._error is not None])
        if writing:
            return False
        self._thread.join()
        self._thread = None
        if failed:
            raise self._not_written(self._error)
        self._finish()
        problem: OSError | None = None
        if self._ranks.rank == 0:
            try:
                write_json(self._path / METADATA, sealed(self._content))
            except OSError as error:
                problem = error
        if self._ranks.sum([problem is not None])[0]:  # nobody says "written" before the first rank has
            raise self._not_written(problem)
        return True

    def _not_written(self, error: BaseException | None) -> CheckpointMismatch:
        """What is raised on all ranks; `error` is None where it was another's."""
        found = CheckpointMismatch(
            f"the checkpoint at {self._path} could not be written"
            + (f": {error}." if error is not None else " by another rank."),
            hint="See whether its disk is full.",
        )
        found.__cause__ = error
        return found

    def abandon(self) -> None:
        """Stop a write that nobody waits for. Its folder is not whole, and never will be."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()  # after the chunks that are being written: its memory is needed
            self._thread = None
        self._finish = _nothing

    def close(self) -> None:
        """Stop what is being written, and give the memory back. Safe to call twice."""
        self.abandon()
        self._buffer.close()


def of_bytes(
    path: Path,
    pieces: Sequence[memoryview],
    record: dict[str, Any],
    *,
    release: Callable[[], None] = _nothing,
) -> RankWrite:
    """What writes bytes that stay as they are until `release` is called into the file `path`."""
    return RankWrite(lambda stop: _write_files(path, pieces, record, stop, {}), release=release)


def dtype_name(tensor: Tensor) -> str:
    """As records have it: `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def _bytes_of(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """The bytes of one tensor after another, as they are when they are asked for."""
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        yield memoryview(flat.view(torch.uint8).numpy().data)


def _write_files(
    path: Path,
    pieces: Sequence[memoryview] | Iterator[memoryview],
    record: dict[str, Any],
    stop: threading.Event,
    options: dict[str, Any],
) -> None:
    """Write a rank's files. A seam for tests, which let it wait."""
    write_state(path, pieces, record, stop=stop, **options)
