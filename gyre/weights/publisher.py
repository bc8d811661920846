"""Publisher of versions: it stages tensors one after the other in an arena, whose server then serves them.

    publication = publisher.begin(version, step, layout, files={"config.json": b"..."})
    for name, tensor in ...:
        publication.put(name, tensor)     # returns when `tensor` may be overwritten
    publication.finish().result()         # or do not wait: a thread makes checksums and commits

Invariants:
- *a bucket at a time*: no tensor is held after its `put` (`put_all`), and nothing is converted twice;
- *the trainer does not wait for receivers*: a publish takes pages that nobody reads, or new ones, and never waits for
  a lock that a transfer holds;
- *committed last*: receivers find a version only after all its checksums are known;
- *versions grow*: a number below the newest is refused, and the newest number is accepted again only with the same
  bytes. Newer versions that an earlier process left are removed.

This module must not know who fetches.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from gyre.errors import Conflict
from gyre.weights.codecs.fp8 import is_rounded, round_fp8
from gyre.weights.transfer.server import ChunkServer
from gyre.weights.version.arena import Arena, VersionFiles
from gyre.weights.version.manifest import (
    ALIGNMENT,
    CHUNK_BYTES,
    TENSOR_FILE,
    FileSpec,
    Layout,
    TensorSpec,
    WeightManifest,
    WeightMismatch,
    checksum_of,
    hashing_threads,
)

if TYPE_CHECKING:
    import torch

LEAST_CHUNK_BYTES = 1 << 20
PIECE_ELEMENTS = 4 << 20
"""Of a tensor that several threads copy."""

CHUNKS_WANTED = 32
"""Chunks that even a small version is cut into, so that receivers can serve each other while they fetch."""


def chunk_bytes_for(size_bytes: int, most: int = CHUNK_BYTES) -> int:
    """The chunk size: a multiple of 256 bytes, 64 MiB for versions of 2 GiB and more."""
    part = -(-size_bytes // CHUNKS_WANTED)
    return min(most, max(LEAST_CHUNK_BYTES, -(-part // ALIGNMENT) * ALIGNMENT))


class Publisher:
    """Publishes versions in `arena`; `server`, if given, becomes their origin."""

    def __init__(
        self, arena: Arena, server: ChunkServer | None = None, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.arena = arena
        self.server = server
        self.newest = -1
        """The newest version that this process published; -1 before the first."""
        self._chunk_bytes = chunk_bytes

    def begin(
        self,
        version: int,
        step: int,
        layout: Layout,
        *,
        files: Mapping[str, bytes] | None = None,
        base: int | None = None,
        rounding: Literal["none", "fp8"] = "none",
    ) -> Publication:
        """Begin a version. `files` go beside the tensors (`config.json`, the tokenizer's). With `rounding="fp8"`
        matrices are rounded to what the codec `fp8` carries at half the bytes, and the rounded weights are the version.
        Raises ArenaFull, and Conflict if a newer version was published."""
        if version < self.newest:
            raise Conflict(
                f"version {version} would be published after version {self.newest}.",
                hint="Versions only grow.",
            )
        self.arena.drop_newer(version)
        side = dict(files or {})
        specs = (
            FileSpec(TENSOR_FILE, layout.size_bytes),
            *(FileSpec(name, len(side[name])) for name in sorted(side)),
        )
        size = chunk_bytes_for(layout.size_bytes, self._chunk_bytes)
        staged = self.arena.stage(specs, keep=None, chunk_bytes=size)
        return Publication(self, staged, version, step, base, layout, side, rounding)

    def publish(
        self,
        version: int,
        step: int,
        layout: Layout,
        tensors: Iterable[tuple[str, torch.Tensor]],
        **options: Any,
    ) -> WeightManifest:
        """Publish a whole version, and wait for the commit."""
        publication = self.begin(version, step, layout, **options)
        try:
            for name, tensor in tensors:
                publication.put(name, tensor)
        except BaseException as error:  # its thread waits for the rest
            publication.give_up(error)
            raise
        return publication.finish().result()


class Publication:
    def __init__(
        self,
        publisher: Publisher,
        files: VersionFiles,
        version: int,
        step: int,
        base: int | None,
        layout: Layout,
        side: Mapping[str, bytes],
        rounding: Literal["none", "fp8"],
    ) -> None:
        self.copy_s = 0.0
        """Seconds that the trainer has waited for: conversion and copy."""
        self._publisher = publisher
        self._files = files
        self._numbers = (version, base, step)
        self._layout = layout
        self._rounding = rounding
        self._specs = {spec.name: spec for spec in layout.tensors}
        self._lock = threading.Lock()
        self._due = {spec.offset: spec.nbytes for spec in layout.tensors if spec.nbytes}
        self._missing = [0] * len(files.chunks)
        """Bytes of each chunk that are still missing."""
        self._digests = [""] * len(files.chunks)
        self._full: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done: Future[WeightManifest] = Future()
        self._error: BaseException | None = None
        for chunk in files.chunks:
            self._missing[chunk.index] = chunk.nbytes
        self._thread = threading.Thread(target=self._check, name="gyre-publish", daemon=True)
        self._thread.start()
        self._fill(0, 0, layout.header)
        for number, file in enumerate(files.specs[1:], 1):
            self._fill(number, 0, side[file.name])

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Convert and copy a tensor. Raises WeightMismatch if the layout has no such name or another shape, or if the
        tensor was put before."""
        began = time.monotonic()
        spec = self._begin(name, tensor)
        if spec.nbytes:
            self._copy(spec, tensor.detach(), 0, tensor.numel())
        self.copy_s += time.monotonic() - began

    def put_all(self, named: Mapping[str, torch.Tensor]) -> None:
        """Put tensors on as many threads as make checksums, large ones in pieces. Raises like `put`."""
        began = time.monotonic()
        with ThreadPoolExecutor(hashing_threads(), thread_name_prefix="gyre-copy") as pool:
            copies = []
            for name, tensor in sorted(named.items(), key=lambda item: self._offset(item[0])):
                spec = self._begin(name, tensor)
                for first, end in self._pieces(spec, tensor):
                    copies.append(pool.submit(self._copy, spec, tensor.detach(), first, end))
            for copy in copies:
                copy.result()
        self.copy_s += time.monotonic() - began

    def _offset(self, name: str) -> int:
        """In the order of the file chunks become full one after another, and their checksums are made meanwhile."""
        spec = self._specs.get(name)
        return spec.offset if spec is not None else 0

    def _pieces(self, spec: TensorSpec, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """The ranges of elements that are copied apart: of what is rounded, or lies elsewhere in no order, one."""
        count = tensor.numel()
        step = PIECE_ELEMENTS if tensor.is_contiguous() and self._rounding == "none" else max(1, count)
        return [(first, min(first + step, count)) for first in range(0, count, step)]

    def _begin(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        spec = self._specs.get(name)
        if spec is None or tuple(tensor.shape) != spec.shape:
            raise WeightMismatch(
                f"tensor {name} of shape {tuple(tensor.shape)} is not as the layout says: "
                f"{spec.shape if spec is not None else 'no such name'}."
            )
        if spec.nbytes and self._due.pop(spec.offset, None) is None:
            raise WeightMismatch(f"tensor {name} was put a second time.")
        return spec

    def _copy(self, spec: TensorSpec, source: torch.Tensor, first: int, end: int) -> None:
        """Copy the elements from `first` to `end`: all of them, or those of a contiguous tensor."""
        import torch

        dtype = getattr(torch, spec.dtype)
        offset, count = spec.offset + first * dtype.itemsize, end - first
        flat = torch.frombuffer(self._files.view_of(0), dtype=dtype, count=count, offset=offset)
        if count < source.numel():
            flat.copy_(source.view(-1)[first:end])
        else:
            if self._rounding == "fp8" and dtype == torch.bfloat16 and is_rounded(spec.name, spec.shape):
                source = round_fp8(source)
            flat.view(spec.shape).copy_(source)
        self._filled(0, offset, count * dtype.itemsize)

    def _fill(self, file: int, offset: int, content: bytes | memoryview) -> None:
        self._files.view_of(file)[offset : offset + len(content)] = content
        self._filled(file, offset, len(content))

    def _filled(self, file: int, offset: int, nbytes: int) -> None:
        first = next(chunk.index for chunk in self._files.chunks if chunk.file == file) if nbytes else 0
        size = self._files.chunk_bytes
        end = offset + nbytes
        while offset < end:
            index = first + offset // size
            part = min(end, (offset // size + 1) * size) - offset
            with self._lock:
                self._missing[index] -= part
                is_full = self._missing[index] == 0
            if is_full:
                self._full.put(index)
            offset += part

    def finish(self) -> Future[WeightManifest]:
        """A future of the manifest, done after the commit. It fails with WeightMismatch if tensors were not put."""
        self._full.put(None)
        return self._done

    def give_up(self, error: BaseException) -> None:
        """The tensors cannot be put: nothing is committed, and the future of `finish` fails with `error`."""
        self._error = error
        self._full.put(None)

    def _check(self) -> None:
        """The thread's work: checksums of chunks as they become full, then the commit."""
        try:
            with ThreadPoolExecutor(hashing_threads(), thread_name_prefix="gyre-hash") as pool:
                hashed = []
                while (index := self._full.get()) is not None:
                    hashed.append(pool.submit(self._hash, index))
                for one in hashed:
                    one.result()
            if self._error is not None:
                raise self._error
            if self._due:
                names = sorted(spec.name for spec in self._layout.tensors if spec.offset in self._due)
                raise WeightMismatch(f"{len(names)} tensors were not put, {names[0]} among them.")
            arena, server = self._publisher.arena, self._publisher.server
            before = arena.newest()
            self._done.set_result(self._commit())
        except BaseException as error:
            self._done.set_exception(error)
            return
        files = arena.versions.get(self._numbers[0])
        if server is not None and files is not None:
            server.prepare(before, files)

    def _hash(self, index: int) -> None:
        self._digests[index] = xxhash.xxh3_64_hexdigest(self._files.view(self._files.chunks[index]))

    def _commit(self) -> WeightManifest:
        version, base, step = self._numbers
        files = self._files
        manifest = WeightManifest(
            version,
            base,
            step,
            self._layout.tensors,
            files.specs,
            files.chunk_bytes,
            tuple(self._digests),
            checksum_of(files.specs, files.chunk_bytes, self._digests),
        )
        arena, server = self._publisher.arena, self._publisher.server
        if server is not None:
            server.origin_of.add(manifest.checksum)
        before = arena.versions.get(version)
        if before is not None and before.manifest is not None:
            if before.manifest.checksum == manifest.checksum and before.is_verified:
                arena.abandon(keep_files=True)
                self._publisher.newest = version
                return before.manifest
            if version == self._publisher.newest and before.manifest.checksum != manifest.checksum:
                arena.abandon(keep_files=True)
                raise Conflict(f"version {version} is here with other bytes.", hint="Versions only grow.")
        arena.commit(manifest)
        self._publisher.newest = version
        if server is not None:
            server.forget({one.manifest.checksum for one in arena.versions.values() if one.manifest})
        return manifest
