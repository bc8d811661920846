"""The checkpoint of a learner in plain torch: its files, their checksums, and the policy in it.

A rank's file is `rank_00000.pt`, and `rank_00000.pt.xxh3` beside it has the checksum of its bytes and their number.

Invariant *every byte*: nothing of a file is used before all its bytes are known to be what was written: weights, the
optimizer's state, and the record of what was trained.

A policy is read out of a mapped file: nothing of it is in the process's own memory, and of the optimizer's state
nothing is read but for the checksum.

This module must not know of jobs.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from gyre.models.architecture import Architecture, architecture_of
from gyre.models.saving import refuse_taken, save_model_folder
from gyre.models.tensor_names import VALUE_WEIGHT, expected_shapes, parameter_parts, to_names
from gyre.weights.version.manifest import checksum_of_weights
from gyre.workloads.learner.errors import CheckpointMismatch, NoPolicy

CHECKPOINT_FORMAT = 2

SUM_SUFFIX = ".xxh3"
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """`config` is the content of `config.json`; None in a checkpoint of an older Gyre."""

    step: int
    config: dict[str, Any] | None
    weights: dict[str, torch.Tensor]
    """By the decoder's own names. They are views of the file, which must not be written to while they are used."""
    beside: Path | None = None
    """The folder that the model came from, with its tokenizer; None for the small decoder."""

    def differences(self, architecture: Architecture) -> list[str]:
        """How names and shapes of the weights differ from those of this decoder."""
        wanted, found = _own_shapes(architecture), {n: tuple(t.shape) for n, t in self.weights.items()}
        return [
            *(f"{name} is missing" for name in sorted(wanted.keys() - found.keys())),
            *(f"{name} is unknown" for name in sorted(found.keys() - wanted.keys())),
            *(
                f"{name} is {found[name]} instead of {wanted[name]}"
                for name in sorted(wanted.keys() & found.keys())
                if found[name] != wanted[name]
            ),
        ]

    def named(self, architecture: Architecture) -> dict[str, torch.Tensor]:
        """The weights by Hugging Face's names; they are this decoder's."""
        return to_names(self.weights, architecture)


def read_policy(folder: Path) -> SavedPolicy:
    """The policy in the checkpoint `folder`. Nothing of it is unpickled but tensors and plain values. Raises
    CheckpointMismatch where it cannot be read, or the weights are not those that were written, and NoPolicy for a
    critic's."""
    file = checkpoint_file(folder, 0)
    content = read_checkpoint(file, mapped=True)
    if VALUE_WEIGHT in content["model"]:
        raise NoPolicy.at(folder)
    if content["digest"] != checksum_of_weights(content["model"]):
        raise CheckpointMismatch(f"the weights in {file} are not those that were written.")
    beside = Path(content["path"]) if content.get("path") else None
    return SavedPolicy(content["step"], content.get("config"), content["model"], beside)


def export_policy(
    checkpoint: Path, out: Path, *, dtype: str = "", trust: bool = False, adapter: bool = False
) -> dict[str, Any]:
    """Write `out`, a folder in Hugging Face's layout, from the checkpoint: its weights, in `dtype` (`float32`,
    `bfloat16`, or "" for the trained ones'), a file's at a time, with the tokenizer of the folder that training began
    with, if it is still there. Returns `{"step", "tensors", "size_bytes", "dtype"}`. Raises CheckpointMismatch as
    `read_policy`, and where it does not say its model; ConfigError where `out` is there, or cannot be written."""
    refuse_taken(out)
    found = read_policy(checkpoint)
    if found.config is None:
        raise CheckpointMismatch(
            f"{checkpoint} does not say what model it is of: an older Gyre wrote it.",
            hint="Begin a job of its config.model with it, by --from, and export that job's.",
        )
    kind = getattr(torch, dtype or "float32")
    architecture = architecture_of(found.config, str(checkpoint))
    tensors = ((name, tensor.to(kind)) for name, tensor in found.named(architecture).items())
    written = save_model_folder(out, found.config, tensors, beside=found.beside)
    return {
        "step": found.step,
        "tensors": written.tensors,
        "size_bytes": written.size_bytes,
        "dtype": dtype or "float32",
    }


def checkpoint_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.pt"


def write_sum(file: Path) -> None:
    """Write the checksum of the file's bytes beside it, on the disk when this returns."""
    content = f"{checksum_of_file(file)} {file.stat().st_size}\n"
    with open(sum_file(file), "w") as beside:
        beside.write(content)
        beside.flush()
        os.fsync(beside.fileno())


def sum_file(file: Path) -> Path:
    return file.with_name(file.name + SUM_SUFFIX)


def refuse_damaged(folder: Path) -> None:
    """Raises CheckpointMismatch where a byte of any rank's file is not what was written."""
    for beside in sorted(folder.glob(f"rank_*.pt{SUM_SUFFIX}")):
        file = beside.with_name(beside.name.removesuffix(SUM_SUFFIX))
        try:
            written, found = beside.read_text(), f"{checksum_of_file(file)} {file.stat().st_size}\n"
        except (OSError, ValueError) as error:
            raise _damaged(file, str(error)) from error
        if written != found:
            raise _damaged(file, "its bytes are not those that were written")


def checksum_of_file(file: Path) -> str:
    hasher = xxhash.xxh3_128()
    with open(file, "rb") as opened:
        while piece := opened.read(_PIECE_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()


def _damaged(file: Path, problem: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"{file} is damaged: {problem}.", hint="Is its disk failing? The checkpoint before it may be whole."
    )


def read_checkpoint(file: Path, *, mapped: bool = False) -> dict[str, Any]:
    """What the first rank has written; with `mapped` the tensors are views of the file. Raises CheckpointMismatch for
    what cannot be read, has another format, or is not what was written to the last byte, the other ranks' files
    included."""
    refuse_damaged(file.parent)
    try:
        content: dict[str, Any] = torch.load(file, weights_only=True, mmap=mapped)
    except (
        OSError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:  # what torch has for a bad file
        raise CheckpointMismatch(
            f"{file} cannot be read: {error}",
            hint="Is its disk failing? The checkpoint before it may be whole.",
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != CHECKPOINT_FORMAT:
        raise CheckpointMismatch(f"{file} has format {found}, this Gyre reads {CHECKPOINT_FORMAT}.")
    if not sum_file(file).exists():
        raise _damaged(file, f"{sum_file(file).name}, its checksum, is missing")
    return content


def _own_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    shapes = expected_shapes(architecture)
    return {
        mine: (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:])
        for mine, parts in parameter_parts(architecture).items()
    }
