"""Where versions lie on a machine: a folder, in memory where there is such a one, with two versions in it at most,
unless its owner wants more.

A version is a folder `v00000012` with its files and the manifest in `gyre.json`. The one that is being written is
`.staging`; it has the manifest of what it is to become, where that is known, and a journal with a byte for each chunk
whose bytes are there and were right.

Invariants:
- *whole or absent*: a version appears under its name when everything in it is written; its manifest is written last;
- *bytes before record*: a chunk is in the journal only after its bytes, so that who was killed goes on from there, and
  what the journal says is compared with the checksums all the same;
- *one version, one journal*: a staged folder that is begun for other bytes forgets its journal before it takes any;
- *nobody reads what is rewritten*: the pages of an old version are used again only if nothing else has a link to
  them and nobody is reading; else it gets new ones, and the old ones go with their last reader;
- *no fault on a page*: space is taken from the file system before anything is mapped. A full one is an ArenaFull.

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
from gyre.weights.version.hashing import first_wrong
from gyre.weights.version.manifest import CHUNK_BYTES, Chunk, FileSpec, WeightManifest, WeightMismatch, cut

MANIFEST = "gyre.json"
STAGING = ".staging"
SPARE = ".spare"
_INTENDED = ".intended.json"
_JOURNAL = ".journal"
_POPULATE = getattr(
    mmap, "MAP_POPULATE", 0
)  # Linux alone has it; elsewhere pages are mapped as they are touched


class ArenaFull(GyreError):
    """There is no room for a version. `details` has `needed_bytes` and `free_bytes`."""

    code = "weights.arena_full"


class SlotGone(GyreError):
    """This version is no longer here, or makes room for another."""

    code = "weights.slot_gone"


class VersionFiles:
    """The files of one version, mapped. `have` holds the chunks whose bytes are there and right."""

    def __init__(
        self,
        path: Path,
        files: Sequence[FileSpec],
        chunk_bytes: int,
        mapped: Mapping[int, memoryview] | None = None,
    ) -> None:
        """`mapped` are mappings that are there already, by inode."""
        self.path = path
        self.files = tuple(files)
        self.chunk_bytes = chunk_bytes
        self.chunks = list(cut(files, chunk_bytes))
        """With digests once the manifest is known."""
        self.have: set[int] = set()
        self._manifest: WeightManifest | None = None
        self.revoked = False
        self.is_verified = False
        """Its bytes were compared with the checksums by this process."""
        self._readers = 0
        self._lock = threading.Lock()
        self._journal: int | None = None
        self.views = [_map(path / file.name, file.size_bytes, mapped or {}) for file in files]

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
        return self.views[chunk.file][chunk.offset : chunk.offset + chunk.nbytes]

    def is_right(self, chunk: Chunk) -> bool:
        return xxhash.xxh3_64_hexdigest(self.view(chunk)) == chunk.digest

    def record(self, index: int) -> None:
        """The bytes of chunk `index` are there and right."""
        if self._journal is not None:
            os.pwrite(self._journal, b"\1", index)
        with self._lock:
            self.have.add(index)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Its pages stay its own meanwhile, unless `revoked` turns true: then stop soon. Raises SlotGone."""
        with self._lock:
            if self.revoked:
                raise SlotGone(f"{self.path.name} makes room for another version.")
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1

    def revoke(self) -> bool:
        """Nobody begins to read it any more; whether nobody is reading."""
        with self._lock:
            self.revoked = True
            return self._readers == 0

    def begin_journal(self, manifest: WeightManifest) -> None:
        """This is to become `manifest`; what it holds counts for nothing."""
        self.manifest = manifest
        self.have = set()
        with contextlib.suppress(FileNotFoundError):
            (self.path / _JOURNAL).unlink()
        (self.path / _INTENDED).write_text(json.dumps(manifest.to_dict()))
        self._open_journal(len(manifest.digests))

    def resume_journal(self, manifest: WeightManifest) -> None:
        """`have` as the journal says and the checksums confirm."""
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
        """Lets go of the mappings; who still reads keeps its own."""
        self._close_journal()
        self.views = []


class Arena:
    """`versions` are those that are whole, oldest first. One owner stages; any thread may read."""

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
        """Of pages that wait for their next version, by inode: to map half a gigabyte takes as long as to copy it."""
        self._lock = threading.RLock()
        root.mkdir(parents=True, exist_ok=True)
        for path in sorted(root.glob("v*")):
            try:
                slot = self._open(path)
            except WeightMismatch:
                shutil.rmtree(path, ignore_errors=True)  # its owner died while it made room
                continue
            assert slot.manifest is not None
            self.versions[slot.manifest.version] = slot

    # -- looking -----------------------------------------------------------------------------------------

    def find(self, checksum: str) -> VersionFiles | None:
        """The slot that has, or is getting, the bytes of this checksum."""
        for slot in reversed(self.slots()):
            if slot.manifest is not None and slot.manifest.checksum == checksum and not slot.revoked:
                return slot
        return None

    def slots(self) -> list[VersionFiles]:
        with self._lock:
            return [*self.versions.values(), *([self.staging] if self.staging is not None else [])]

    def newest(self) -> VersionFiles | None:
        with self._lock:
            return self.versions[max(self.versions)] if self.versions else None

    def size_bytes(self) -> int:
        """Of all files that are there, whatever they are for."""
        return sum(f.stat().st_blocks * 512 for f in self.root.rglob("*") if f.is_file())

    # -- staging -----------------------------------------------------------------------------------------

    def stage(
        self, files: Sequence[FileSpec], *, keep: int | None, chunk_bytes: int = CHUNK_BYTES
    ) -> VersionFiles:
        """A slot for a version with these files, whose bytes are anything. Of the whole versions `keep` stays, and the
        newest as far as there is room. Raises ArenaFull; what was whole before is then still there, but for those that
        had to make room."""
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
        """A slot that is to become `manifest`; where a process that was killed, or this one, had begun to fetch the
        same bytes, it goes on from there."""
        with self._lock:
            slot = self.staging
            if slot is None:
                slot = self._left_behind()
            if slot is not None and slot.manifest == manifest and not slot.revoked:
                self.staging = slot
                if not slot.is_journalled:
                    slot.resume_journal(manifest)
                return slot
            slot = self.stage(manifest.files, keep=keep, chunk_bytes=manifest.chunk_bytes)
            slot.begin_journal(manifest)
            return slot

    def commit(self, manifest: WeightManifest) -> VersionFiles:
        """The staged bytes are all there and right: they appear as version `manifest.version`."""
        with self._lock:
            slot = self.staging
            if slot is None or slot.files != manifest.files:
                raise WeightMismatch(f"version {manifest.version} was not staged.")
            target = self.root / f"v{manifest.version:08d}"
            slot.finish()
            (slot.path / MANIFEST).write_text(json.dumps(manifest.to_dict()))
            before = self.versions.pop(manifest.version, None)
            if (
                before is not None
            ):  # the same number again: a publisher that went back to an earlier checkpoint
                before.revoke()
                before.close()
            shutil.rmtree(target, ignore_errors=True)
            slot.path.rename(target)
            slot.path = target
            slot.manifest = manifest
            slot.have = set(range(len(manifest.digests)))
            slot.is_verified = True
            self.versions[manifest.version] = slot
            self.staging = None
            return slot

    def adopt(self, source: Path, manifest: WeightManifest, *, keep: int | None) -> VersionFiles | None:
        """Another arena's version on this machine as one of this arena's, by links, after its checksums were compared:
        nothing is copied. None where it cannot be linked or is no longer there. Raises WeightMismatch for other
        bytes."""
        with self._lock:
            self.abandon(keep_files=False)
            path = self.root / STAGING
            path.mkdir(exist_ok=True)
            try:
                for file in manifest.files:
                    os.link(source / file.name, path / file.name)
                if not (source / MANIFEST).exists():  # looked for after the links: see `_recycle`
                    raise FileNotFoundError(source)
                slot = VersionFiles(path, manifest.files, manifest.chunk_bytes)
            except (OSError, ValueError):  # other file system, or gone, or about to go
                shutil.rmtree(path, ignore_errors=True)
                return None
            self.staging = slot
        wrong = first_wrong(manifest.chunks(), slot.is_right)
        if wrong is not None:
            with self._lock:
                self.abandon(keep_files=False)
            raise WeightMismatch(
                f"{source} has other bytes than version {manifest.version} in chunk {wrong.index}."
            )
        with self._lock:
            slot = self.commit(manifest)
            for version in self._surplus(self._held, keep):
                self._drop(self.versions.pop(version))
            return slot

    def check(self, version: int) -> VersionFiles | None:
        """The version, if its bytes are right; it is removed where they are not. A process that was killed left it."""
        with self._lock:
            slot = self.versions.get(version)
            if slot is None or slot.is_verified:
                return slot
            if all(slot.is_right(chunk) for chunk in slot.chunks):
                slot.is_verified = True
                return slot
            self._drop(self.versions.pop(version))
            return None

    def drop_newer(self, version: int) -> None:
        with self._lock:
            for newer in [number for number in self.versions if number > version]:
                self._drop(self.versions.pop(newer))

    def abandon(self, *, keep_files: bool = False) -> None:
        """Forget what is staged. Its pages go to the next one where `keep_files` says so and nobody reads them."""
        with self._lock:
            slot, self.staging = self.staging, None
            path = self.root / STAGING
            idle = slot.revoke() if slot is not None else True
            if slot is not None:
                if keep_files and idle:
                    self._keep_mapped(slot)
                slot.close()
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

    def reserve(self, files: Sequence[FileSpec]) -> None:
        """Take the space of one more version now, so that the first publishes do not wait for the kernel's pages."""
        with self._lock:
            path = self.root / SPARE
            path.mkdir(exist_ok=True)
            self._fill(path, files)

    def close(self, *, remove: bool) -> None:
        with self._lock:
            for slot in [*self.versions.values(), *([self.staging] if self.staging is not None else [])]:
                slot.revoke()
                slot.close()
            self.versions, self.staging = {}, None
            if remove:
                shutil.rmtree(self.root, ignore_errors=True)

    # -- files ---------------------------------------------------------------------------------------------

    def _left_behind(self) -> VersionFiles | None:
        path = self.root / STAGING
        try:
            manifest = WeightManifest.from_dict(json.loads((path / _INTENDED).read_text()))
            slot = VersionFiles(path, manifest.files, manifest.chunk_bytes)
        except (OSError, ValueError, WeightMismatch):  # nothing, or nothing that can be gone on with
            return None
        slot.manifest = manifest
        return slot

    def _open(self, path: Path) -> VersionFiles:
        manifest = read_manifest(path)
        try:
            slot = VersionFiles(path, manifest.files, manifest.chunk_bytes)
        except (OSError, ValueError) as error:
            raise WeightMismatch(f"{path} cannot be read: {error}.") from error
        slot.manifest = manifest
        slot.have = set(range(len(manifest.digests)))
        return slot

    def _recycle(self, slot: VersionFiles, into: Path, files: Sequence[FileSpec]) -> None:
        """First it is unpublished, then looked at for links; `adopt` links first, then looks whether it is published:
        one of the two sees the other."""
        idle = slot.revoke()
        with contextlib.suppress(FileNotFoundError):
            (slot.path / MANIFEST).unlink()
        if idle:
            self._keep_mapped(slot)
            _reuse(slot.path, into, files)
        slot.close()
        shutil.rmtree(slot.path, ignore_errors=True)

    def _surplus(self, room: int, keep: int | None) -> list[int]:
        """The oldest versions, `keep` not among them, so that no more than `room` stay."""
        others = sorted(version for version in self.versions if version != keep)
        return others[: max(0, len(self.versions) - room)]

    def _keep_mapped(self, slot: VersionFiles) -> None:
        for file, view in zip(slot.files, slot.views, strict=True):
            with contextlib.suppress(FileNotFoundError):
                self._mapped[(slot.path / file.name).stat().st_ino] = view

    def _drop(self, slot: VersionFiles) -> None:
        slot.revoke()
        slot.close()
        shutil.rmtree(slot.path, ignore_errors=True)

    def _fill(self, path: Path, files: Sequence[FileSpec]) -> None:
        """`path` holds exactly these files, at their sizes, with space taken."""
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
    """What the folder of a whole version says of it. Raises WeightMismatch."""
    try:
        return WeightManifest.from_dict(json.loads((path / MANIFEST).read_text()))
    except (OSError, ValueError) as error:
        raise WeightMismatch(f"{path} holds no published weights: {error}.") from error


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
    block = bytes(1 << 20)  # macOS: written, so that the space is taken
    for at in range(0, size_bytes, len(block)):
        os.pwrite(descriptor, block[: size_bytes - at], at)


def _map(path: Path, size_bytes: int, mapped: Mapping[int, memoryview]) -> memoryview:
    """Raises OSError, and ValueError where the file is not so large: a mapping beyond its end would be a signal."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        found = os.fstat(descriptor)
        if found.st_size != size_bytes:
            raise ValueError(f"{path} has not {size_bytes} bytes")
        if found.st_ino in mapped and mapped[found.st_ino].nbytes == size_bytes:
            return mapped[found.st_ino]
        if not size_bytes:
            return memoryview(b"")
        if _POPULATE:
            return memoryview(mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | _POPULATE))
        return memoryview(mmap.mmap(descriptor, size_bytes))
    finally:
        os.close(descriptor)
