"""Checkpoints of verl's workers: torch's distributed checkpoints, which any number of ranks loads.

    __0_0.distcp …   what each rank wrote of the tensors
    .metadata        torch's record of what is where
    verl.json        the caller's metadata, and each file's checksum: written last, by the first rank

verl's own files are of one rank each, and only as many ranks load them.

Invariants:
- *last is whole*: `verl.json` is there only when every rank's files are on the disk;
- *verified before used*: the files' checksums, and the tensors' names and shapes, are compared before a tensor is
  changed; all ranks refuse together. torch's record is a pickle, which is opened only if it is what was written:
  whoever can write `verl.json` too can run code.

This module must not know what a step is made of.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from gyre.workloads.fsdp.ranks import FsdpRanks
from gyre.workloads.gang.state_files import is_broken, sealed, write_json
from gyre.workloads.learner.checkpoint_identity import (
    OWN_MODEL,
    another_config,
    config_in,
    written_by,
)
from gyre.workloads.learner.errors import CheckpointMismatch

FORMAT = "verl-1"
METADATA = "verl.json"
_RANDOM = "random."
_READ_BYTES = 16 << 20


def save(
    path: Path, state: Mapping[str, Any], ranks: FsdpRanks, *, updates: int, metadata: dict[str, Any]
) -> None:
    """Write the tensors and the metadata below `path`; all is on the disk when this returns. A call of all ranks, which
    raises CheckpointMismatch on all of them where it cannot be written."""
    problem: BaseException | None = None
    if ranks.rank == 0:
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / METADATA).unlink(missing_ok=True)  # what is written over is not whole
        except OSError as error:
            problem = error
    _together(path, problem, ranks)
    try:
        dcp.save(
            {**state, **_random_states(ranks.rank)},
            storage_writer=dcp.FileSystemWriter(path, sync_files=True),
        )
    except CheckpointException as error:  # torch raises it on all ranks
        raise _not_written(path, error) from error
    try:
        mine = {file.name: _checksum(file) for file in _files_of(path, ranks.rank)}
    except OSError as error:
        mine, problem = {}, error
    everybodys = [json.loads(blob) for blob in ranks.exchange(json.dumps(mine).encode())]
    _together(path, problem, ranks)
    if ranks.rank == 0:
        files = {name: checksum for one in everybodys for name, checksum in one.items()}
        content = {"format": FORMAT, "updates": updates, "files": files, "metadata": metadata}
        try:
            write_json(path / METADATA, sealed(content))
        except OSError as error:
            problem = error
    _together(path, problem, ranks)


def restore(
    path: Path, state: Mapping[str, Any], ranks: FsdpRanks, *, config: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """Fill the tensors with what any number of ranks wrote below `path`; its metadata, and the number of optimizer
    steps. A call of all ranks. Raises CheckpointMismatch, on all of them, before anything is changed, where it is
    absent, incomplete, damaged, or of another model than that of `config`."""
    problem, hint, content = "", "Is its disk failing? The checkpoint before it may be whole.", {}
    found: dict[str, Tensor] = {}
    try:
        content = _read(path)
        mine = sorted(content["files"])[ranks.rank :: ranks.world_size]
        # The record too, by every rank: each opens it.
        for name in {*mine, ".metadata"}:
            if _checksum(path / name) != content["files"][name]:
                raise CheckpointMismatch(f"{name} is not what was written")
    except (CheckpointMismatch, OSError) as error:
        problem = str(getattr(error, "message", error)).rstrip(".")
    _refuse(path, problem, hint, ranks)
    written = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    problem = another_config(config_in(content["metadata"]), config) or _difference(written, state)
    _refuse(path, problem, OWN_MODEL, ranks)
    found = {name: one for name, one in _random_states(ranks.rank).items() if name in written}
    dcp.load({**state, **found}, storage_reader=dcp.FileSystemReader(path))
    for name, value in found.items():
        take = torch.cuda.set_rng_state if name.startswith(f"{_RANDOM}cuda") else torch.set_rng_state
        take(value)
    return content["metadata"], content["updates"]


def _read(path: Path) -> dict[str, Any]:
    """The content of `verl.json`. Raises CheckpointMismatch."""
    if (writer := written_by(path)) is not None:
        raise CheckpointMismatch(
            f"it is one of {writer.writer}, not of verl's workers: gyre run JOB_FILE --from {path} begins with its "
            "weights"
        )
    try:
        content: dict[str, Any] = json.loads((path / METADATA).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointMismatch(f"there is no whole one: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointMismatch(f"{METADATA} is not of the format {FORMAT}")
    if is_broken(content):
        raise CheckpointMismatch(f"the bytes of {METADATA} are not those that were written")
    return content


def _difference(written: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """How the tensors that were written are others than the model's; "" where they are the same."""
    theirs = {name: tuple(one.size) for name, one in written.items() if not name.startswith(_RANDOM)}
    own = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in sorted({*theirs, *own}):
        if theirs.get(name) != own.get(name):
            return f"its {name} is {theirs.get(name)}, the model's is {own.get(name)}"
    return ""


def _random_states(rank: int) -> dict[str, Tensor]:
    """The states that random numbers are drawn from, which dropout and a user's loss may do. They are copies."""
    found = {f"{_RANDOM}cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        found[f"{_RANDOM}cuda.{rank}"] = torch.cuda.get_rng_state()
    return found


def _files_of(path: Path, rank: int) -> list[Path]:
    """What this rank has just written: torch names files by rank, and the first rank writes the record."""
    return [*path.glob(f"__{rank}_*.distcp"), *([path / ".metadata"] if rank == 0 else [])]


def _checksum(file: Path) -> str:
    found = xxhash.xxh3_128()
    descriptor = os.open(file, os.O_RDONLY)
    try:
        while piece := os.read(descriptor, _READ_BYTES):
            found.update(piece)
    finally:
        os.close(descriptor)
    return found.hexdigest()


def _together(path: Path, problem: BaseException | None, ranks: FsdpRanks) -> None:
    """Raises CheckpointMismatch on all ranks where one has a problem."""
    if ranks.any(problem is not None):
        raise _not_written(path, problem) from problem


def _not_written(path: Path, problem: BaseException | None) -> CheckpointMismatch:
    why = f": {problem}." if problem is not None else " by another rank."
    return CheckpointMismatch(
        f"the checkpoint at {path} could not be written{why}", hint="See whether its disk is full."
    )


def _refuse(path: Path, problem: str, hint: str, ranks: FsdpRanks) -> None:
    """Raises CheckpointMismatch on all ranks where one has a problem."""
    if ranks.any(bool(problem)):
        raise CheckpointMismatch(
            f"the checkpoint at {path} cannot be loaded: {problem or 'another rank says why'}.", hint=hint
        )
