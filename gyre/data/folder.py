"""The prepared form of a data set: a folder of tokens, what goes with them to the reward, and hashes, with a manifest.

    manifest.json    the source, the options and the layout, the number of rows, and the size and checksum of every file
    tokens.npy       int32, the prompts' tokens one after another
    offsets.npy      int64 `[rows + 1]`, the start of each prompt
    hashes.npy       uint64 `[rows]`, the hash of each prompt's tokens: equal prompts have equal hashes
    meta.jsonl       one line per row: `{"answer": …, …}`, which goes with the group to the reward
    meta.npy         int64 `[rows + 1]`, the start of each line
    checks.npy       uint64 `[rows]`, the hash of each line
    tokenizer/       the tokenizer's files

Invariants:
- *whole or not there*: the folder is renamed into place after all of it is written;
- *as it was made*: `digest` covers the bytes of every file and what the manifest says of the tokens, and identifies the
  data set that a job was trained on. A row is compared with its hashes whenever it is read;
- *of one making*: all files are opened when the first is, from one directory, and stay open. A folder that is replaced
  under a job's feet is read to the end as it was.

This module must not know where rows come from.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from gyre.errors import ConfigError

FORMAT = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"

_READ_WHOLE = ("offsets.npy", "hashes.npy", "meta.npy", "checks.npy")
"""Files of 8 bytes a row, which are read when the folder is opened."""
_DIGESTED = (
    "format",
    "rows",
    "tokenizer",
    "vocab_size",
    "stop_token_ids",
    "prompt_tokens",
    "largest_token",
    "files",
)
"""Keys of the manifest that a job goes by."""
_AGAIN = "Prepare the data set again."


class FolderWriter:
    """Takes rows one by one; `finish` puts the folder in its place. Without `finish` nothing stays. Raises ConfigError
    where the folder is there already, or cannot be made."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise ConfigError(f"{path} exists already.", hint="Give another folder, or remove it first.")
        self.path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}")
        shutil.rmtree(self._partial, ignore_errors=True)
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror or error}.", hint="Give another folder."
            ) from None
        self._tokens: list[NDArray[np.int32]] = []
        self._hashes: list[int] = []
        self._checks: list[int] = []
        self._starts = [0]
        self._meta = open(self._partial / "meta.jsonl", "wb")  # noqa: SIM115 (as long as the writer is)

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

    def add(self, token_ids: list[int], line: bytes) -> None:
        """A row: its tokens, and the `meta_line` that goes with it."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        self._tokens.append(tokens)
        self._hashes.append(xxhash.xxh3_64_intdigest(tokens.tobytes()))
        self._checks.append(xxhash.xxh3_64_intdigest(line))
        self._meta.write(line)
        self._starts.append(self._starts[-1] + len(line))

    def finish(self, about: Mapping[str, Any], copy_tokenizer: Callable[[Path], None]) -> dict[str, Any]:
        """Write the other files and rename the folder into place; returns the manifest. There is at least one row."""
        self._meta.close()
        offsets = np.cumsum([0, *(len(tokens) for tokens in self._tokens)], dtype=np.int64)
        tokens = np.concatenate(self._tokens)
        np.save(self._partial / "tokens.npy", tokens)
        np.save(self._partial / "offsets.npy", offsets)
        np.save(self._partial / "hashes.npy", np.array(self._hashes, dtype=np.uint64))
        np.save(self._partial / "meta.npy", np.array(self._starts, dtype=np.int64))
        np.save(self._partial / "checks.npy", np.array(self._checks, dtype=np.uint64))
        (self._partial / TOKENIZER).mkdir()
        copy_tokenizer(self._partial / TOKENIZER)
        lengths = np.diff(offsets)
        manifest = {
            "format": FORMAT,
            "rows": self.rows,
            "digest": "",
            "prompt_tokens": {
                "total": int(offsets[-1]),
                "longest": int(lengths.max()),
                "mean": round(float(lengths.mean()), 1),
            },
            "largest_token": int(tokens.max()),
            "distinct_prompts": len(set(self._hashes)),
            **about,
            "files": {
                file.relative_to(self._partial).as_posix(): {
                    "size_bytes": file.stat().st_size,
                    "xxh3_128": xxhash.xxh3_128_hexdigest(file.read_bytes()),
                }
                for file in sorted(self._partial.rglob("*"))
                if file.is_file()
            },
        }
        manifest["digest"] = _digest(manifest)
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        (self._partial / MANIFEST).write_text(text, encoding="utf-8")
        try:
            self._partial.rename(self.path)
        except OSError as error:  # another process made it meanwhile
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}.") from error
        return manifest


def meta_line(meta: Mapping[str, Any]) -> bytes:
    """The line of `meta.jsonl` for what a reward is given of a row."""
    return json.dumps(meta, ensure_ascii=False, sort_keys=True, allow_nan=False).encode() + b"\n"


class PreparedFolder:
    """A prepared data set. It is opened on first use; raises ConfigError if the folder cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def manifest(self) -> dict[str, Any]:
        return self._opened.manifest

    @property
    def rows(self) -> int:
        return int(self.manifest["rows"])

    @property
    def largest_token(self) -> int:
        """The largest token of all prompts."""
        return int(self.manifest["largest_token"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 `[rows]`, the tokens of each prompt."""
        return np.diff(self._opened.arrays["offsets.npy"])

    @property
    def hashes(self) -> NDArray[np.uint64]:
        return self._opened.arrays["hashes.npy"]

    def prompt_ids(self, row: int) -> NDArray[np.int32]:
        """The prompt's tokens, int32 `[p]`, as a copy. Raises ConfigError if they are not those that were written."""
        opened = self._opened
        start, end = (int(at) for at in opened.arrays["offsets.npy"][row : row + 2])
        data = opened.read("tokens.npy", opened.tokens_at + 4 * start, 4 * (end - start))
        self._check(row, "tokens.npy", data, opened.arrays["hashes.npy"])
        return np.frombuffer(data, dtype=np.int32).copy()

    def meta(self, row: int) -> dict[str, Any]:
        """What goes to the reward. Raises ConfigError if it is not what was written."""
        opened = self._opened
        start, end = (int(at) for at in opened.arrays["meta.npy"][row : row + 2])
        line = opened.read("meta.jsonl", start, end - start)
        self._check(row, "meta.jsonl", line, opened.arrays["checks.npy"])
        found: dict[str, Any] = json.loads(line)
        return found

    def verify(self) -> list[str]:
        """The files whose checksum differs from the manifest's. Reads all of them."""
        return [
            name
            for name, told in self.manifest["files"].items()
            if self._opened.checksum(name) != told["xxh3_128"]
        ]

    def check_digest(self, digest: str) -> None:
        """Raises ConfigError if the folder is not the one with this digest, to the last bit. Reads all of it."""
        if self.manifest["digest"] != digest:
            raise ConfigError(
                f"{self.path} has the digest {self.manifest['digest']}, config.data.digest says {digest}.",
                hint="It is another data set than the job was made for.",
            )
        damaged = self.verify()
        if damaged:
            raise ConfigError(f"{self.path}: {', '.join(damaged)} changed since it was written.", hint=_AGAIN)

    def _check(self, row: int, name: str, data: bytes, hashes: NDArray[np.uint64]) -> None:
        if xxhash.xxh3_64_intdigest(data) != int(hashes[row]):
            raise ConfigError(
                f"{self.path / name} has changed since it was written: row {row} is another.", hint=_AGAIN
            )

    @cached_property
    def _opened(self) -> _OpenFolder:
        return _OpenFolder(self.path)


class _OpenFolder:
    """A folder's files, open. Small ones are in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptors: dict[str, int] = {}
        self._close = weakref.finalize(self, _close_all, self._descriptors)
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            raise _not_prepared(path) from None
        try:
            self._descriptors[MANIFEST] = self._open(MANIFEST, directory)
            self.manifest = self._read_manifest()
            for name in self.manifest["files"]:
                self._descriptors[name] = self._open(name, directory)
        finally:
            os.close(directory)
        for name, told in self.manifest["files"].items():
            if os.fstat(self._descriptors[name]).st_size != told["size_bytes"]:
                raise self._changed(name)
        self.arrays = {name: self._whole(name) for name in _READ_WHOLE}
        self.tokens_at = self._start_of_tokens()

    def read(self, name: str, at: int, size: int) -> bytes:
        """`size` bytes from `at`; fewer where the file ends. It never maps the file into memory,
        because another process may truncate it."""
        return os.pread(self._descriptors[name], size, at)

    def checksum(self, name: str) -> str:
        digest, at = xxhash.xxh3_128(), 0
        while block := self.read(name, at, 1 << 20):
            digest.update(block)
            at += len(block)
        return digest.hexdigest()

    def _open(self, name: str, directory: int) -> int:
        try:
            return os.open(name, os.O_RDONLY, dir_fd=directory)
        except OSError:
            raise _not_prepared(self._path) if name == MANIFEST else self._changed(name) from None

    def _read_manifest(self) -> dict[str, Any]:
        data = self.read(MANIFEST, 0, os.fstat(self._descriptors[MANIFEST]).st_size)
        try:
            found: dict[str, Any] = json.loads(data)
            form = found.get("format")
            if form == FORMAT and _digest(found) != found["digest"]:
                raise ValueError("it does not have its own digest")
            if not (isinstance(form, int) and "files" in found and "rows" in found):
                raise _not_prepared(self._path)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{self._path / MANIFEST} has changed since it was written: {error}.", hint=_AGAIN
            ) from error
        if form != FORMAT:
            raise ConfigError(
                f"{self._path} has format {form}, this Gyre reads {FORMAT}.", hint="Prepare it again."
            )
        return found

    def _whole(self, name: str) -> NDArray[Any]:
        told = self.manifest["files"][name]
        data = self.read(name, 0, told["size_bytes"])
        if xxhash.xxh3_128_hexdigest(data) != told["xxh3_128"]:
            raise self._changed(name)
        found: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
        found.flags.writeable = False
        return found

    def _start_of_tokens(self) -> int:
        """Where the numbers of `tokens.npy` begin: behind a head whose length depends on NumPy's version."""
        size = self.manifest["files"]["tokens.npy"]["size_bytes"]
        return int(size - 4 * self.manifest["prompt_tokens"]["total"])

    def _changed(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self._path / name} is missing or has changed since it was written.", hint=_AGAIN
        )


def _close_all(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
    descriptors.clear()


def _not_prepared(path: Path) -> ConfigError:
    what = "is a tokenizer's folder, and" if (path / "tokenizer.json").exists() else "is"
    return ConfigError(f"{path} {what} no prepared data set.", hint="Make one with `gyre data prepare`.")


def _digest(manifest: Mapping[str, Any]) -> str:
    told = {key: manifest[key] for key in _DIGESTED}
    return xxhash.xxh3_128_hexdigest(json.dumps(told, sort_keys=True, ensure_ascii=True).encode())
