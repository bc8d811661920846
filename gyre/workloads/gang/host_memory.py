"""One rank's state in its machine's memory, which outlives the rank's process.

    /dev/shm/gyre-state-<job and role>/rank_00000/lock
                                                  slot_0.0, slot_0.1, …, slot_0.json
                                                  slot_1.0, slot_1.1, …, slot_1.json

A slot is plain bytes, `PIECE_BYTES` at a time in each of its files in turn; its record has the step, the place of each
tensor and the checksum. There are two slots, so that while one is written the other is whole. Only the file system
holds them: no process, no resource tracker, no socket. So they outlive every process.

Invariants:
- *bytes before record*: a slot gets its record after all its bytes are there and hashed, and loses it before the first
  byte is written anew. A process that is killed in between leaves the other slot, and nothing torn;
- *copied before changed*: `save` copies beside whatever its caller does next, and the tensors stay as they are until
  `settle`. Training does not change them before the optimizer's next step;
- *verified before used*: bytes are compared with the record as they are copied back, and `load` says whether they are
  its own; where they are not, the tensors hold no state, and nobody goes on with them;
- *held while read*: a slot that somebody reads is not written; then `save` writes the other one again and again, and
  the one that is held is whole meanwhile;
- *not mapped*: bytes go through a few page-locked buffers into the files. To map a state of gigabytes, and to page-lock
  it, takes longer than ten copies, holds up whoever maps memory, and each process that dies has to undo it first;
- *one owner*: the owner holds a lock, which the kernel releases however its owner dies;
- *room or nothing*: space is taken before it is written, and not the machine's last;
- *not for ever*: `close` without `keep` removes the state, and so does `unlink`; a state that nobody has held for
  `KEPT_S` is removed when the next job comes.

This module must not know what the tensors are, or how ranks agree on a step.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import mmap
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.errors import GyreError
from gyre.weights.owned_dirs import default_root
from gyre.workloads.gang.copiers import COPIERS, PIECE_BYTES, Copiers, Piece
from gyre.workloads.gang.machine_memory import LEFT_FREE, MachineMemory
from gyre.workloads.gang.state_files import padded

PREFIX = "gyre-state-"
FORMAT = 3
ALIGNMENT = 256

KEPT_S = 3600.0
"""How long an abandoned state is kept for its job to come back: longer than any budget of restarts lasts."""

LOCK_WITHIN_S = 5.0
"""Wait for the previous owner to be gone: it was killed a moment ago, or will not go at all."""

Named = Sequence[tuple[str, Tensor]]


class NoHostMemory(GyreError):
    """There is no room for a state in memory, or another process holds the place."""

    code = "checkpoint.no_host_memory"


class HostMemoryDamaged(GyreError):
    """The state in memory is not what was written, or has other tensors."""

    code = "checkpoint.host_memory_damaged"


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where a tensor is in a slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """The record of a slot's state. `lineage` and `step` name the state; `book` is JSON data of the caller's."""

    slot: int
    lineage: str
    step: int
    digest: str
    size_bytes: int
    spans: tuple[TensorSpan, ...]
    book: dict[str, Any]


class HostMemory:
    """The host memory of one rank. `purpose` is a text that every process in this rank's place shares, and nobody else.
    Raises NoHostMemory if another process holds the place."""

    def __init__(
        self,
        purpose: str,
        rank: int,
        *,
        root: Path | None = None,
        lock_within_s: float = LOCK_WITHIN_S,
        memory: MachineMemory | None = None,
    ) -> None:
        root = root or default_root()
        key = hashlib.sha256(purpose.encode()).hexdigest()[:16]
        self._home = root / f"{PREFIX}{key}"
        self.path = self._home / f"rank_{rank:05d}"
        self._memory = memory or MachineMemory()
        self._copiers = Copiers(self._memory)
        _sweep(root, but=self._home)
        self._lock: int | None = self._claim(lock_within_s)
        self._saving: threading.Thread | None = None
        self._error: Exception | None = None
        """What kept the last copy from counting, until the next `save` raises it."""
        found = self.records()
        self._newest = found[0].slot if found else 1
        """The slot that the next `save` leaves alone, unless the other one is held."""
        self._held: int | None = None

    def _claim(self, within_s: float) -> int:
        """Lock this rank's place. Another rank's `close` may remove the folder at any moment, so the lock counts only
        if the locked file still has its name. Raises NoHostMemory."""
        until = time.monotonic() + within_s
        while True:
            with contextlib.suppress(FileNotFoundError):
                _make_private(self._home)
                self.path.mkdir(mode=0o700, exist_ok=True)
                descriptor = _lock(self.path / "lock", until - time.monotonic())
                try:
                    if os.path.samestat(os.fstat(descriptor), (self.path / "lock").stat()):
                        return descriptor
                    os.close(descriptor)
                except FileNotFoundError:
                    os.close(descriptor)
            if time.monotonic() > until:
                raise NoHostMemory(f"{self.path} is removed again and again.", hint="Who else uses it?")

    # -- writing -------------------------------------------------------------------------------------

    def make_room(self, tensors: Named) -> int:
        """Take the space for two states of these tensors; returns the size of one in bytes. Saved states of another
        size are removed. Raises NoHostMemory; `close` frees the space that was already taken."""
        self.settle()
        _, size = plan(tensors)
        for slot in (0, 1):
            self._make_files(slot, size)
        return size

    def save(self, tensors: Named, *, lineage: str, step: int, book: dict[str, Any]) -> None:
        """Begin to copy the tensors, which stay as they are until `settle`; the copy counts when it is whole. Raises
        NoHostMemory, and what kept the copy before from counting."""
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error
        spans, size = plan(tensors)
        slot = 1 - self._newest
        if slot == self._held:
            slot = self._newest
        self._record_path(slot).unlink(missing_ok=True)
        self._make_files(slot, size)
        pieces = _pieces(spans, tensors)
        content = {
            "format": FORMAT,
            "lineage": lineage,
            "step": step,
            "book": book,
            "size_bytes": size,
            "places": [[span.name, span.dtype, list(span.shape), span.offset] for span in spans],
        }
        self._newest = slot
        self._saving = threading.Thread(
            target=self._fill,
            args=(slot, pieces, content, self._copiers.ready([tensor for _, tensor in tensors])),
            name="gyre-host-memory",
            daemon=True,
        )
        self._saving.start()

    def _fill(self, slot: int, pieces: Sequence[Piece], content: dict[str, Any], ready: Any) -> None:
        path = self._record_path(slot)
        partial = path.with_suffix(".partial")
        try:
            digest = self._copiers.write(self._files(slot), pieces, ready)
            partial.write_text(json.dumps({**content, "digest": digest}))
            partial.rename(path)
        except (
            Exception
        ) as error:  # the next `save` raises it; the slot has no record, and counts for nothing
            self._error = error
            self._newest = 1 - slot  # the other one stays whole

    def settle(self) -> float:
        """Wait until the last copy counts, or has failed: from here on the tensors may be changed. Returns the seconds
        that it took."""
        began = time.monotonic()
        if self._saving is not None:
            self._saving.join()  # ends after copying one slot
            self._saving = None
        return time.monotonic() - began

    def hold(self, step: int) -> HeldSlot | None:
        """The bytes of the last copy, as `plan` places them, if it is a whole one of `step`. They stay until
        `release`."""
        assert self._held is None, "a slot is held already"
        self.settle()
        record = self._read(self._newest)
        if record is None or record.step != step:
            return None
        self._held = record.slot
        return HeldSlot([_mapped(path) for path in self._files(record.slot)])

    def release(self) -> None:
        """Nobody reads the held slot any more. From any thread; the second time it does nothing."""
        self._held = None

    # -- reading -------------------------------------------------------------------------------------

    def records(self) -> list[SlotRecord]:
        """The records of the whole slots, the newest step first. Their bytes are not verified."""
        self.settle()
        found = [record for slot in (0, 1) if (record := self._read(slot)) is not None]
        return sorted(found, key=lambda record: -record.step)

    def _read(self, slot: int) -> SlotRecord | None:
        try:
            content = json.loads(self._record_path(slot).read_text())
            sizes = [path.stat().st_size for path in self._files(slot)]
            if content["format"] != FORMAT or sizes != _file_sizes(content["size_bytes"]):
                return None
            spans = [
                TensorSpan(name, dtype, tuple(shape), offset)
                for name, dtype, shape, offset in content["places"]
            ]
            return SlotRecord(
                slot,
                content["lineage"],
                content["step"],
                content["digest"],
                content["size_bytes"],
                tuple(spans),
                content["book"],
            )
        except (OSError, ValueError, KeyError, TypeError):  # no record, or another version's
            return None

    def load(self, record: SlotRecord, tensors: Named, *, beside: Callable[[], None] = lambda: None) -> bool:
        """Copy the record's state into the tensors, and compare all bytes with its checksum; `beside` is called
        meanwhile, and may read the tensors. Returns whether they match; if they do not, what is in the tensors is no
        state. Raises HostMemoryDamaged, and changes none, if their names, dtypes and shapes are not those that were
        saved."""
        spans, _ = plan(tensors)
        if tuple(spans) != record.spans:
            raise HostMemoryDamaged(
                f"slot {record.slot} in {self.path} is of other tensors than this rank has."
            )
        self.settle()
        ready = self._copiers.ready([tensor for _, tensor in tensors])
        try:
            found = self._copiers.read(self._files(record.slot), _pieces(spans, tensors), ready, beside)
        except OSError:  # there is less than its record says
            return False
        if found != record.digest:
            return False
        self._newest = record.slot
        return True

    # -- the end -------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget the saved states, and keep the place."""
        self.settle()
        for slot in (0, 1):
            self._record_path(slot).unlink(missing_ok=True)

    def close(self, *, keep: bool) -> None:
        """With `keep` leave the state to the rank's successor; otherwise remove it, and what dead ranks left behind.
        Safe to call twice.

        Names are removed first, so that a process that is ended early leaves nothing."""
        if self._lock is None:
            return
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)
        self.settle()
        self._copiers.close()
        if not keep:
            self._remove_all()
        os.close(self._lock)
        self._lock = None

    def unlink(self) -> None:
        """Remove the state while other threads may use it, because this process is about to be ended without a
        successor. Readers and writers go on, in files without a name; the memory is freed with the process."""
        self._remove_all()

    def _remove_all(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(
            FileNotFoundError
        ):  # other ranks close at the same time, and one is the last
            self._remove_the_rest()

    def _remove_the_rest(self) -> None:
        for other in self._home.glob("rank_*"):
            with _held_if_free(other / "lock") as held:
                if held:
                    shutil.rmtree(other, ignore_errors=True)
        if not any(self._home.glob("rank_*")):
            (self._home / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a rank has come meanwhile, and stays
                self._home.rmdir()

    # -- files ---------------------------------------------------------------------------------------

    def _files(self, slot: int) -> list[Path]:
        """Those that there are, in their order."""
        found = self.path.glob(f"slot_{slot}.[0-9]*")
        return sorted(found, key=lambda path: int(path.suffix[1:]))

    def _record_path(self, slot: int) -> Path:
        return self.path / f"slot_{slot}.json"

    def _make_files(self, slot: int, size: int) -> None:
        """Have files of this size together for the slot. Raises NoHostMemory."""
        sizes, there = _file_sizes(size), self._files(slot)
        if [path.stat().st_size for path in there] == sizes:
            return
        self._record_path(slot).unlink(missing_ok=True)
        for path in there:
            path.unlink(missing_ok=True)
        self._take_space(slot, sizes)

    def _take_space(self, slot: int, sizes: Sequence[int]) -> None:
        """Take space for a slot's files, under a lock, because ranks of one machine ask at the same time."""
        if not hasattr(os, "posix_fallocate"):
            raise NoHostMemory("states are kept in memory on Linux alone.")
        size = sum(sizes)
        gate = _lock(self._home / "lock", LOCK_WITHIN_S + size / 2**28)
        made: list[Path] = []
        try:
            available, total = self._memory.available()
            if available - size < LEFT_FREE * total:
                raise NoHostMemory(
                    f"a state of {size} bytes would leave less than {LEFT_FREE:.0%} of the machine's memory: "
                    f"{available} of {total} bytes are available.",
                    hint="Set memory_checkpoint_share to 0, or give the machine more memory.",
                )
            for number, part in enumerate(sizes):
                made.append(self.path / f"slot_{slot}.{number}")
                descriptor = os.open(made[-1], os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
                try:
                    os.posix_fallocate(descriptor, 0, part)
                finally:
                    os.close(descriptor)
        except OSError as error:
            for path in made:
                path.unlink(missing_ok=True)
            raise NoHostMemory(
                f"{self.path} has no room for {size} bytes of a rank's state: {error}.",
                hint="Give the machine a larger /dev/shm (--shm-size of a container).",
            ) from error
        finally:
            os.close(gate)


class HeldSlot:
    """The bytes of a slot that somebody reads."""

    def __init__(self, files: Sequence[memoryview]) -> None:
        self._files = files

    def __getitem__(self, span: slice) -> list[memoryview]:
        """Bytes `span.start` to `span.stop`, in parts that follow each other; all but the last end at a multiple of
        `PIECE_BYTES` of the slot."""
        found, at = [], span.start
        while at < span.stop:
            number, offset = _place(at)
            size = min(PIECE_BYTES - at % PIECE_BYTES, span.stop - at)
            found.append(self._files[number][offset : offset + size])
            at += size
        return found


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ))


def _place(offset: int) -> tuple[int, int]:
    """The file in which a slot's byte is, and where in it."""
    piece = offset // PIECE_BYTES
    return piece % COPIERS, piece // COPIERS * PIECE_BYTES + offset % PIECE_BYTES


def _file_sizes(size: int) -> list[int]:
    """Of the files of a slot of `size` bytes."""
    sizes = [0] * min(COPIERS, -(-size // PIECE_BYTES))
    for at in range(0, size, PIECE_BYTES):
        sizes[_place(at)[0]] += min(PIECE_BYTES, size - at)
    return sizes


def plan(tensors: Named) -> tuple[list[TensorSpan], int]:
    """The place of each tensor in a slot, and the slot's size, which is of whole pages."""
    spans = []
    offset = 0
    for name, tensor in tensors:
        span = TensorSpan(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)
        spans.append(span)
        offset += -(-span.size_bytes // ALIGNMENT) * ALIGNMENT
    return spans, padded(max(offset, ALIGNMENT))


def _pieces(spans: Sequence[TensorSpan], tensors: Named) -> list[Piece]:
    """What is hashed at once, in the order of the slot. Autograd is not told of copies into it, so that a pass that
    reads the tensors meanwhile goes on."""
    found = []
    for span, (_, tensor) in zip(spans, tensors, strict=True):
        flat = tensor.data.view(-1).view(torch.uint8)
        at, end = span.offset, span.offset + span.size_bytes
        while at < end:
            size = min(PIECE_BYTES - at % PIECE_BYTES, end - at)
            found.append(Piece(*_place(at), size, flat[at - span.offset : at - span.offset + size]))
            at += size
    return found


def _make_private(path: Path) -> None:
    """Make a folder that only this user can read. Raises NoHostMemory."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NoHostMemory(
            f"{path} is there and is not a private folder of this user.", hint="Have its owner remove it."
        )


def _lock(path: Path, within_s: float) -> int:
    """A descriptor that holds the lock. Raises NoHostMemory if another process holds it for `within_s`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            if time.monotonic() > until:
                os.close(descriptor)
                raise NoHostMemory(
                    f"another process holds {path.parent}.", hint="Check that the earlier process has ended."
                ) from None
            time.sleep(0.05)


def _sweep(root: Path, *, but: Path) -> None:
    """Remove what other jobs of this user left behind."""
    for home in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it too, or it is another user's
            if home != but and home.lstat().st_uid == os.getuid() and _is_left(home):
                shutil.rmtree(home, ignore_errors=True)


def _is_left(home: Path) -> bool:
    """Whether no process holds any of it, or has written into it for `KEPT_S`."""
    files = [*home.rglob("*"), home]
    if time.time() - max(path.stat().st_mtime for path in files) < KEPT_S:
        return False
    for lock in home.rglob("lock"):
        with _held_if_free(lock) as held:
            if not held:
                return False
    return True


@contextlib.contextmanager
def _held_if_free(path: Path) -> Iterator[bool]:
    """Yields whether the lock was free; within the block no other process gets it. One that was removed meanwhile is
    not: a successor may have made another."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:  # gone, or another user's
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(os.fstat(descriptor), path.stat())
        except (
            OSError
        ):  # somebody holds it, or it is gone; or has another file by its name, which is somebody's
            held = False
        yield held
    finally:
        os.close(descriptor)
