"""A folder's safetensors files, and their headers: the name, dtype, shape and place of each tensor.

A file is 8 bytes with the header's length (little-endian), the header as JSON, and the tensors' bytes. This module must
not import torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre.models.architecture import Architecture
from gyre.models.errors import ModelFolderError
from gyre.models.tensor_names import EMBEDDING, HEAD, SCORE, expected_shapes, is_harmless

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The names of a model in one file, and of the index of several."""

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")

_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes that are read, in safetensors' names. Narrower floats come with scales, which nothing here applies."""

_COMPARED_BYTES = 64 << 10
"""So much of two tensors is compared before anything starts; who loads them compares all."""

_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")

ANOTHER_MODEL = "Its config.json describes another model than its safetensors."

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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFolderError(
            f"{path} cannot be read as safetensors: {error}.",
            hint="Is it whole? A clone without Git LFS has small text files in the place of weights.",
        ) from None
    return tuple(entries)


def weight_files(folder: Path, *, adapter: bool = False) -> dict[Path, tuple[TensorEntry, ...]]:
    """The safetensors files of the folder's model, or with `adapter` of what may be an adapter, each with what it
    holds: those that the index names; without an index `model.safetensors`, or else all.

    Raises ModelFolderError for a file that is absent or cannot be read, and where it is open which tensors are meant:
    two files hold one tensor, the index says otherwise than the files, or there is an index beside a whole model.
    """
    if not adapter:
        _refuse_adapter(folder)
    index = folder / INDEX
    if not index.exists():
        return _unindexed(folder)
    mapped = _read_index(index)
    names = sorted(set(mapped.values()))
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise ModelFolderError(
            f"{folder} lacks {len(absent)} of the {len(names)} files of its weights, {absent[0]} among them.",
            hint="Copy or download the rest.",
        )
    if WHOLE not in names and (folder / WHOLE).exists():
        raise ModelFolderError(
            f"{folder} holds two models: {WHOLE}, and {names[0]} with the others that {INDEX} names.",
            hint="Remove the one that is not meant.",
        )
    held = {folder / name: read_header(folder / name) for name in names}
    _refuse_twice(held)
    found = {entry.name: path.name for path, entries in held.items() for entry in entries}
    for name in sorted(found.keys() | mapped.keys()):
        if found.get(name) != mapped.get(name):
            raise ModelFolderError(
                f"{index}: {name} is in {mapped.get(name, 'no file')} by the index, and in "
                f"{found.get(name, 'none of them')} by the files.",
                hint="Copy or download the files and the index again, from one place.",
            )
    return held


def require_tensors(
    held: Mapping[str, TensorEntry], architecture: Architecture, folder: Path, *, head: str | None = HEAD
) -> None:
    """Raises ModelFolderError unless the folder's tensors are all those of the architecture, each of its shape, and no
    others. `head` is the output layer that is wanted; None takes any."""
    for entry in held.values():
        refuse_narrow(entry, folder)
    wanted = expected_shapes(architecture)
    if head != HEAD:
        wanted.pop(HEAD, None)
    if head == SCORE:
        wanted[SCORE] = (1, architecture.hidden)
    missing = sorted(wanted.keys() - held.keys())
    unknown = sorted(name for name in held.keys() - wanted.keys() if not is_harmless(name, wanted))
    problems = [
        f"{what.format(len(names))}, {names[0]} among them"
        for what, names in (("lacks {} tensors", missing), ("holds {} unknown tensors", unknown))
        if names
    ]
    if problems:
        raise ModelFolderError(f"{folder} {' and '.join(problems)}.", hint=ANOTHER_MODEL)
    for name, shape in wanted.items():
        entry = held[name]
        if entry.shape != shape or entry.dtype not in _DTYPES:
            raise ModelFolderError(
                f"{folder}: tensor {name} is {entry.dtype} {entry.shape}, the model's is {shape}, of "
                f"{', '.join(_DTYPES)}.",
                hint=ANOTHER_MODEL,
            )


def refuse_narrow(entry: TensorEntry, folder: Path) -> None:
    """Raises ModelFolderError for a tensor of a `folder` that is quantized, for it would be read as if it had no
    scales. What is no weight may be of integers, such as a mask."""
    is_float = "F" in entry.dtype
    if entry.dtype not in _DTYPES and (is_float or entry.name.endswith("weight")):
        raise ModelFolderError(
            f"{folder}: tensor {entry.name} is {entry.dtype} {entry.shape}: quantized weights are not supported.",
            hint="SGLang serves them; to train, take the folder of the model before it was quantized.",
        )


def refuse_other_head(held: Mapping[Path, Sequence[TensorEntry]], folder: Path) -> None:
    """Raises ModelFolderError where a tied model plainly has an output layer of its own: by shape, dtype or first
    bytes."""
    places = {entry.name: (path, entry) for path, entries in held.items() for entry in entries}
    if HEAD not in places or EMBEDDING not in places:
        return
    (_, head), (_, embedding) = places[HEAD], places[EMBEDDING]
    if head.shape != embedding.shape or (
        head.dtype == embedding.dtype and _first_bytes(*places[HEAD]) != _first_bytes(*places[EMBEDDING])
    ):
        raise other_head(folder)


def other_head(folder: Path) -> ModelFolderError:
    """What is raised of a tied model with an output layer of its own."""
    return ModelFolderError(
        f"{folder}: config.json says tie_word_embeddings, and {HEAD} is not {EMBEDDING}.",
        hint=f"Set tie_word_embeddings to false, or remove {HEAD}.",
    )


def _first_bytes(path: Path, entry: TensorEntry) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(entry.offset)
            return file.read(min(entry.size_bytes, _COMPARED_BYTES))
    except OSError as error:
        raise ModelFolderError(
            f"{path} cannot be read: {error.strerror or error}.", hint="Is its disk there?"
        ) from None


def refuse_other_formats(folder: Path) -> None:
    """Raises ModelFolderError where a folder without safetensors has weights of another kind, or says where some
    are."""
    others = sorted(path.name for pattern in _OTHER_FORMATS for path in folder.glob(pattern))
    if others:
        raise ModelFolderError(
            f"{folder} holds weights as {others[0]}, and none as safetensors.",
            hint="Save the model with transformers' save_pretrained, which writes safetensors.",
        )


def _unindexed(folder: Path) -> dict[Path, tuple[TensorEntry, ...]]:
    held = {path: read_header(path) for path in sorted(folder.glob("*.safetensors"))}
    _refuse_twice(held)
    if (
        folder / WHOLE in held
    ):  # whatever is beside it has other tensors: another form of the model, or its head
        return {folder / WHOLE: held[folder / WHOLE]}
    for path in held:
        shard = _SHARD.fullmatch(path.name)
        for number in range(1, int(shard["count"]) + 1 if shard else 0):
            assert shard is not None
            other = path.with_name(f"{shard['stem']}-{number:05}-of-{shard['count']}.safetensors")
            if not other.exists():
                raise ModelFolderError(
                    f"{folder} lacks {other.name}, one of the {int(shard['count'])} files of its weights.",
                    hint="Copy or download the rest.",
                )
    return held


def _refuse_twice(held: Mapping[Path, Sequence[TensorEntry]]) -> None:
    first: dict[str, Path] = {}
    for path, entries in held.items():
        for entry in entries:
            other = first.setdefault(entry.name, path)
            if other != path:
                raise ModelFolderError(
                    f"{path.parent}: {other.name} and {path.name} both hold {entry.name}, and either may be meant.",
                    hint="Remove the file that is not meant.",
                )


def _read_index(index: Path) -> dict[str, str]:
    try:
        mapped = dict(json.loads(index.read_text())["weight_map"])
        if not mapped or not all(isinstance(name, str) and "/" not in name for name in mapped.values()):
            raise ValueError("its weight_map names no files")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelFolderError(
            f"{index} is not an index of shards: {error!r}.",
            hint="Copy or download the files and the index again, from one place.",
        ) from None
    return mapped


def _refuse_adapter(folder: Path) -> None:
    if (folder / "adapter_config.json").exists():
        raise ModelFolderError(
            f"{folder} holds an adapter (adapter_config.json), not a whole model.",
            hint="Merge it into its model, by peft's merge_and_unload and save_pretrained.",
        )
