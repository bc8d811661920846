"""A policy version as a folder in Hugging Face's layout: `config.json`, safetensors, and its manifest in `gyre.json`.

Invariants:
- *whole or absent*: a folder appears under its final name when everything in it is written and described;
- *verified before served*: `verify` compares every byte with the manifest.

This module must not know who publishes or who loads.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from gyre.weights.version.arena import read_manifest
from gyre.weights.version.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    FileSpec,
    TensorSpec,
    WeightManifest,
    WeightMismatch,
    describe,
)

_FINGERPRINT_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: Path
    manifest: WeightManifest

    @classmethod
    def read(cls, path: Path) -> ModelFolder:
        """The folder as its manifest describes it. Raises WeightMismatch where there is none."""
        return cls(path, read_manifest(path))

    @property
    def checksum(self) -> str:
        return self.manifest.checksum

    def fingerprint(self) -> str:
        return fingerprint(self.path)

    def verify(self) -> None:
        """Raises WeightMismatch at the first chunk that is not what the manifest says."""
        found = _described(self.path, self.manifest)
        for chunk, digest in zip(self.manifest.chunks(), found.digests, strict=True):
            if digest != chunk.digest:
                name = self.manifest.files[chunk.file].name
                raise WeightMismatch(
                    f"{self.path / name}: chunk {chunk.index} has checksum {digest}; the manifest says {chunk.digest}.",
                    hint="Fetch it again.",
                )


def fingerprint(path: Path) -> str:
    """What must agree between instances of one job: the model's shape, whatever its weights. "unset" without one."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return "unset"
    return fingerprint_of(config) if isinstance(config, dict) else "unset"


def fingerprint_of(config: Mapping[str, Any]) -> str:
    """The same of the content of a `config.json`."""
    shape = json.dumps([config.get(key) for key in _FINGERPRINT_KEYS])
    return f"{config.get('model_type', 'model')}-{xxhash.xxh3_64_hexdigest(shape.encode())}"


def same_config(first: Path, second: Path) -> bool:
    """Whether two folders describe their models alike, to the last key of `config.json`. False where one has none."""
    try:
        return bool(
            json.loads((first / "config.json").read_text())
            == json.loads((second / "config.json").read_text())
        )
    except (OSError, ValueError, RecursionError):
        return False


def config_bytes(config: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(config), indent=1).encode()


def list_model_folder(
    path: Path, *, version: int, step: int = 0, tensors: tuple[TensorSpec, ...] = ()
) -> ModelFolder:
    """Write the manifest of a folder in Hugging Face's layout, of all files that are there."""
    files = tuple(
        FileSpec(file.name, file.stat().st_size)
        for file in sorted(path.iterdir())
        if file.is_file() and file.name != MANIFEST
    )
    empty = WeightManifest(version, None, step, tensors, files, CHUNK_BYTES, (), "")
    manifest = _described(path, empty)
    (path / MANIFEST).write_text(json.dumps(manifest.to_dict()))
    return ModelFolder(path, manifest)


def _described(path: Path, manifest: WeightManifest) -> WeightManifest:
    """The manifest of the same files with the checksums that they have. Raises WeightMismatch where one cannot be
    read or has another size."""
    with ExitStack() as stack:
        contents: list[bytes | memoryview] = []
        for spec in manifest.files:
            try:
                file = stack.enter_context(open(path / spec.name, "rb"))
                if os.fstat(file.fileno()).st_size != spec.size_bytes:
                    raise WeightMismatch(
                        f"{path / spec.name} has {os.fstat(file.fileno()).st_size} bytes; the manifest says "
                        f"{spec.size_bytes}.",
                        hint="Fetch it again.",
                    )
                if not spec.size_bytes:
                    contents.append(b"")
                    continue
                mapped = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                contents.append(stack.enter_context(memoryview(mapped)))
            except OSError as error:
                raise WeightMismatch(f"{path / spec.name} cannot be read: {error}.") from error
        return describe(
            manifest.files,
            contents,
            version=manifest.version,
            step=manifest.step,
            base=manifest.base,
            tensors=manifest.tensors,
            chunk_bytes=manifest.chunk_bytes,
        )
