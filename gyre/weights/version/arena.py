"""An arena: the folder of a machine's versions, in memory if possible, with at most two versions unless its owner wants
more.

A version is a folder `v00000012` with its files and its manifest, `gyre.json`. The version being written is `.staging`;
it has the manifest of the version that it will be, if that is known, and a journal with one byte for each verified
chunk.

Invariants:
- *whole or absent*: a version appears under its name after everything in it is written, its manifest last;
- *bytes before record*: a chunk is recorded in the journal after its bytes, so that a killed process's successor goes
  on from there; the journal's chunks are still compared with their checksums;
- *one version, one journal*: a staged folder that is begun for other bytes drops its journal before it takes any;
- *nobody reads what is rewritten*: pages of an old version are reused only if nothing else has a link to them and
  nobody reads them; otherwise the new version gets new pages, and the old ones go with their last reader;
- *no fault on a page*: space is taken from the file system before anything is mapped, so a full one is an ArenaFull.

This module must not know how bytes travel or who asks for them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from gyre.errors import GyreError
from gyre.weights.version.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    Chunk,
    FileSpec,
    WeightManifest,
    WeightMismatch,
    cut,
    first_wrong,
)

STAGING = ".staging"
SPARE = ".spare"
TENSORS = ".safetensors"
_INTENDED = ".intended.json"
_JOURNAL = ".journal"
_POPULATE = getattr(
    mmap, "MAP_POPULATE", 0
)  # only on Linux; elsewhere pages are mapped when they are touched


class ArenaFull(GyreError):
    """There is no room for a version. `details` has `needed_bytes` and `free_bytes`."""

    code = "weights.arena_full"


class VersionGone(GyreError):
    """The version is no longer here, or makes room for another."""

    code = "weights.version_gone"


class VersionFiles:
    """The files of one version, mapped. `have` holds the verified chunks."""

    def __init__(
        self,
        path: Path,
        specs: Sequence[FileSpec],
        chunk_bytes: int,
        mapped: Mapping[int, memoryview] | None = None,
        *,
        when_read: bool = False,
    ) -> None:
        """`mapped` holds existing mappings by inode. With `when_read` a file is mapped when somebody reads it first:
        half a second for the pages of 7 GB, which perhaps nobody on the version's own machine needs."""
        self.path = path
        self.specs = tuple(specs)
        self.chunk_bytes = chunk_bytes
        self.chunks = list(cut(specs, chunk_bytes))
        """With digests once the manifest is known."""
        self.have: set[int] = set()
        self._manifest: WeightManifest | None = None
        self.revoked = False
        self.is_verified = False
        """Whether this process has compared the bytes with the checksums."""
        self._readers = 0
        self._lock = threading.Lock()
        self._journal: int | None = None
        self._views: list[memoryview | None] = [None] * len(self.specs)
        if not when_read:
            self._views = [_map(path / file.name, file.size_bytes, mapped or {}) for file in specs]

    def view_of(self, file: int) -> memoryview:
        """The bytes of file number `file`. Raises VersionGone if it is gone, or was closed, before anybody read it."""
        with self._lock:
            found = self._views[file] if self._views else None
            if found is None:
                spec = self.specs[file]
                if not self._views:
                    raise VersionGone(f"{self.path.name} was closed.")
                try:
                    found = _map(self.path / spec.name, spec.size_bytes, {}, populate=False)
                    self._views[file] = found
                except (OSError, ValueError) as error:  # another owner has removed it
                    raise VersionGone(f"{self.path.name} is gone: {error}.") from error
            return found

    def mapped(self) -> list[tuple[int, memoryview]]:
        """The files that are mapped, by their number."""
        return [(number, view) for number, view in enumerate(self._views) if view is not None]

    @property
    def manifest(self) -> WeightManifest | None:
        return self._manifest

    @manifest.setter
    def manifest(self, manifest: WeightManifest) -> None:
        self._manifest = manifest
        self.chunks = manifest.chunks()

    @property
    def is_journalled(self) -> bool:
        return self._journal is not None

    def view(self, chunk: Chunk) -> memoryview:
        return self.view_of(chunk.file)[chunk.offset : chunk.offset + chunk.nbytes]

    def is_right(self, chunk: Chunk) -> bool:
        return xxhash.xxh3_64_hexdigest(self.view(chunk)) == chunk.digest

    def record(self, index: int) -> None:
        """Record that the bytes of chunk `index` are there and right."""
        if self._journal is not None:
            os.pwrite(self._journal, b"\1", index)
        with self._lock:
            self.have.add(index)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within the block the pages stay this version's, unless `revoked` turns true: then stop soon. Raises
        VersionGone."""
        with self._lock:
            if self.revoked:
                raise VersionGone(f"{self.path.name} makes room for another version.")
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1

    def revoke(self) -> bool:
        """Admit no more readers; returns whether there is none."""
        with self._lock:
            self.revoked = True
            return self._readers == 0

    def is_alone(self) -> bool:
        """Whether nobody else has a link to its files, or reads them."""
        with self._lock:
            links = [(self.path / file.name).stat().st_nlink for file in self.specs]
            return not self._readers and max(links, default=1) == 1

    def begin_journal(self, manifest: WeightManifest) -> None:
        """Begin to write `manifest`; the bytes that are there count for nothing."""
        self.manifest = manifest
        self.have = set()
        with contextlib.suppress(FileNotFoundError):
            (self.path / _JOURNAL).unlink()
        (self.path / _INTENDED).write_text(json.dumps(manifest.to_dict()))
        self._open_journal(len(manifest.digests))

    def resume_journal(self, manifest: WeightManifest) -> None:
        """Go on writing `manifest`: `have` becomes the journal's chunks whose checksums are right."""
        self.manifest = manifest
        try:
            recorded = (self.path / _JOURNAL).read_bytes()
        except FileNotFoundError:
            recorded = b""
        said = {chunk.index for chunk in self.chunks if recorded[chunk.index : chunk.index + 1] == b"\1"}
        self.have = {chunk.index for chunk in self.chunks if chunk.index in said and self.is_right(chunk)}
        self._open_journal(len(self.chunks))

    def _open_journal(self, count: int) -> None:
        self._close_journal()
        self._journal = os.open(self.path / _JOURNAL, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._journal, count)

    def _close_journal(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None

    def finish(self) -> None:
        self._close_journal()
        for name in (_JOURNAL, _INTENDED):
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).unlink()

    def close(self) -> None:
        """Drop the mappings; readers keep theirs."""
        self._close_journal()
        self._views = []


class Arena:
    """The versions of one folder; `versions` holds the whole ones, oldest first. One owner stages, any thread reads."""

    def __init__(
        self, root: Path, *, held: int = 2, reserve: Callable[[int, int], None] | None = None
    ) -> None:
        """`held` counts the version that is being written."""
        self.root = root
        self._held = held
        self.versions: dict[int, VersionFiles] = {}
        self.staging: VersionFiles | None = None
        self._reserve = reserve or _take_space
        self._mapped: dict[int, memoryview] = {}
        """Mappings, by inode, of pages that wait for their next version: mapping takes as long as copying."""
        self._lock = threading.RLock()
        root.mkdir(parents=True, exist_ok=True)
        for path in sorted(root.glob("v*")):
            try:
                files = self._open(path)
            except WeightMismatch:
                shutil.rmtree(path, ignore_errors=True)  # the owner died while this version made room
                continue
            assert files.manifest is not None
            self.versions[files.manifest.version] = files

    # -- looking -----------------------------------------------------------------------------------------

    def find(self, checksum: str) -> VersionFiles | None:
        """The version, whole or staged, with this checksum."""
        for files in reversed(self.all_versions()):
            if files.manifest is not None and files.manifest.checksum == checksum and not files.revoked:
                return files
        return None

    def all_versions(self) -> list[VersionFiles]:
        with self._lock:
            return [*self.versions.values(), *([self.staging] if self.staging is not None else [])]

    def newest(self) -> VersionFiles | None:
        with self._lock:
            return self.versions[max(self.versions)] if self.versions else None

    def size_bytes(self) -> int:
        """Bytes of all files in the folder."""
        return sum(f.stat().st_blocks * 512 for f in self.root.rglob("*") if f.is_file())

    # -- staging -----------------------------------------------------------------------------------------

    def stage(
        self, files: Sequence[FileSpec], *, keep: int | None, chunk_bytes: int = CHUNK_BYTES
    ) -> VersionFiles:
        """Stage a version with these files, whose bytes are undefined. Of the whole versions `keep` stays, and the
        newest as far as there is room. Raises ArenaFull; the versions that need not make room are then still there."""
        with self._lock:
            self.abandon(keep_files=True)
            path = self.root / STAGING
            path.mkdir(exist_ok=True)
            for version in self._surplus(self._held - 1, keep):
                self._recycle(self.versions.pop(version), path, files)
            spare = self.root / SPARE
            if spare.is_dir():
                _reuse(spare, path, files)
            self._fill(path, files)
            self.staging = VersionFiles(path, files, chunk_bytes, self._mapped)
            self._mapped = {}
            return self.staging

    def stage_manifest(self, manifest: WeightManifest, *, keep: int | None) -> VersionFiles:
        """Stage `manifest`; chunks that this or a killed process has already fetched for it are kept."""
        with self._lock:
            files = self.staging
            if files is None:
                files = self._left_behind()
            if files is not None and files.manifest == manifest and not files.revoked:
                self.staging = files
                if not files.is_journalled:
                    files.resume_journal(manifest)
                return files
            files = self.stage(manifest.files, keep=keep, chunk_bytes=manifest.chunk_bytes)
            files.begin_journal(manifest)
            return files

    def commit(self, manifest: WeightManifest) -> VersionFiles:
        """Make the staged files, whose bytes are all there and right, version `manifest.version`."""
        with self._lock:
            files = self.staging
            if files is None or files.specs != manifest.files:
                raise WeightMismatch(f"version {manifest.version} was not staged.")
            target = self.root / f"v{manifest.version:08d}"
            files.finish()
            (files.path / MANIFEST).write_text(json.dumps(manifest.to_dict()))
            before = self.versions.pop(manifest.version, None)
            if (
                before is not None
            ):  # the same number again: a publisher that went back to an earlier checkpoint
                before.revoke()
                before.close()
            shutil.rmtree(target, ignore_errors=True)
            files.path.rename(target)
            files.path = target
            files.manifest = manifest
            files.have = set(range(len(manifest.digests)))
            files.is_verified = True
            self.versions[manifest.version] = files
            self.staging = None
            return files

    def adopt(
        self, source: Path, manifest: WeightManifest, *, keep: int | None, verify: bool = True
    ) -> VersionFiles | None:
        """Link and verify a version of another arena on this machine; nothing is copied. None if it cannot be linked or
        is no longer there. Raises WeightMismatch if it has other bytes. Without `verify`, tensors are left to `check`,
        and to whoever loads them or gets their chunks."""
        with self._lock:
            self.abandon(keep_files=False)
            path = self.root / STAGING
            path.mkdir(exist_ok=True)
            try:
                for file in manifest.files:
                    os.link(source / file.name, path / file.name)
                    if (path / file.name).stat().st_size != file.size_bytes:
                        raise ValueError(f"{source / file.name} does not have {file.size_bytes} bytes")
                if not (source / MANIFEST).exists():  # looked for after the links: see `_recycle`
                    raise FileNotFoundError(source)
                if read_manifest(source).checksum != manifest.checksum:
                    raise WeightMismatch(f"{source} holds another version than {manifest.version}.")
                files = VersionFiles(path, manifest.files, manifest.chunk_bytes, when_read=True)
            except WeightMismatch:
                shutil.rmtree(path, ignore_errors=True)
                raise
            except (OSError, ValueError):  # on another file system, gone, or about to go
                shutil.rmtree(path, ignore_errors=True)
                return None
            self.staging = files
        compared = [
            chunk
            for chunk in manifest.chunks()
            if verify or not manifest.files[chunk.file].name.endswith(TENSORS)
        ]
        wrong = first_wrong(compared, files.is_right)
        if wrong is not None:
            with self._lock:
                self.abandon(keep_files=False)
            raise WeightMismatch(
                f"{source} has other bytes than version {manifest.version} in chunk {wrong.index}."
            )
        with self._lock:
            files = self.commit(manifest)
            files.is_verified = verify
            for version in self._surplus(self._held, keep):
                self._drop(self.versions.pop(version))
            return files

    def check(self, version: int) -> VersionFiles | None:
        """The version, which a killed process may have left, if its bytes are right; otherwise it is removed."""
        with self._lock:
            files = self.versions.get(version)
            if files is None or files.is_verified:
                return files
            if first_wrong(files.chunks, files.is_right) is None:
                files.is_verified = True
                return files
            self._drop(self.versions.pop(version))
            return None

    def drop_newer(self, version: int) -> None:
        with self._lock:
            for newer in [number for number in self.versions if number > version]:
                self._drop(self.versions.pop(newer))

    def abandon(self, *, keep_files: bool = False) -> None:
        """Forget the staged version. With `keep_files` the next one gets its pages, unless somebody reads them."""
        with self._lock:
            files, self.staging = self.staging, None
            path = self.root / STAGING
            idle = files.revoke() if files is not None else True
            if files is not None:
                if keep_files and idle:
                    self._keep_mapped(files)
                files.close()
            if not path.exists():
                return
            for name in (_JOURNAL, _INTENDED, MANIFEST):
                with contextlib.suppress(FileNotFoundError):
                    (path / name).unlink()
            if not (keep_files and idle):
                shutil.rmtree(path, ignore_errors=True)
                return
            for file in path.iterdir():
                if file.stat().st_nlink > 1:
                    file.unlink()

    def make_ready(self, files: Sequence[FileSpec] = ()) -> None:
        """Take and map the pages of the next version now, unless it will get those of an old one, so that it need not
        wait for the kernel when it is staged. It will have these files, or those of the newest version. Whoever stages
        calls it; where there is no room, `stage` says so."""
        with self._lock:
            newest = self.newest()
            oldest = [self.versions[version] for version in self._surplus(self._held - 1, None)]
        wanted = files or (newest.specs if newest is not None else ())
        if any(old.is_alone() for old in oldest):
            return
        path = self.root / SPARE
        with contextlib.suppress(ArenaFull):
            path.mkdir(exist_ok=True)
            self._fill(path, wanted)
            for file in wanted:
                found = (path / file.name).stat().st_ino
                if found not in self._mapped:
                    self._mapped[found] = _map(path / file.name, file.size_bytes, {})

    def close(self, *, remove: bool) -> None:
        with self._lock:
            for files in [*self.versions.values(), *([self.staging] if self.staging is not None else [])]:
                files.revoke()
                files.close()
            self.versions, self.staging = {}, None
            if remove:
                shutil.rmtree(self.root, ignore_errors=True)

    # -- files ---------------------------------------------------------------------------------------------

    def _left_behind(self) -> VersionFiles | None:
        path = self.root / STAGING
        try:
            manifest = WeightManifest.from_dict(json.loads((path / _INTENDED).read_text()))
            files = VersionFiles(path, manifest.files, manifest.chunk_bytes)
        except (OSError, ValueError, RecursionError, WeightMismatch):  # nothing usable
            return None
        files.manifest = manifest
        return files

    def _open(self, path: Path) -> VersionFiles:
        manifest = read_manifest(path)
        try:
            files = VersionFiles(path, manifest.files, manifest.chunk_bytes)
        except (OSError, ValueError) as error:
            raise WeightMismatch(f"{path} cannot be read: {error}.") from error
        files.manifest = manifest
        files.have = set(range(len(manifest.digests)))
        return files

    def _recycle(self, old: VersionFiles, into: Path, files: Sequence[FileSpec]) -> None:
        """Reuse the pages of an old version. It is unpublished first and then checked for links, whereas `adopt` links
        first and then checks that it is published: one of the two sees the other."""
        idle = old.revoke()
        with contextlib.suppress(FileNotFoundError):
            (old.path / MANIFEST).unlink()
        if idle:
            self._keep_mapped(old)
            _reuse(old.path, into, files)
        old.close()
        shutil.rmtree(old.path, ignore_errors=True)

    def _surplus(self, room: int, keep: int | None) -> list[int]:
        """The oldest versions, without `keep`, that must go so that `room` stay."""
        others = sorted(version for version in self.versions if version != keep)
        return others[: max(0, len(self.versions) - room)]

    def _keep_mapped(self, files: VersionFiles) -> None:
        for number, view in files.mapped():
            with contextlib.suppress(FileNotFoundError):
                self._mapped[(files.path / files.specs[number].name).stat().st_ino] = view

    def _drop(self, files: VersionFiles) -> None:
        files.revoke()
        files.close()
        shutil.rmtree(files.path, ignore_errors=True)

    def _fill(self, path: Path, files: Sequence[FileSpec]) -> None:
        """Make `path` hold exactly these files, at their sizes, with space taken."""
        wanted = {file.name: file.size_bytes for file in files}
        for found in path.iterdir():
            if found.name not in wanted or found.stat().st_size != wanted[found.name]:
                found.unlink()
        for name, size_bytes in wanted.items():
            if (path / name).exists():
                continue
            descriptor = os.open(path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if size_bytes:
                    self._reserve(descriptor, size_bytes)
            except OSError as error:
                shutil.rmtree(path, ignore_errors=True)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                free = shutil.disk_usage(self.root).free
                raise ArenaFull(
                    f"{self.root} has no room for {size_bytes} bytes of weights: {free} are free.",
                    hint="Give the machine a larger /dev/shm (--shm-size of a container), or the cache another folder.",
                    details={"needed_bytes": size_bytes, "free_bytes": free},
                ) from error
            finally:
                os.close(descriptor)


def read_manifest(path: Path) -> WeightManifest:
    """The manifest in the folder of a whole version. Raises WeightMismatch."""
    try:
        return WeightManifest.from_dict(json.loads((path / MANIFEST).read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightMismatch(f"{path} holds no published weights: {error}.") from error


def is_folder(path: str) -> bool:
    """Whether there is such a folder on this machine; False also for what can be no path."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # longer than any, for one
        return False


def _reuse(source: Path, into: Path, files: Sequence[FileSpec]) -> None:
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            found = (source / file.name).stat()
            if found.st_size == file.size_bytes and found.st_nlink == 1 and not (into / file.name).exists():
                (source / file.name).rename(into / file.name)


def _take_space(descriptor: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
        return
    block = bytes(1 << 20)  # macOS has no fallocate: writing takes the space
    for at in range(0, size_bytes, len(block)):
        os.pwrite(descriptor, block[: size_bytes - at], at)


def _map(
    path: Path, size_bytes: int, mapped: Mapping[int, memoryview], *, populate: bool = True
) -> memoryview:
    """Map a file, with its pages unless they are to be mapped when they are touched. Raises OSError, and
    ValueError if its size differs: access beyond its end would be a fatal signal."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        found = os.fstat(descriptor)
        if found.st_size != size_bytes:
            raise ValueError(f"{path} does not have {size_bytes} bytes")
        if found.st_ino in mapped and mapped[found.st_ino].nbytes == size_bytes:
            return mapped[found.st_ino]
        if not size_bytes:
            return memoryview(b"")
        if _POPULATE and populate:
            return memoryview(mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | _POPULATE))
        return memoryview(mmap.mmap(descriptor, size_bytes))
    finally:
        os.close(descriptor)
