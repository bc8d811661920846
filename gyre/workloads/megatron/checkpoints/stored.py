"""The ranks' files of a checkpoint, read by a rank of any layout.

A part that this rank has is put together from the ranges that ranks of the same tensor-parallel place wrote. Where
there were more or fewer tensor-parallel ranks, the whole parameter is put together first, and cut anew: one tensor at a
time, so that a rank needs no more than that beside its state.

Invariant *nothing is touched before all of it is known to be there*: the constructor has read the records, `problem`
every byte of this rank's share of the files, and `check` that each part has all its elements.

This module must not know how a checkpoint is written, and must not be imported before `seam.open_seam`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gyre.models.architecture import Architecture
from gyre.workloads.gang.state_files import StateDamaged, is_broken, problem_with, read_at, read_record
from gyre.workloads.megatron.checkpoints.parts import RANDOM, MegatronPart
from gyre.workloads.megatron.model.hugging_face import resharded
from gyre.workloads.megatron.model.parallel import Reader


@dataclass(frozen=True, slots=True)
class _Written:
    """A part as a rank wrote it."""

    rank: int
    place: int
    """The rank's place among its tensor-parallel ranks."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    offset: int


def _part_of(
    rank: int,
    place: int,
    size_bytes: int,
    dtype: str,
    shape: Sequence[int],
    start: int,
    end: int,
    offset: int,
) -> _Written:
    """Raises AttributeError, TypeError or ValueError where it is none, or lies outside the rank's file."""
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is no type of numbers")
    if any(type(number) is not int or number < 0 for number in (place, *shape, start, end, offset)):
        raise ValueError(f"a part of {shape}, {start} to {end}, at {offset}")
    if start > end or offset + (end - start) * kind.itemsize > size_bytes:
        raise ValueError(f"elements {start} to {end} at {offset} of {size_bytes} bytes")
    return _Written(rank, place, kind, tuple(shape), start, end, offset)


def state_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.state"


class StoredState:
    """The state that `rank_count` ranks wrote below `folder`, `tensor_parallel` of them sharing each layer. Raises
    StateDamaged where a file or its record is missing, has another size than was written, or names parts that cannot
    be."""

    def __init__(
        self,
        folder: Path,
        *,
        rank_count: int,
        tensor_parallel: int,
        ranks: Reader,
        architecture: Architecture,
    ) -> None:
        self._paths = [state_path(folder, rank) for rank in range(rank_count)]
        self._records = [read_record(path) for path in self._paths]
        self._places = tensor_parallel
        self._ranks = ranks
        self._architecture = architecture
        self._found: dict[tuple[str, str], list[_Written]] = {}
        self._descriptors: dict[int, int] = {}
        for rank, record in enumerate(self._records):
            try:
                for key, what, *written in record["parts"]:
                    part = _part_of(rank, record["place"], record["size_bytes"], *written)
                    self._found.setdefault((key, what), []).append(part)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise StateDamaged(
                    f"{self._paths[rank]} has a record that is none: {error!r:.300}"
                ) from error
            if is_broken(record):
                raise StateDamaged(f"the record of {self._paths[rank]} is not what was written")

    def problem(self) -> str:
        """What is wrong with the bytes of this rank's share of the files; "" where nothing is. Together the ranks have
        read all of them."""
        mine = range(self._ranks.rank, len(self._paths), self._ranks.world_size)
        return next(
            (text for one in mine if (text := problem_with(self._paths[one], self._records[one]))), ""
        )

    def check(self, parts: Iterable[MegatronPart]) -> None:
        """Raises StateDamaged where one of the parts is not there, or not all of it. Random states may be missing, for
        there may have been fewer ranks."""
        for part in parts:
            if part.key != RANDOM:
                for place in self._needed(part):
                    self._ranges(part, place)

    def load(self, parts: Iterable[MegatronPart]) -> None:
        """Copy what was written into the parts' tensors. Raises StateDamaged as `check`."""
        try:
            with torch.no_grad():
                for part in parts:
                    if part.key == RANDOM:
                        self._load_random(part)
                    else:
                        self._load(part)
        finally:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors = {}

    # -- one part ------------------------------------------------------------------------------------

    def _load(self, part: MegatronPart) -> None:
        if self._is_cut_anew(part):
            assert part.held is not None
            shards = []
            for place in self._needed(part):
                ranges, shape = self._ranges(part, place)
                shards.append(self._elements(ranges, 0, math.prod(shape)).view(shape))
            mine = resharded(part.held, shards, self._architecture, self._ranks).reshape(-1)
            flat = mine[part.start : part.end]
        else:
            (place,) = self._needed(part)
            ranges, _ = self._ranges(part, place)
            flat = self._elements(ranges, part.start, part.end)
        part.tensor.detach().view(-1).copy_(flat)

    def _is_cut_anew(self, part: MegatronPart) -> bool:
        """Whether tensor-parallel ranks share the parameter, and there were more or fewer of them."""
        is_shared = part.held is not None and part.held.parameter.kind != "whole" and part.shape != ()
        return is_shared and self._places != self._ranks.tensor

    def _needed(self, part: MegatronPart) -> Sequence[int]:
        """The tensor-parallel places whose ranks wrote something of the part."""
        if self._is_cut_anew(part):
            return range(self._places)
        return (self._ranks.tensor_rank if self._places == self._ranks.tensor else 0,)

    def _ranges(self, part: MegatronPart, place: int) -> tuple[list[_Written], tuple[int, ...]]:
        """What was written of the part at a tensor-parallel place, in order, and the shape of the shard there. Raises
        StateDamaged where that is not all that is needed."""
        found = sorted(
            (one for one in self._found.get((part.key, part.what), ()) if one.place == place),
            key=lambda one: one.start,
        )
        folder = self._paths[0].parent
        if not found:
            raise StateDamaged(f"{folder} has nothing of {part.name}")
        shape = found[0].shape
        start, end = part.start, part.end
        if self._is_cut_anew(part):
            start, end = 0, math.prod(shape)
        elif shape != part.shape:
            raise StateDamaged(f"{folder} has {part.name} in the shape {shape}, not {part.shape}")
        for one in found:
            if one.start <= start:
                start = max(start, one.end)
        if start < end:
            raise StateDamaged(f"{folder} lacks elements {start} to {end} of {part.name}")
        return found, shape

    def _elements(self, ranges: Sequence[_Written], start: int, end: int) -> Tensor:
        """Elements `start` to `end` of a flattened shard, in host memory."""
        flat = torch.empty(end - start, dtype=ranges[0].dtype)
        at = start
        for one in ranges:
            first, last = max(at, one.start), min(end, one.end)
            if first >= last or first > at:
                continue
            size = one.dtype.itemsize
            into = flat[first - start : last - start].view(torch.uint8).numpy().data
            read_at(self._opened(one.rank), memoryview(into), one.offset + (first - one.start) * size)
            at = last
        return flat

    def _load_random(self, part: MegatronPart) -> None:
        for one in self._found.get((part.key, part.what), ()):
            if one.rank == self._ranks.rank and one.shape == part.shape:
                part.tensor.copy_(self._elements([one], 0, one.end))

    def _opened(self, rank: int) -> int:
        if rank not in self._descriptors:
            self._descriptors[rank] = os.open(self._paths[rank], os.O_RDONLY)
        return self._descriptors[rank]
