"""A policy version as a folder in Hugging Face's layout: `config.json`, safetensors, and a listing with checksums.

Invariants:
- *whole or absent*: a folder appears under its final name when everything in it is written and listed;
- *verified before served*: `verify` compares every byte with the listing.

This module must not know who publishes or who loads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from gyre.errors import GyreError
from gyre.rollouts.frames import WeightFile
from gyre.weights.manifest import WeightManifest, WeightMismatch

LISTING = "gyre.json"

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

_SAFETENSORS_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: Path
    files: list[WeightFile]
    checksum: str

    @classmethod
    def read(cls, path: Path) -> ModelFolder:
        """The folder as its listing describes it. Raises WeightMismatch where there is none."""
        try:
            listing = json.loads((path / LISTING).read_text())
            files = [WeightFile.model_validate(file) for file in listing["files"]]
            return cls(path, files, listing["checksum"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightMismatch(f"{path} holds no published weights: {error}.") from error

    def fingerprint(self) -> str:
        return fingerprint(self.path)

    def copy_of(self, source: Path) -> None:
        """Fill this folder from `source`, by links where the file system can, and `verify` it. Raises WeightMismatch
        where `source` has not all of it, or other bytes."""
        for file in self.files:
            target = self.path / file.name
            try:
                target.unlink(missing_ok=True)
                try:
                    os.link(source / file.name, target)
                except OSError:  # another file system, or one without links
                    shutil.copyfile(source / file.name, target)
            except OSError as error:
                raise WeightMismatch(f"{source / file.name} cannot be read: {error}.") from error
        self.verify()

    def verify(self) -> None:
        """Raises WeightMismatch at the first file that is not what the listing says."""
        for file in self.files:
            found, size_bytes = file_checksum(self.path / file.name)
            if found != file.checksum or size_bytes != file.size_bytes:
                raise WeightMismatch(
                    f"{self.path / file.name}: {size_bytes} bytes with checksum {found}; the listing says "
                    f"{file.size_bytes} bytes with {file.checksum}.",
                    hint="Fetch it again.",
                )


def fingerprint(path: Path) -> str:
    """What must agree between instances of one job: the model's shape, whatever its weights. "unset" without one."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return "unset"
    shape = json.dumps([config.get(key) for key in _FINGERPRINT_KEYS])
    return f"{config.get('model_type', 'model')}-{xxhash.xxh3_64_hexdigest(shape.encode())}"


def file_checksum(path: Path) -> tuple[str, int]:
    """xxh3-128 in hexadecimal, and the size. Raises WeightMismatch where the file cannot be read."""
    digest, size_bytes = xxhash.xxh3_128(), 0
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                size_bytes += len(block)
    except OSError as error:
        raise WeightMismatch(f"{path} cannot be read: {error}.") from error
    return digest.hexdigest(), size_bytes


def write_model_folder(
    path: Path, config: Mapping[str, Any], manifest: WeightManifest, buffer: bytes | memoryview
) -> ModelFolder:
    """Write version `manifest.version` as `path`, replacing what is there. Names and dtypes are the manifest's;
    a tensor that shares its bytes with one before it (tied) is left out where the config ties embeddings."""
    view = memoryview(buffer)
    header: dict[str, Any] = {}
    parts: list[memoryview] = []
    end = 0
    seen: set[int] = set()
    for spec in manifest.tensors:
        if spec.offset in seen and spec.nbytes:
            continue
        seen.add(spec.offset)
        if spec.dtype not in _SAFETENSORS_DTYPES:
            raise GyreError(f"tensor {spec.name} has dtype {spec.dtype}, which safetensors has no name for.")
        header[spec.name] = {
            "dtype": _SAFETENSORS_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        parts.append(view[spec.offset : spec.offset + spec.nbytes])
        end += spec.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with open(partial / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            file.write(part)
    (partial / "config.json").write_text(json.dumps(dict(config), indent=1))
    folder = list_model_folder(partial, version=manifest.version, checksum=manifest.checksum)
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    return ModelFolder(path, folder.files, folder.checksum)


def list_model_folder(path: Path, *, version: int, checksum: str | None = None) -> ModelFolder:
    """Write the listing of a folder in Hugging Face's layout, of all files that are there. `checksum` names the
    weights; without one it is made of the files'."""
    files = []
    for file in sorted(path.iterdir()):
        if file.is_file() and file.name != LISTING:
            digest, size_bytes = file_checksum(file)
            files.append(WeightFile(name=file.name, size_bytes=size_bytes, checksum=digest))
    if checksum is None:
        checksum = xxhash.xxh3_128_hexdigest("".join(file.checksum for file in files).encode())
    listing = {"version": version, "checksum": checksum, "files": [file.model_dump() for file in files]}
    (path / LISTING).write_text(json.dumps(listing))
    return ModelFolder(path, files, checksum)
