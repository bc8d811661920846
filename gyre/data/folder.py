"""The prepared form of a data set: a folder of tokens, answers and hashes, with a manifest.

    manifest.json    the source and the options, the number of rows, and the size and checksum of every file
    tokens.npy       int32, the prompts' tokens one after another
    offsets.npy      int64 `[rows + 1]`, the start of each prompt
    hashes.npy       uint64 `[rows]`, the hash of each prompt's tokens: equal prompts have equal hashes
    meta.jsonl       one line per row: `{"answer": …, …}`, which goes with the group to the reward
    meta.npy         int64 `[rows + 1]`, the start of each line
    tokenizer/       the tokenizer's files

Invariants:
- *whole or not there*: the folder is renamed into place after all of it is written;
- *as it was made*: `digest` covers every row, and identifies the data set that a job was trained on.

This module must not know where rows come from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from gyre.errors import ConfigError

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"


class FolderWriter:
    """Takes rows one by one; `finish` puts the folder in its place. Without `finish` nothing stays."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise ConfigError(f"{path} exists already.", hint="Give another folder, or remove it first.")
        self.path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._tokens: list[NDArray[np.int32]] = []
        self._hashes: list[int] = []
        self._starts = [0]
        self._meta = open(self._partial / "meta.jsonl", "wb")  # noqa: SIM115 (as long as the writer is)
        self._digest = xxhash.xxh3_128()

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meta.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    @property
    def rows(self) -> int:
        return len(self._tokens)

    def add(self, token_ids: list[int], meta: Mapping[str, Any]) -> None:
        tokens = np.asarray(token_ids, dtype=np.int32)
        line = json.dumps(meta, ensure_ascii=False, sort_keys=True).encode() + b"\n"
        self._tokens.append(tokens)
        self._hashes.append(xxhash.xxh3_64_intdigest(tokens.tobytes()))
        self._meta.write(line)
        self._starts.append(self._starts[-1] + len(line))
        self._digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes() + line)

    def finish(self, about: Mapping[str, Any], tokenizer: Mapping[str, Path]) -> dict[str, Any]:
        """Write the other files and rename the folder into place; returns the manifest. Raises ConfigError if there
        are no rows."""
        if not self._tokens:
            raise ConfigError(
                "no row is left to train on.", hint="All were left out: too long, or without an answer."
            )
        self._meta.close()
        offsets = np.cumsum([0, *(len(tokens) for tokens in self._tokens)], dtype=np.int64)
        np.save(self._partial / "tokens.npy", np.concatenate(self._tokens))
        np.save(self._partial / "offsets.npy", offsets)
        np.save(self._partial / "hashes.npy", np.array(self._hashes, dtype=np.uint64))
        np.save(self._partial / "meta.npy", np.array(self._starts, dtype=np.int64))
        (self._partial / TOKENIZER).mkdir()
        for name, source in tokenizer.items():
            shutil.copyfile(source, self._partial / TOKENIZER / name)
        lengths = np.diff(offsets)
        manifest = {
            "format": FORMAT,
            "rows": self.rows,
            "digest": self._digest.hexdigest(),
            "prompt_tokens": {
                "total": int(offsets[-1]),
                "longest": int(lengths.max()),
                "mean": round(float(lengths.mean()), 1),
            },
            "distinct_prompts": len(set(self._hashes)),
            **about,
            "files": {
                file.relative_to(self._partial).as_posix(): {
                    "size_bytes": file.stat().st_size,
                    "xxh3_128": _checksum(file),
                }
                for file in sorted(self._partial.rglob("*"))
                if file.is_file()
            },
        }
        (self._partial / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        self._partial.rename(self.path)
        return manifest


@dataclass(frozen=True)
class PreparedFolder:
    """A prepared data set. Its arrays are mapped, not read."""

    path: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest. Raises ConfigError if the folder has none, or a file's size differs from the manifest's."""
        file = self.path / MANIFEST
        if not file.exists():
            raise ConfigError(
                f"{self.path} is no prepared data set.", hint="Make one with `gyre data prepare`."
            )
        found: dict[str, Any] = json.loads(file.read_text())
        if found.get("format") != FORMAT:
            raise ConfigError(
                f"{self.path} has format {found.get('format')}, this Gyre reads {FORMAT}.",
                hint="Prepare it again.",
            )
        for name, told in found["files"].items():
            one = self.path / name
            if not one.exists() or one.stat().st_size != told["size_bytes"]:
                raise ConfigError(
                    f"{one} is missing or has changed since it was written.",
                    hint="Prepare the data set again.",
                )
        return found

    @property
    def rows(self) -> int:
        return int(self.manifest["rows"])

    def prompt_ids(self, row: int) -> NDArray[np.int32]:
        """The prompt's tokens, int32 `[p]`, as a copy."""
        start, end = self._offsets[row : row + 2]
        return np.array(self._tokens[start:end], dtype=np.int32)

    @property
    def largest_token(self) -> int:
        """The largest token of all prompts. Reads all of them."""
        return int(self._tokens.max())

    def meta(self, row: int) -> dict[str, Any]:
        start, end = (int(at) for at in self._meta_offsets[row : row + 2])
        with open(self.path / "meta.jsonl", "rb") as file:
            file.seek(start)
            found: dict[str, Any] = json.loads(file.read(end - start))
        return found

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        return self._array("hashes.npy")

    def verify(self) -> list[str]:
        """The files whose checksum differs from the manifest's. Reads all of them."""
        files = self.manifest["files"]
        return [name for name, told in files.items() if _checksum(self.path / name) != told["xxh3_128"]]

    @cached_property
    def _tokens(self) -> NDArray[np.int32]:
        return self._array("tokens.npy")

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return self._array("offsets.npy")

    @cached_property
    def _meta_offsets(self) -> NDArray[np.int64]:
        return self._array("meta.npy")

    def _array(self, name: str) -> NDArray[Any]:
        _ = self.manifest
        found: NDArray[Any] = np.load(self.path / name, mmap_mode="r")
        return found


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
