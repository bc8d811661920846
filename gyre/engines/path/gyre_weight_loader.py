"""Gyre's weight loader inside an engine: one in the process of each rank, under the engine's own Python.

vLLM's workers have theirs by `gyre_vllm_worker`. SGLang calls `load` (`--custom-weight-loader gyre_weight_loader.load`)
in the thread that steps the model. The first call arms it: from then on a thread of its own answers Gyre's agent over a
Unix socket. A version is then loaded in two parts. `prepare`, requested over the socket while the engine generates,
maps the version's files, compares every byte with its checksums, and brings the bytes as near to the model as possible,
in the same pass if that is the device's memory. The next call of `load`, for which the engine is paused, only copies.

Invariants:
- *nothing escapes*: an exception that left `load` would end the whole server, so each becomes the outcome that the
  agent asks for;
- *copied is verified*: `load` copies only what `prepare` verified; a prepared version is copied once or never. Bytes
  for the device are hashed where they are sent from: the version's own pages, page-locked once, or where they cannot
  be, page-locked memory of this process;
- *no token of older weights is called newer*: tokens generated before the copy are counted in the same pause;
- *no forward pass sees half*: the device is idle before the first copy and after the last;
- *only shared prefixes are cached*: SGLang keeps what requests began with, and forgets a finished request's own tokens,
  which nobody asks for again (with agents the next turn does, and they are kept), and everything that no request uses
  when the weights change;
- *nothing is left*: the socket has an abstract name and goes with the process. Only the same user is answered.

The version's files must not be written to or truncated between `prepare` and the outcome.

It runs where Gyre is not installed: it must import nothing of Gyre, and of an engine only what tells the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any

import torch

try:
    import xxhash
except ImportError:  # reported when it is needed
    xxhash = None  # type: ignore[assignment]

KEY = "GYRE_WEIGHT_LOADER"
"""The environment variable with the engine's part of the sockets' names."""

TURNS = "GYRE_KEEPS_TURNS"
"""The environment variable that says that requests begin with what finished ones drew."""

_SLOTS = 4
"""Versions whose files stay pinned: a publisher on this host writes three in turn, and one more while a reader is slow.
Files that nobody has a link to any more are let go before."""

_MADV_POPULATE_WRITE = 23
"""Of madvise(2), since Linux 5.14; an older kernel refuses it, and page-locking then takes longer."""

_MAPPED_AT_ONCE = 64 << 20
"""Bytes whose pages one call maps: others of the process that want to map memory wait that long."""

_PIECE_BYTES = 4 << 20
"""Bytes sent to the device at a time: the engine's own copies get in between, and a piece is still in the core's cache
when it is hashed."""

_PIECES = 2
"""Pieces of each thread: one is sent while the next is filled."""

_THREADS = 8
"""Most threads, but at most a quarter of the cores, because the engine needs some too. A thread hashes and copies three
to five gigabytes a second, a device takes fifty."""

_SPARE_BYTES = 2 << 30
"""Device memory that staging leaves free."""

_MESSAGE_BYTES = 64 << 20
"""Largest request; a thousand tensors are a hundred kilobytes."""

_rank: Rank | None = None


def load(model: torch.nn.Module, named_tensors: Any) -> None:
    """The function that SGLang calls. `named_tensors` is empty, because everything comes over the socket."""
    global _rank
    try:
        if _rank is None:
            _rank = Rank(next(model.parameters()).device)
        else:
            _rank.commit(model.load_weights, _made)  # type: ignore[arg-type]
    except BaseException as error:  # the loader could not be armed, and does not answer then
        print(f"gyre_weight_loader: {_told(error)}", file=sys.stderr, flush=True)


class Rank:
    """The loader of one rank, whose model is on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if distributed else 0
        self.outcome: dict[str, Any] = {"ok": False, "error": "nothing was loaded yet"}
        self._prepared: _Prepared | None = None
        self._pinned: dict[tuple[int, int, int], _Mapping] = {}
        """Pinned mappings by file system, inode and size, the last used at the end."""
        self._way: _Way | None = None
        """The way to the device, made when it is first needed, because it takes page-locked memory."""
        self._cache = getattr(_scheduler(), "tree_cache", None)
        if self._cache is not None and TURNS not in os.environ:
            self._cache.disable_finished_insert = True  # SGLang's own switch, without an argument of its own
        self._lock = threading.Lock()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0gyre-{os.environ[KEY]}-{self.rank}")
        listener.listen(4)
        thread = threading.Thread(target=self._serve, args=(listener,), name="gyre-weights", daemon=True)
        thread.start()

    # -- the agent's side, on a thread of its own -----------------------------------------------------

    def _serve(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            try:
                with connection, connection.makefile("rb") as lines:
                    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                    if struct.unpack("3i", peer)[1] != os.getuid():
                        continue
                    while line := lines.readline(_MESSAGE_BYTES):
                        connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")
            except OSError:
                pass  # the agent left; it dials again when it needs to

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            asked = json.loads(line)
            op = asked["op"]
            if op == "hello":
                return {"ok": True, "rank": self.rank, "device": str(self.device), "pid": os.getpid()}
            if op == "prepare":
                return self._prepare(asked["version"], asked["slot"], asked["stage"])
            if op == "outcome":
                return self.outcome
            if op == "forget":
                with self._lock:
                    self._prepared = None
                return {"ok": True}
            return {"ok": False, "wrong": False, "error": f"{op!r} is not an operation of this loader"}
        except ValueError as error:  # the version is not as described
            return {"ok": False, "wrong": True, "error": _told(error)}
        except BaseException as error:
            return {"ok": False, "wrong": False, "error": _told(error)}

    def _prepare(self, version: str, slot: dict[str, Any], stage: str) -> dict[str, Any]:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with self._lock:
            self._prepared = None
        self.outcome = {"ok": False, "error": f"version {version} was not loaded"}
        times: dict[str, Any] = {"map_s": -time.perf_counter()}
        mappings = [self._map(path) for path in slot["files"]]
        _lay_out(slot["tensors"], mappings)
        times["map_s"] += time.perf_counter()
        size_bytes = sum(mapping.size for mapping in mappings)
        buffers = [mapping.buffer for mapping in mappings]
        times |= {"verify_s": 0.0, "pin_s": 0.0, "copy_s": 0.0}
        note, verified = "", False
        began = time.perf_counter()
        try:
            stage = self._choose(stage, size_bytes)
            if stage == "pinned":
                for mapping in mappings:
                    mapping.pin()
                self._keep(mappings)
                times["pin_s"] = time.perf_counter() - began
            elif stage == "device":
                try:
                    for mapping in mappings:
                        mapping.pin()
                    self._keep(mappings)
                except RuntimeError as error:  # the host allows no more page-locked memory, say
                    note = _told(error)
                times["pin_s"] = time.perf_counter() - began
                if self._way is None:
                    self._way = _Way(self.device)
                buffers, verified = self._way.bring(mappings, slot["chunks"]), True
                times["copy_s"] = time.perf_counter() - began - times["pin_s"]
        except OtherBytes:
            raise
        except Exception as error:  # no memory, say: the version is then copied from where it is
            stage, note = "host", _told(error)
            buffers = [mapping.buffer for mapping in mappings]
        if not verified:
            began = time.perf_counter()
            _verify(mappings, slot["chunks"])
            times["verify_s"] = time.perf_counter() - began
        with self._lock:
            self._prepared = _Prepared(version, slot["tensors"], buffers, mappings)
        return {"ok": True, "stage": stage, "size_bytes": size_bytes, "note": note} | times

    def _map(self, path: str) -> _Mapping:
        with open(path, "r+b") as file:
            stat = os.fstat(file.fileno())
            known = self._pinned.get((stat.st_dev, stat.st_ino, stat.st_size))
            return known or _Mapping(path, file.fileno(), stat)

    def _keep(self, mappings: list[_Mapping]) -> None:
        """Keep these mappings pinned: pinning costs more than copying, and a host reuses its files in turn."""
        for identity in [key for key, mapping in self._pinned.items() if mapping.is_gone()]:
            del self._pinned[identity]
        for mapping in mappings:
            self._pinned.pop(mapping.identity, None)
            self._pinned[mapping.identity] = mapping
        while len(self._pinned) > _SLOTS * len(mappings):
            self._pinned.pop(next(iter(self._pinned)))

    def _choose(self, stage: str, size_bytes: int) -> str:
        if self.device.type != "cuda":
            return "host"
        if stage != "auto":
            return stage
        free, _ = torch.cuda.mem_get_info(self.device)
        return "device" if free > size_bytes + _SPARE_BYTES else "pinned"

    # -- the engine's side, in the thread that steps the model -----------------------------------------

    def commit(
        self,
        load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
        made: Callable[[], dict[str, int] | None],
    ) -> None:
        """Have `load` copy the tensors of the prepared version into the model. `made` counts the tokens made by now, by
        request; None where that is not known. Raises nothing."""
        try:
            self._commit(load, made)
        except BaseException as error:
            self.outcome = {"ok": False, "torn": True, "error": _told(error)}

    def _commit(
        self,
        load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
        made: Callable[[], dict[str, int] | None],
    ) -> None:
        with self._lock:
            prepared, self._prepared = self._prepared, None
        if prepared is None:
            self.outcome = {"ok": False, "torn": False, "error": "no version was prepared"}
            return
        began = time.perf_counter()
        self._settle()
        load(prepared.tensors(self.device))
        self._settle()
        load_s = time.perf_counter() - began
        _forget_unused(self._cache)
        self.outcome = {"ok": True, "version": prepared.version, "load_s": load_s, "made": made()}

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _made() -> dict[str, int] | None:
    """The number of tokens made by now, by id of each request that the scheduler has. A pass whose results the
    scheduler has not processed counts (also a pass over a part of a prompt, which makes none). None if no known
    scheduler called this.

    The HTTP side cannot tell this number: it labels tokens with the version of the moment when it forwards them, and
    its answers overtake tokens that wait to be forwarded.
    """
    scheduler = _scheduler()
    if scheduler is None:
        return None
    try:
        if getattr(scheduler, "pp_size", 1) != 1:
            return None  # a scheduler with other kinds of batches
        passes = [batch for batch, _ in getattr(scheduler, "result_queue", ())]
        batches = [scheduler.running_batch, scheduler.last_batch, *passes]
        requests = [request for batch in batches if batch is not None for request in batch.reqs]
        chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
        made = {one.rid: len(one.output_ids) for one in (*requests, *scheduler.waiting_queue, *chunked)}
        for batch in passes:
            for request in batch.reqs:
                made[request.rid] += 1
    except Exception:  # an SGLang with another scheduler; the agent does without
        return None
    return made


def _scheduler() -> Any:
    """SGLang's scheduler, which called this; None where no scheduler that is known did."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "running_batch") and hasattr(caller, "waiting_queue"):
            return caller
        frame = frame.f_back
    return None


def _forget_unused(cache: Any) -> None:
    """Drop all cached prefixes that no request uses: they are of older weights, and no key finds them again."""
    try:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # type: ignore[import-not-found]

        cache.evict(EvictParams(num_tokens=cache.evictable_size()))
    except Exception:  # another cache, or none: its memory is taken back when it is needed
        return


class _Prepared:
    def __init__(
        self, version: str, table: list[Any], buffers: list[torch.Tensor], mappings: list[_Mapping]
    ) -> None:
        self.version, self._table, self._buffers = version, table, buffers
        self._mappings = mappings  # so that they stay pinned

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Each whole tensor on the device, so that a rank cuts its part there and not on the host."""
        for name, dtype, shape, file, offset, size in self._table:
            raw = self._buffers[file][offset : offset + size].view(getattr(torch, dtype))
            yield name, raw.view(shape).to(device, non_blocking=True)


class OtherBytes(ValueError):
    """The files do not hold what their manifest says."""


class _Way:
    """Copies files to `device` by several threads, and verifies them in the same pass. A thread takes a part (a chunk,
    or a range that no chunk covers). Of a pinned mapping the device reads the part itself, while the thread hashes it.
    Otherwise the thread copies it piece by piece into page-locked memory of its own, and hashes and sends it there.

    Without a device that runs beside the host (a CPU: in tests) the memory is plain, and a copy ends when it returns.
    """

    def __init__(self, device: torch.device, *, threads: int = 0, piece_bytes: int = _PIECE_BYTES) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        # One stream for all, because freed memory is reused only by the stream that had it.
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._piece_bytes = piece_bytes
        self._lanes: list[_Lane] = [[] for _ in range(threads or _threads())]

    def _event(self) -> Any:
        return torch.cuda.Event(blocking=True) if self._cuda else None  # type: ignore[no-untyped-call]

    def bring(self, mappings: Sequence[_Mapping], chunks: Sequence[Any]) -> list[torch.Tensor]:
        """A copy of each file on the device. Raises OtherBytes if a checksum differs."""
        sizes = [mapping.size for mapping in mappings]
        parts: queue.SimpleQueue[tuple[int, int, int, str] | None] = queue.SimpleQueue()
        for part in (*_parts(sizes, chunks), *[None] * len(self._lanes)):
            parts.put(part)
        with torch.cuda.stream(self._stream):
            copies = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]

        def work(lane: _Lane) -> None:
            if self._cuda:
                torch.cuda.set_device(self._device)
            while (part := parts.get()) is not None:
                file, offset, size, checksum = part
                send = self._send_pinned if mappings[file].is_pinned else self._send
                send(mappings[file], copies[file], offset, size, checksum, lane)

        try:
            with ThreadPoolExecutor(len(self._lanes), thread_name_prefix="gyre-weights") as pool:
                for done in [pool.submit(work, lane) for lane in self._lanes]:
                    done.result()
        finally:
            if self._stream is not None:
                self._stream.synchronize()  # no copy is on its way any more, whatever happened
        return copies

    def _send_pinned(
        self, mapping: _Mapping, copy: torch.Tensor, offset: int, size: int, checksum: str, lane: _Lane
    ) -> None:
        mapping.require(offset, size)
        part = slice(offset, offset + size)
        with torch.cuda.stream(self._stream):
            copy[part].copy_(mapping.buffer[part], non_blocking=True)
        if checksum:
            mapping.verify(offset, size, checksum)

    def _send(
        self, mapping: _Mapping, copy: torch.Tensor, offset: int, size: int, checksum: str, lane: _Lane
    ) -> None:
        digest = _hasher(checksum) if checksum else None
        mapping.require(offset, size)
        if not lane:
            pieces = (
                torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=self._cuda)
                for _ in range(_PIECES)
            )
            lane += [(piece, self._event()) for piece in pieces]
        origin = mapping.buffer.data_ptr()
        for turn, at in enumerate(range(offset, offset + size, lane[0][0].numel())):
            piece, sent = lane[turn % len(lane)]
            count = min(piece.numel(), offset + size - at)
            if sent is not None:
                sent.synchronize()  # the piece's previous content has been sent
            ctypes.memmove(piece.data_ptr(), origin + at, count)  # lets others run meanwhile, as hashing does
            if digest is not None:
                digest.update(piece.numpy()[:count])
            if sent is None:
                copy[at : at + count].copy_(piece[:count])
                continue
            with torch.cuda.stream(self._stream):
                copy[at : at + count].copy_(piece[:count], non_blocking=True)
                sent.record(self._stream)
        if digest is not None and digest.hexdigest() != checksum:
            raise mapping.differs(digest.hexdigest(), checksum, offset, size)


_Lane = list[tuple[torch.Tensor, Any]]
"""A thread's pieces, made when it first needs them, and the event after which each has been sent."""


def _threads() -> int:
    return max(1, min(_THREADS, len(os.sched_getaffinity(0)) // 4))


def _parts(sizes: Sequence[int], chunks: Sequence[Any]) -> list[tuple[int, int, int, str]]:
    """The chunks, and the ranges that none of them covers, without a checksum."""
    found = [(file, offset, size, checksum) for file, offset, size, checksum in chunks]
    for file, end in enumerate(sizes):
        at = 0
        for _, offset, size, _ in sorted(part for part in found if part[0] == file):
            if offset > at:
                found.append((file, at, offset - at, ""))
            at = max(at, offset + size)
        if at < end:
            found.append((file, at, end - at, ""))
    return found


def _verify(mappings: Sequence[_Mapping], chunks: Sequence[Any]) -> None:
    """Raises OtherBytes."""
    if not chunks:
        return
    with ThreadPoolExecutor(_threads(), thread_name_prefix="gyre-weights") as pool:
        for done in [pool.submit(mappings[file].verify, *rest) for file, *rest in chunks]:
            done.result()


def _hasher(checksum: str) -> Any:
    if xxhash is None:
        raise RuntimeError("the engine's Python has no xxhash: checksums cannot be compared")
    return xxhash.xxh3_64() if len(checksum) == 16 else xxhash.xxh3_128()


class _Mapping:
    """A mapped file, shared with its writer; never written to from here."""

    def __init__(self, path: str, descriptor: int, stat: os.stat_result) -> None:
        self.path, self.size = path, stat.st_size
        self.identity = (stat.st_dev, stat.st_ino, stat.st_size)
        self._descriptor = os.dup(descriptor)
        self._map = mmap.mmap(descriptor, self.size)  # writable, for torch and for pinning want it
        self.buffer = torch.frombuffer(self._map, dtype=torch.uint8)
        self.is_pinned = False
        self._unpin: Any = None

    def is_gone(self) -> bool:
        """Whether nobody has a link to the file any more, so that only this mapping keeps its pages."""
        return os.fstat(self._descriptor).st_nlink == 0

    def require(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise OtherBytes(f"{self.path} has {self.size} bytes, and a chunk of it ends at {offset + size}")

    def differs(self, found: str, checksum: str, offset: int, size: int) -> OtherBytes:
        return OtherBytes(
            f"{self.path} holds other bytes than its manifest says: {found} and not {checksum} "
            f"for {size} bytes from {offset}"
        )

    def verify(self, offset: int, size: int, checksum: str) -> None:
        digest = _hasher(checksum)
        self.require(offset, size)
        with memoryview(self._map)[offset : offset + size] as chunk:
            digest.update(chunk)  # lets others run meanwhile
        if digest.hexdigest() != checksum:
            raise self.differs(digest.hexdigest(), checksum, offset, size)

    def pin(self) -> None:
        """Page-lock it, so that the device reads it at full speed. A second time costs nothing. Raises RuntimeError.

        The call holds Python's lock: for some 20 ms a gigabyte whose pages are mapped already, for many times as long
        where it has to map them."""
        if self.is_pinned or not self.size:
            return
        self._map_pages()
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = cuda.cudaHostRegister(self.buffer.data_ptr(), self.size, 0)
        if int(status) != 0:
            with contextlib.suppress(RuntimeError):  # else this thread's next kernel would be told of it
                torch.zeros(1, device="cuda")
            raise RuntimeError(f"{self.path} cannot be page-locked: CUDA error {int(status)}")
        self.is_pinned = True
        self._unpin = partial(cuda.cudaHostUnregister, self.buffer.data_ptr())

    def _map_pages(self) -> None:
        libc, origin = ctypes.CDLL(None), self.buffer.data_ptr()

        def some(at: int) -> None:
            size = min(_MAPPED_AT_ONCE, self.size - at)
            libc.madvise(ctypes.c_void_p(origin + at), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)

        with ThreadPoolExecutor(_threads(), thread_name_prefix="gyre-weights") as pool:
            for done in [pool.submit(some, at) for at in range(0, self.size, _MAPPED_AT_ONCE)]:
                done.result()

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)
        if getattr(self, "_unpin", None) is not None:
            self._unpin()


def _lay_out(table: list[Any], mappings: list[_Mapping]) -> None:
    """Raises ValueError for a tensor outside of its file."""
    for name, dtype, shape, file, offset, size in table:
        item = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        count = 1
        for length in shape:
            count *= length
        if size != count * item or offset < 0 or offset % item or offset + size > mappings[file].size:
            raise ValueError(f"tensor {name} ({dtype}, {shape}) does not lie at {offset} of its file")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
