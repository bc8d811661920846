"""Checkpoints of FSDP2's ranks on the disk: written beside the training, loaded by any number of ranks.

    actor.json           the format, the number of ranks and of optimizer steps, the caller's metadata: written last, by
                         the first rank
    rank_00000.state …   what each rank wrote of the state: see `gyre.workloads.gang.state_files`
    rank_00000.json …    what is where in it: of each part its key, what of it, dtype, whole shape, and elements

How they are written, and what holds of it, is said by `gyre.workloads.learner.checkpoint_writer`.

Invariants:
- *verified before used*: every byte is compared with its checksum before any tensor is changed; all ranks refuse
  together;
- *bytes and JSON*: nothing is unpickled, so a stranger's checkpoint can be wrong, and runs nothing.

This module must not know what a step is made of.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.workloads.fsdp.formats import FORMAT, read_metadata
from gyre.workloads.fsdp.kind import FSDP
from gyre.workloads.fsdp.parts import RANDOM, FsdpPart, written_by
from gyre.workloads.fsdp.ranks import FsdpRanks
from gyre.workloads.gang.state_files import (
    StateDamaged,
    problem_with,
    read_at,
    read_record,
)
from gyre.workloads.learner.checkpoint_identity import OWN_MODEL, refuse_another_writer
from gyre.workloads.learner.checkpoint_writer import CheckpointWriter, RankWrite, dtype_name, of_bytes
from gyre.workloads.learner.errors import CheckpointMismatch
from gyre.workloads.learner.memory_checkpoints import Copied

DAMAGED = "Is its disk failing? The checkpoint before it may be whole."


def begin(
    writer: CheckpointWriter,
    path: Path,
    parts: Sequence[FsdpPart],
    ranks: FsdpRanks,
    *,
    updates: int,
    metadata: dict[str, Any],
    digest: Callable[[], str | None],
    copied: Copied[FsdpPart] | None = None,
) -> None:
    """Copy the parts that this rank writes, and start to write them below `path`: see `CheckpointWriter.begin`. What
    `digest` returns is kept beside the metadata. `copied` is this rank's state where it is in host memory already."""
    file = _state_path(path, ranks.rank)

    def of_parts() -> RankWrite:
        mine = written_by(parts, ranks.rank)
        return writer.of_tensors(file, [part.tensor for part in mine], partial(_record, mine))

    def copy() -> RankWrite:
        if copied is None:
            found = of_parts()
        else:
            record = _record(copied.parts, copied.offsets)
            found = of_bytes(file, copied.pieces, record, release=copied.release)

        def write(stop: threading.Event) -> None:
            path.mkdir(parents=True, exist_ok=True)
            found.write(stop)

        return replace(found, write=write)

    writer.begin(
        path,
        lambda found: {
            "format": FORMAT,
            "ranks": ranks.world_size,
            "updates": updates,
            "metadata": {**metadata, "digest": found},
        },
        digest,
        copy,
    )


def _record(parts: Sequence[FsdpPart], offsets: Sequence[int]) -> dict[str, Any]:
    """What is where in this rank's file."""
    return {
        "parts": [
            [part.key, part.what, dtype_name(part.tensor), list(part.shape), part.start, part.end, offset]
            for part, offset in zip(parts, offsets, strict=True)
        ]
    }


def prepare(writer: CheckpointWriter, parts: Callable[[], Sequence[FsdpPart]], ranks: FsdpRanks) -> None:
    """Begin to take the memory for copies of the parts: see `CheckpointWriter.prepare`."""
    writer.prepare(lambda: [part.tensor for part in written_by(parts(), ranks.rank)])


# -- reading ------------------------------------------------------------------------------------------


def restore(
    path: Path, parts: Sequence[FsdpPart], ranks: FsdpRanks, *, judge: Callable[[dict[str, Any]], str]
) -> tuple[dict[str, Any], int]:
    """Fill the parts' tensors with what any number of ranks wrote below `path`; its metadata, and the number of
    optimizer steps. `judge` says of the metadata why it is not to be loaded, or "". A call of all ranks. Raises
    CheckpointMismatch, on all of them, before anything is changed, where it is absent, incomplete, damaged, another
    model's or refused."""
    stored: StoredCheckpoint | None = None
    problem, hint = "", DAMAGED
    try:
        refuse_another_writer(path, FSDP)
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

    def check(self, parts: Sequence[FsdpPart]) -> None:
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

    def difference(self, parts: Sequence[FsdpPart]) -> str:
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

    def load(self, parts: Sequence[FsdpPart]) -> None:
        """Fill the parts' tensors, but for random states that are not there."""
        with _Files(self._folder) as files, torch.no_grad():
            for part in parts:
                ranges = self._ranges(part)
                if ranges:
                    part.tensor.detach().view(-1).copy_(files.elements(ranges, part.start, part.end))

    def _ranges(self, part: FsdpPart) -> list[_Range]:
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
