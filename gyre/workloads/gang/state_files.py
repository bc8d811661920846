"""One rank's state on the disk: plain bytes, and a record of what they are.

    rank_00000.state    the bytes, in chunks
    rank_00000.json     the size, each chunk's checksum, and what the writer says of the bytes; written last

Invariants:
- *bytes before record*: the record is there only when all bytes are on the disk (fsync of file and folder);
- *verified before used*: the record has a checksum of itself, and `problem_with` reads every byte, so a caller touches
  nothing before it has asked;
- *beside the training*: a few threads write large pieces past the page cache, and hold the interpreter's lock for none
  of it. Where a file system refuses that, they write through the cache, and flush as they go.

This module must not know what the bytes mean, or how ranks agree.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from gyre.errors import GyreError

FORMAT = 1
_SEAL = "xxh3"
PAGE_BYTES = 4096
"""Pieces begin at multiples of it, in memory and in the file: what a disk wants of writes past the cache."""
CHUNK_BYTES = 16 << 20
THREADS = 4
_FLUSH_BYTES = 256 << 20
"""Through the cache: a writer flushes after so much, or all of it would wait for the end."""


class StateDamaged(GyreError):
    """A state's files are missing, cut short or not what was written."""

    code = "checkpoint.state_damaged"


class WriteStopped(Exception):
    """The write was stopped."""


def write_state(
    path: Path,
    pieces: Iterable[memoryview],
    content: dict[str, Any],
    *,
    stop: threading.Event,
    threads: int = THREADS,
) -> int:
    """Write the `pieces`, one after the other, each at a multiple of `PAGE_BYTES` of `path`, then the record with
    `content`, plain data, beside it; returns the number of bytes. With one thread a piece is written before the next
    one is asked for. Raises OSError, and WriteStopped once `stop` is set; there is no record then."""
    with _File(path) as file:
        found: list[tuple[int, int, str]] = []
        if threads == 1:
            for offset, chunk in _chunks(pieces):
                found.append(_write_chunk(file, offset, chunk, stop))
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="gyre-state") as pool:
                found += pool.map(lambda one: _write_chunk(file, one[0], one[1], stop), list(_chunks(pieces)))
        size = max((offset + length for offset, length, _ in found), default=0)
        file.close_whole(size)
    record = {"format": FORMAT, "size_bytes": size, "chunks": found, **content}
    write_json(record_path(path), sealed(record))
    return size


def record_path(path: Path) -> Path:
    return path.with_suffix(".json")


def read_record(path: Path) -> dict[str, Any]:
    """The record of the state at `path`; whether it is what was written, `is_broken` says. Raises StateDamaged where it
    is missing or cannot be read, and where the file has another size."""
    try:
        record: dict[str, Any] = json.loads(record_path(path).read_text())
        if is_broken(record):
            raise StateDamaged(f"{record_path(path)} is not what was written")
        size, wanted = path.stat().st_size, record["size_bytes"]
        if record["format"] != FORMAT:
            raise StateDamaged(f"{path} has format {record['format']}, this Gyre reads {FORMAT}")
        chunks = record["chunks"]
        whole = all(type(offset) is int and type(length) is int for offset, length, _ in chunks)
        if not whole or not all(0 <= offset <= offset + length <= wanted for offset, length, _ in chunks):
            raise StateDamaged(f"{record_path(path)} speaks of bytes that {path} does not have")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateDamaged(f"{path} or its record cannot be read: {error!r}") from error
    if size != wanted:
        raise StateDamaged(f"{path} has {size} bytes, {wanted} were written")
    return record


def problem_with(path: Path, record: dict[str, Any], *, threads: int = THREADS) -> str:
    """How the bytes at `path` differ from the record; "" where they do not. Reads all of them."""
    local = threading.local()
    largest = max(
        (length for _, length, _ in record["chunks"]), default=0
    )  # as large as its writer made them

    def differs(chunk: Sequence[Any]) -> str:
        offset, length, digest = chunk
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(largest))
        view = local.buffer[:length]
        try:
            read_at(descriptor, view, offset)
        except (OSError, StateDamaged) as error:
            return f"{path} cannot be read: {error}"
        return "" if _digest(view) == digest else f"{path} is not what was written, at byte {offset}"

    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        return f"{path} cannot be read: {error}"
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="gyre-state") as pool:
            return next((problem for problem in pool.map(differs, record["chunks"]) if problem), "")
    finally:
        os.close(descriptor)


def read_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill `view` with the bytes from `offset`. Raises StateDamaged where the file ends before that."""
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise StateDamaged("the file ends too early")
        view, offset = view[count:], offset + count


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """The content with a checksum of itself, for `is_broken` to find out whether it is still what was written."""
    return {**content, _SEAL: _seal_of(json.loads(json.dumps(content)))}


def is_broken(content: dict[str, Any]) -> bool:
    """Whether what was read from a file is not what `sealed` gave."""
    return content.get(_SEAL) != _seal_of(content)


def _seal_of(content: dict[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != _SEAL}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a small file so that it is there whole or not at all, whatever dies. Raises OSError."""
    partial = path.with_suffix(".partial")
    with open(partial, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such thing
            raise
    finally:
        os.close(descriptor)


def padded(size: int) -> int:
    """The size up to the next multiple of `PAGE_BYTES`."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _chunks(pieces: Iterable[memoryview]) -> Iterator[tuple[int, memoryview]]:
    offset = 0
    for piece in pieces:
        for at in range(0, len(piece), CHUNK_BYTES):
            yield offset + at, piece[at : at + CHUNK_BYTES]
        offset += padded(len(piece))


def _write_chunk(file: _File, offset: int, chunk: memoryview, stop: threading.Event) -> tuple[int, int, str]:
    if stop.is_set():
        raise WriteStopped
    file.write(chunk, offset)
    return offset, len(chunk), _digest(chunk)


def _digest(view: memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(view)


class _File:
    """A file that several threads write to, past the page cache where that can be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cached = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._direct = -1
        if hasattr(os, "O_DIRECT"):
            try:
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:  # the file system has no such thing
                    raise
        self._unflushed = 0

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._cached)
        if self._direct >= 0:
            os.close(self._direct)

    def write(self, view: memoryview, offset: int) -> None:
        if self._direct >= 0 and _is_aligned(view, offset):
            try:
                _write_at(self._direct, view, offset)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:  # the disk wants larger multiples than a page
                    raise
        _write_at(self._cached, view, offset)
        self._unflushed += len(view)  # threads may lose a sum here, which only shifts the next flush
        if self._unflushed >= _FLUSH_BYTES:
            self._unflushed = 0
            os.fdatasync(self._cached)

    def close_whole(self, size: int) -> None:
        os.ftruncate(self._cached, size)
        os.fsync(self._cached)


def _write_at(descriptor: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _is_aligned(view: memoryview, offset: int) -> bool:
    address = _address(view)
    return not (offset | len(view) | address) % PAGE_BYTES


def _address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0


assert mmap.PAGESIZE % PAGE_BYTES == 0  # a mapping begins at such a multiple
