"""A model written as a folder in Hugging Face's layout, for whoever serves or trains on.

Invariants:
- *whole or absent*: the folder has its name when all of it is on the disk, and takes nobody else's place;
- *config says what the tensors are*: `config.json` has their dtype, whatever that of the folder was that they came
  from, and says whether the output layer is the embedding;
- *as large as people expect*: weights of more than `SHARD_BYTES` are several files with an index;
- *a file at a time*: of tensors that come one after another no more are in memory than one file holds.

This module must not know where the weights come from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save_file
from torch import Tensor

from gyre.errors import ConfigError
from gyre.models.adapters import ADAPTER_CONFIG
from gyre.models.tensor_names import EMBEDDING, HEAD

SHARD_BYTES = 5_000_000_000
"""Largest size of one file: the default of transformers."""

ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
"""PEFT's name of the file with an adapter's tensors."""

_DTYPE_KEYS = ("torch_dtype", "dtype")
"""The key of `config.json` that transformers has always read, and that of newer versions."""

_BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tokenizer.tiktoken",
    "additional_chat_templates",
    "chat_template.json",
    "generation_config.json",
)
"""Files, and a folder, that belong to a model and that training does not change."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a folder's weights are: how many tensors, in how many bytes."""

    tensors: int
    size_bytes: int


def save_model_folder(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    beside: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    check: Callable[[Path], None] | None = None,
) -> Written:
    """Write `path`: `config.json`, the tensors, and of the folder `beside`, which the model came from, the tokenizer's
    files and the defaults of generation. `check` is given the folder of the weights before it has its name, and may
    raise. Raises ConfigError where something is at `path`, or it cannot be written."""
    with _whole_or_absent(path) as partial:
        held = _write_weights(partial, tensors, shard_bytes)
        if check is not None:
            check(partial)
        if beside is not None:
            add_beside(partial, beside)
        (partial / "config.json").write_text(json.dumps(config_for(config, held), indent=1))
    return Written(len(held), sum(tensor.nbytes for tensor in held.values()))


def save_adapter_folder(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, check: Callable[[Path], None]
) -> Written:
    """Write `path`, an adapter in PEFT's layout: `adapter_config.json` and the tensors. Otherwise as
    `save_model_folder`."""
    with _whole_or_absent(path) as partial:
        save_file(dict(tensors), partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        check(partial)
        (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1))
    return Written(len(tensors), sum(tensor.nbytes for tensor in tensors.values()))


@contextmanager
def _whole_or_absent(path: Path) -> Iterator[Path]:
    """A folder to write to, which is at `path` when all of it is on the disk. Raises ConfigError where something is
    there, or it cannot be written."""
    refuse_taken(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        own = partial / "mode"
        own.touch()
        everybodys = own.stat().st_mode
        own.unlink()
        for file in partial.rglob("*"):
            if file.is_file():
                file.chmod(everybodys)  # safetensors writes for its user alone
                _to_disk(file)
        partial.rename(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.", hint="Is there room for it?") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_taken(path: Path) -> None:
    """Raises ConfigError where something is at `path`."""
    if path.exists():
        raise ConfigError(f"{path} exists already.", hint="Give another folder, or remove it first.")


def add_beside(path: Path, beside: Path) -> None:
    """Copy into the folder `path` what of the model's folder `beside` belongs to a model, is no tensor, and is not
    there yet. Raises OSError."""
    for source in [beside / name for name in _BESIDE]:
        if (path / source.name).exists():
            continue
        if source.is_dir():
            shutil.copytree(source, path / source.name)
        elif source.exists():
            shutil.copyfile(source, path / source.name)


def config_for(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The `config.json` for these tensors. It has their dtype, and ties the embeddings if there is no output layer."""
    held: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            held[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    said = dict(config)
    if held:
        dtype = held.most_common(1)[0][0]
        named = [key for key in _DTYPE_KEYS if key in said] or [_DTYPE_KEYS[0]]
        said |= dict.fromkeys(named, dtype)
    if EMBEDDING in tensors:
        said["tie_word_embeddings"] = HEAD not in tensors
    return said


def _write_weights(
    folder: Path, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], shard_bytes: int
) -> dict[str, Tensor]:
    """Write the tensors; what was written, without its memory."""
    held: dict[str, Tensor] = {}
    files: list[tuple[Path, list[str]]] = []
    for shard in _shards(tensors.items() if isinstance(tensors, Mapping) else tensors, shard_bytes):
        file = folder / f"part-{len(files)}"
        save_file(shard, file, metadata={"format": "pt"})
        files.append((file, list(shard)))
        held |= {name: tensor.to("meta") for name, tensor in shard.items()}
        shard.clear()
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return held
    where: dict[str, str] = {}
    for number, (file, names) in enumerate(files, start=1):
        named = f"model-{number:05}-of-{len(files):05}.safetensors"
        file.rename(folder / named)
        where |= dict.fromkeys(names, named)
    total = sum(tensor.nbytes for tensor in held.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return held


def _shards(named: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The tensors of one file after another: at least one file, and no empty one beside others."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    yield shard


def _to_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
