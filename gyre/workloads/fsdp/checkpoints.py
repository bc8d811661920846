"""Checkpoints of FSDP2's ranks on the disk: written beside the training, loaded by any number of ranks.

    actor.json           the format, the number of ranks and of optimizer steps, the caller's metadata: written last, by
                         the first rank
    rank_00000.state …   what each rank wrote of the state: see `gyre.workloads.gang.state_files`
    rank_00000.json …    what is where in it: of each part its key, what of it, dtype, whole shape, and elements

Training stands while the state is copied to host memory, which is kept from one checkpoint to the next; then a thread
writes. Where the machine has no room for the copy, training stands until the state is written.

Invariants:
- *written from copies*: what is written is what the state was when the write began, whatever is trained meanwhile;
- *one at a time*: there is one copy, so a write that is not done is stopped before the next begins;
- *last is whole*: `actor.json` is there only when every rank's part is on the disk, and so are the names in the folder;
- *verified before used*: every byte is compared with its checksum before any tensor is changed; all ranks refuse
  together;
- *bytes and JSON*: nothing is unpickled, so a stranger's checkpoint can be wrong, and runs nothing.

This module must not know what a step is made of.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.workloads.fsdp.formats import FORMAT, read_metadata
from gyre.workloads.fsdp.parts import RANDOM, Part, written_by
from gyre.workloads.fsdp.ranks import FsdpRanks
from gyre.workloads.gang.host_buffer import HostBuffer, placed
from gyre.workloads.gang.state_files import (
    StateDamaged,
    problem_with,
    read_at,
    read_record,
    sealed,
    write_json,
    write_state,
)
from gyre.workloads.learner.checkpoint_identity import METADATA, OWN_MODEL, refuse_another_writer
from gyre.workloads.learner.devices import page_locked
from gyre.workloads.learner.errors import CheckpointMismatch

DAMAGED = "Is its disk failing? The checkpoint before it may be whole."


class CheckpointWriter:
    """One checkpoint on its way to the disk. `begin` and `is_written` are calls of all ranks."""

    def __init__(self, ranks: FsdpRanks, device: torch.device) -> None:
        self._ranks = ranks
        self._is_cuda = device.type == "cuda"
        self._is_prepared = False
        self._buffer = HostBuffer(pin=partial(page_locked, device=device) if device.type == "cuda" else None)
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._path = Path()
        self._content: dict[str, Any] = {}
        self._hold_s = 0.0

    def status(self) -> dict[str, Any]:
        """Facts for people: how long the last checkpoint held training up, and why it had to, where it had."""
        trouble = {"trouble": self._buffer.trouble} if self._buffer.trouble else {}
        return {"hold_s": round(self._hold_s, 4), **trouble}

    def prepare(self, parts: Callable[[], Sequence[Part]]) -> None:
        """Begin to take the memory for copies of `parts`, so that the first checkpoint need not wait for it. On a CPU
        there is nothing to be page-locked, and nothing to be gained."""
        if self._is_cuda and not self._is_prepared:
            self._is_prepared = True
            self._buffer.prepare(placed([part.tensor for part in written_by(parts(), self._ranks.rank)])[1])

    def begin(
        self,
        path: Path,
        parts: Sequence[Part],
        *,
        updates: int,
        metadata: dict[str, Any],
        digest: Callable[[], str | None],
    ) -> None:
        """Copy the parts that this rank writes, and start to write them below `path`. The first rank keeps what
        `digest` returns, which is called on a thread, beside the metadata. An earlier write that is not done is
        stopped, and its folder will never be whole."""
        began = time.monotonic()
        self._abandon()
        self._path, self._error, self._stop = path, None, threading.Event()
        self._content = {
            "format": FORMAT,
            "ranks": self._ranks.world_size,
            "updates": updates,
            "metadata": metadata,
        }
        mine = written_by(parts, self._ranks.rank)
        tensors = [part.tensor for part in mine]
        copied = self._buffer.copy(tensors)
        if copied is not None:
            pieces: Sequence[memoryview] | Iterator[memoryview] = [copied[0]]
            write = partial(self._write, pieces, mine, copied[1], digest)
        else:  # what is written is the state itself, one part after another
            write = partial(self._write, _bytes_of(tensors), mine, placed(tensors)[0], digest, threads=1)
        self._thread = threading.Thread(target=write, name="gyre-checkpoint", daemon=True)
        self._thread.start()
        if copied is None:
            self._thread.join()  # ends with the disk's write
        self._hold_s = time.monotonic() - began

    def _write(
        self,
        pieces: Sequence[memoryview] | Iterator[memoryview],
        parts: Sequence[Part],
        offsets: Sequence[int],
        digest: Callable[[], str | None],
        **options: Any,
    ) -> None:
        record = [
            [part.key, part.what, _dtype(part.tensor), list(part.shape), part.start, part.end, offset]
            for part, offset in zip(parts, offsets, strict=True)
        ]
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            _write_files(
                _state_path(self._path, self._ranks.rank), pieces, {"parts": record}, self._stop, options
            )
            if self._ranks.rank == 0:
                self._content["metadata"] = {**self._content["metadata"], "digest": digest()}
        except Exception as error:  # told to whoever asks whether it is written
            self._error = error

    def is_written(self, *, wait: bool) -> bool:
        """Whether all ranks have written, and the folder is whole. With `wait`, when they have. Raises
        CheckpointMismatch on all ranks, where one of them could not."""
        if self._thread is None:
            return True
        if wait:
            self._thread.join()  # ends with the disk's write; the caller's own deadline is above it
        if self._ranks.any(self._thread.is_alive()):
            return False
        self._thread.join()
        self._thread = None
        self._refuse_all(self._error)
        problem: OSError | None = None
        if self._ranks.rank == 0:
            try:
                write_json(self._path / METADATA, sealed(self._content))
            except OSError as error:
                problem = error
        self._refuse_all(problem)  # and nobody says "written" before the first rank has
        return True

    def _refuse_all(self, error: BaseException | None) -> None:
        """Raise where a rank has an error. A call of all ranks."""
        if self._ranks.any(error is not None):
            raise CheckpointMismatch(
                f"the checkpoint at {self._path} could not be written"
                + (f": {error}." if error is not None else " by another rank."),
                hint="See whether its disk is full.",
            ) from error

    def _abandon(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()  # after the chunks that are being written: its memory is needed
            self._thread = None

    def close(self) -> None:
        """Stop what is being written, and give the memory back. Safe to call twice."""
        self._abandon()
        self._buffer.close()


def _write_files(
    path: Path,
    pieces: Sequence[memoryview] | Iterator[memoryview],
    content: dict[str, Any],
    stop: threading.Event,
    options: dict[str, Any],
) -> None:
    """Write a rank's files. A seam for tests, which let it wait."""
    write_state(path, pieces, content, stop=stop, **options)


# -- reading ------------------------------------------------------------------------------------------


def restore(
    path: Path, parts: Sequence[Part], ranks: FsdpRanks, *, judge: Callable[[dict[str, Any]], str]
) -> tuple[dict[str, Any], int]:
    """Fill the parts' tensors with what any number of ranks wrote below `path`; its metadata, and the number of
    optimizer steps. `judge` says of the metadata why it is not to be loaded, or "". A call of all ranks. Raises
    CheckpointMismatch, on all of them, before anything is changed, where it is absent, incomplete, damaged, another
    model's or refused."""
    stored: StoredCheckpoint | None = None
    problem, hint = "", DAMAGED
    try:
        refuse_another_writer(path, "fsdp")
        stored = StoredCheckpoint(path)
        problem = judge(stored.metadata) or stored.difference(parts)
        if problem:
            hint = OWN_MODEL
        else:
            problem = stored.damage(range(ranks.rank, stored.rank_count, ranks.world_size))
    except (StateDamaged, CheckpointMismatch) as error:
        problem, hint = error.message.rstrip("."), error.hint or DAMAGED
    if ranks.any(bool(problem)) or stored is None:
        raise CheckpointMismatch(
            f"the checkpoint at {path} cannot be loaded: {problem or 'another rank says why'}.", hint=hint
        )
    stored.load(parts)
    return stored.metadata, stored.updates


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements of a flattened tensor, as a rank wrote them."""

    rank: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    offset: int


class StoredCheckpoint:
    """A checkpoint's records: what is where in its ranks' files. Raises StateDamaged or CheckpointMismatch where there
    is no whole one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        content = read_metadata(folder)
        self.metadata: dict[str, Any] = content["metadata"]
        self.updates: int = content["updates"]
        self.rank_count: int = content["ranks"]
        self._records = [read_record(_state_path(folder, rank)) for rank in range(self.rank_count)]
        self._found: dict[tuple[str, str], list[_Range]] = {}
        for rank, record in enumerate(self._records):
            try:
                for key, what, *written in record["parts"]:
                    self._found.setdefault((key, what), []).append(
                        _range(rank, record["size_bytes"], *written)
                    )
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise StateDamaged(f"the record of rank {rank} is none: {error!r:.300}") from error

    def check(self, parts: Sequence[Part]) -> None:
        """Raises CheckpointMismatch where a part is missing, not all there or of another shape, or there are weights
        that no part asks for. Random states may be missing, for there may have been fewer ranks."""
        wanted = {(part.key, part.what) for part in parts}
        known = {what for _, what in wanted}
        for key, what in self._found:
            if what in known and key != RANDOM and (key, what) not in wanted:
                raise CheckpointMismatch(f"it has {key}/{what}, which the model does not")
        for part in parts:
            if part.key == RANDOM:
                continue
            at = part.start
            for one in self._ranges(part):
                if one.shape != part.shape:
                    raise CheckpointMismatch(f"its {part.name} is {one.shape}, the model's is {part.shape}")
                if one.start <= at:
                    at = max(at, one.end)
            if at < part.end or not self._ranges(part):
                raise CheckpointMismatch(f"it lacks elements {at} to {part.end} of {part.name}")

    def difference(self, parts: Sequence[Part]) -> str:
        """What `check` says; "" where there is nothing to say."""
        try:
            self.check(parts)
        except CheckpointMismatch as error:
            return error.message
        return ""

    def shape(self, key: str, what: str) -> tuple[int, ...]:
        """Of a whole tensor. Raises CheckpointMismatch where there is none."""
        if (key, what) not in self._found:
            raise CheckpointMismatch(f"it lacks {key}/{what}")
        return self._found[key, what][0].shape

    def damage(self, ranks: Sequence[int] | None = None) -> str:
        """What is wrong with the bytes that these ranks wrote, by default all; "" where nothing is. Reads all of
        them."""
        for rank in range(self.rank_count) if ranks is None else ranks:
            if problem := problem_with(_state_path(self._folder, rank), self._records[rank]):
                return problem
        return ""

    def load(self, parts: Sequence[Part]) -> None:
        """Fill the parts' tensors, but for random states that are not there."""
        with _Files(self._folder) as files, torch.no_grad():
            for part in parts:
                ranges = self._ranges(part)
                if ranges:
                    part.tensor.detach().view(-1).copy_(files.elements(ranges, part.start, part.end))

    def _ranges(self, part: Part) -> list[_Range]:
        found = self._found.get((part.key, part.what), [])
        return sorted(found, key=lambda one: one.start)


class _Files:
    """The ranks' files, each opened when it is first read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[int, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def elements(self, ranges: Sequence[_Range], start: int, end: int) -> Tensor:
        """Elements `start` to `end` of a flattened tensor that the ranges cover, in host memory."""
        flat = torch.empty(end - start, dtype=ranges[0].dtype)
        at = start
        for one in ranges:
            first, last = max(at, one.start), min(end, one.end)
            if first < last:
                into = flat[first - start : last - start].view(torch.uint8).numpy().data
                offset = one.offset + (first - one.start) * one.dtype.itemsize
                read_at(self._descriptor(one.rank), memoryview(into), offset)
                at = last
        return flat

    def _descriptor(self, rank: int) -> int:
        if rank not in self._descriptors:
            self._descriptors[rank] = os.open(_state_path(self._folder, rank), os.O_RDONLY)
        return self._descriptors[rank]


def _range(
    rank: int, size_bytes: int, dtype: str, shape: Sequence[int], start: int, end: int, offset: int
) -> _Range:
    """Raises AttributeError, TypeError or ValueError where it is none, or lies outside of the rank's file."""
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is no type of numbers")
    if any(type(number) is not int or number < 0 for number in (*shape, start, end, offset)):
        raise ValueError(f"a part of {shape}, {start} to {end}, at {offset}")
    if not start <= end <= math.prod(shape) or offset + (end - start) * kind.itemsize > size_bytes:
        raise ValueError(f"elements {start} to {end} of {shape} at {offset} of {size_bytes} bytes")
    return _Range(rank, kind, tuple(shape), start, end, offset)


def _state_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.state"


def _bytes_of(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """The bytes of one tensor after another, as they are when they are asked for."""
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        yield memoryview(flat.view(torch.uint8).numpy().data)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
