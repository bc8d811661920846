"""Checkpoints of Megatron's ranks on the disk: written beside the training, loaded in any layout.

A checkpoint is a folder that its owner (the trainer) makes visible by renaming it when all of it is written:

    actor.json           step, trained ids, metrics, the model, its layout, its weights' digest: written last, by the
                         first rank
    rank_00000.state …   what each rank wrote of the state: see `gyre.workloads.gang.state_files`
    rank_00000.json …    what is where in it: see `parts`

How they are written, and what holds of it, is said by `gyre.workloads.learner.checkpoint_writer`. The checkpoint of
weights that were just read from a folder, or drawn from the seed, has no weights in it: it says that they are those.

Invariants:
- *verified before used*: every byte is compared with its checksum before any tensor is changed; all ranks refuse
  together. The digest of the loaded weights is compared with the one that was written besides.

Transformer Engine's and Apex's optimizers have states of their own: with them a checkpoint is Megatron's, as all were
before (`megatron_format`). This module must not know what a step is made of, and must not be imported before
`seam.open_seam`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from gyre.models.architecture import Architecture
from gyre.workloads.gang.state_files import StateDamaged
from gyre.workloads.learner.checkpoint_identity import METADATA
from gyre.workloads.learner.checkpoint_writer import CheckpointWriter, RankWrite, dtype_name, of_bytes
from gyre.workloads.learner.errors import CheckpointMismatch
from gyre.workloads.learner.memory_checkpoints import Copied
from gyre.workloads.megatron.checkpoints import megatron_format
from gyre.workloads.megatron.checkpoints.formats import (
    FORMAT,
    MEGATRONS_FORMAT,
    read_metadata,
    refuse_broken,
)
from gyre.workloads.megatron.checkpoints.parts import (
    AdamState,
    MegatronPart,
    parts_of,
    random_parts,
    take_random,
    written_by,
)
from gyre.workloads.megatron.checkpoints.stored import StoredState, state_path
from gyre.workloads.megatron.model.parallel import MegatronRanks, Reader
from gyre.workloads.megatron.policy import MegatronPolicy

FIRST_MODEL = "first_model"
"""The key of the metadata that says whether the weights are those that training began with, and not there."""
MOST_RANKS = 1 << 20

Seam = Callable[[], AbstractContextManager[Any]]


def prepare(writer: CheckpointWriter, policy: MegatronPolicy) -> None:
    """Begin to take the memory for copies of the state: see `CheckpointWriter.prepare`."""
    if AdamState(policy).is_all:
        writer.prepare(lambda: [part.tensor for part in written_by(parts_of(policy), policy.ranks)])


def begin(
    writer: CheckpointWriter,
    policy: MegatronPolicy,
    seam: Seam,
    path: Path,
    metadata: dict[str, Any],
    digest: Callable[[], str | None],
    *,
    is_first_model: bool = False,
    copied: Copied[MegatronPart] | None = None,
) -> None:
    """Copy what is to be written, and start to write it below `path`, which is there and empty: see
    `CheckpointWriter.begin`. `metadata` is what the first rank's `actor.json` will hold, with what `digest` returns.
    The weights of the first model are not written. `copied` is this rank's state where it is in host memory already."""
    ranks: MegatronRanks = policy.ranks
    file = state_path(path, ranks.rank)
    is_gyres = is_first_model or AdamState(policy).is_all

    def of_parts(parts: Sequence[MegatronPart], *, are_copies: bool) -> RankWrite:
        tensors = [part.tensor for part in parts]
        return writer.of_tensors(file, tensors, partial(_record, ranks, parts), are_copies=are_copies)

    def copy() -> RankWrite:
        if is_first_model:
            return of_parts(random_parts(policy.device), are_copies=True)
        if not is_gyres:
            write, finish = megatron_format.begin_write(policy, seam, path)
            return RankWrite(lambda _: write(), finish=finish)
        if copied is not None:
            record = _record(ranks, copied.parts, copied.offsets)
            return of_bytes(file, copied.pieces, record, release=copied.release)
        return of_parts(written_by(parts_of(policy), ranks), are_copies=False)

    kind = FORMAT if is_gyres else MEGATRONS_FORMAT
    writer.begin(
        path,
        lambda found: {"format": kind, **metadata, FIRST_MODEL: is_first_model, "digest": found},
        digest,
        copy,
    )


def _record(ranks: MegatronRanks, parts: Sequence[MegatronPart], offsets: Sequence[int]) -> dict[str, Any]:
    """What is where in this rank's file."""
    return {
        "place": ranks.tensor_rank,
        "parts": [
            [part.key, part.what, dtype_name(part.tensor), list(part.shape), part.start, part.end, offset]
            for part, offset in zip(parts, offsets, strict=True)
        ],
    }


# -- reading ------------------------------------------------------------------------------------------


def restore(
    policy: MegatronPolicy,
    seam: Seam,
    path: Path,
    *,
    load_first_model: Callable[[], None],
) -> dict[str, Any]:
    """Load weights, optimizer and random state of the checkpoint at `path`, written in whatever layout, and return its
    metadata. Where it is of the first model, `load_first_model` loads that, with an optimizer that knows of no step. A
    collective of all ranks. Raises CheckpointMismatch, on all of them, before anything is changed."""
    metadata = read_metadata(path)
    refuse_broken(path, metadata)
    if metadata["format"] == MEGATRONS_FORMAT:
        megatron_format.restore(policy, seam, path)
        return metadata
    is_first_model = bool(metadata.get(FIRST_MODEL))
    parts = random_parts(policy.device) if is_first_model else parts_of(policy)
    stored = verified(policy.ranks, policy.architecture, path, metadata, parts)
    if is_first_model:
        load_first_model()
    stored.load(parts)
    take_random(parts)
    return metadata


def verified(
    ranks: Reader,
    architecture: Architecture,
    path: Path,
    metadata: dict[str, Any],
    parts: Sequence[MegatronPart],
) -> StoredState:
    """The state at `path`, once its bytes are checked and it has all the parts. Raises CheckpointMismatch; if one
    reader refuses it, all do."""
    stored, problem = None, ""
    try:
        rank_count, tensor_parallel = _layout_of(metadata)
        stored = StoredState(
            path,
            rank_count=rank_count,
            tensor_parallel=tensor_parallel,
            ranks=ranks,
            architecture=architecture,
        )
        stored.check(parts)
        problem = stored.problem()
    except StateDamaged as error:
        problem = str(error)
    if ranks.sum([float(bool(problem))])[0] or stored is None:
        raise CheckpointMismatch(
            f"the checkpoint at {path} is damaged: {problem or 'another rank says how'}.",
            hint="Is its disk failing? The checkpoint before it may be whole.",
        )
    return stored


def _layout_of(metadata: dict[str, Any]) -> tuple[int, int]:
    """How many ranks wrote it, and how many of them shared each layer. Raises StateDamaged where it does not say."""
    layout = metadata.get("layout")
    said = layout if isinstance(layout, dict) else {}
    for count in (said.get("ranks"), said.get("tensor_parallel")):
        if type(count) is not int or not 0 < count <= MOST_RANKS:
            raise StateDamaged(f"{METADATA} says that {layout!r:.100} wrote it")
    return int(said["ranks"]), int(said["tensor_parallel"])
