"""A model written as a folder in Hugging Face's layout, for whoever serves or trains on.

Invariants:
- *whole or absent*: the folder has its name when all of it is on the disk, and takes nobody else's place;
- *config says what the tensors are*: `config.json` has their dtype, whatever that of the folder was that they came
  from, and says whether the output layer is the embedding;
- *as large as people expect*: weights of more than `SHARD_BYTES` are several files with an index.

This module must not know where the weights come from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from gyre.errors import ConfigError
from gyre.models.tensor_names import EMBEDDING, HEAD

SHARD_BYTES = 5_000_000_000
"""Largest size of one file: the default of transformers."""

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
    "tokenizer.tiktoken",
    "additional_chat_templates",
    "chat_template.json",
    "generation_config.json",
)
"""Files, and a folder, that belong to a model and that training does not change."""


def save_model_folder(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    beside: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `path`: `config.json`, the tensors, and of the folder `beside`, which the model came from, the tokenizer's
    files and the defaults of generation. Raises ConfigError where something is at `path`, or it cannot be written."""
    if path.exists():
        raise ConfigError(f"{path} exists already.", hint="Give another folder, or remove it first.")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_weights(partial, tensors, shard_bytes)
        for source in [beside / name for name in _BESIDE] if beside is not None else []:
            if source.is_dir():
                shutil.copytree(source, partial / source.name)
            elif source.exists():
                shutil.copyfile(source, partial / source.name)
        (partial / "config.json").write_text(json.dumps(config_for(config, tensors), indent=1))
        everybodys = (partial / "config.json").stat().st_mode
        for file in partial.rglob("*"):
            if file.is_file():
                file.chmod(everybodys)  # safetensors writes for its user alone
                _to_disk(file)
        partial.rename(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.", hint="Is there room for it?") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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


def _write_weights(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = tensor.contiguous()
        held += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _to_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
