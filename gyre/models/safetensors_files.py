"""A folder's safetensors files, and their headers: the name, dtype, shape and place of each tensor.

A file is 8 bytes with the header's length (little-endian), the header as JSON, and the tensors' bytes. This module must
not import torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from gyre.models.errors import ModelFolderError

_MAX_HEADER_BYTES = 100 << 20
"""Safetensors' own limit."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file. `dtype` is safetensors' name of it; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of the file `path`. Raises ModelFolderError for a file that is not safetensors, or not whole."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ValueError("it does not begin with a header")
            header = json.loads(file.read(length))
            held_bytes = os.fstat(file.fileno()).st_size - 8 - length
        entries = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= held_bytes:
                raise ValueError(f"{name} lies outside of it")
            shape = tuple(int(size) for size in entry["shape"])
            entries.append(TensorEntry(name, str(entry["dtype"]), shape, 8 + length + begin, end - begin))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(
            f"{path} cannot be read as safetensors: {error}.",
            hint="Is it whole? A clone without Git LFS has small text files in the place of weights.",
        ) from None
    return tuple(entries)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that the folder's index names, or all where it has no index. Raises ModelFolderError for
    an index that cannot be read, or names a file that is absent."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelFolderError(f"{index} is not an index of shards: {error!r}.") from None
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise ModelFolderError(
            f"{folder} lacks {len(absent)} of the {len(names)} files of its weights, {absent[0]} among them.",
            hint="Copy or download the rest.",
        )
    return [folder / name for name in names]
