"""Chunks by Mooncake's transfer engine: READ over RDMA, or over TCP.

A source registers the files of its versions and tells a chunk's address over its own authenticated connection; a
receiver reads from there into its own registered files. Chunks go raw, without a codec.

Mooncake has no authentication: whoever reaches its port can read *and write* every registered byte. So it is used only
on a network that is declared trusted, and its chunks are verified like all others.

Invariants:
- *nothing lands later*: a read is waited for until Mooncake calls it done or failed, never left behind; Mooncake's own
  progress timeout is below its transfer timeout, so that a stalled one ends by the former, which is clean. (A transfer
  timeout alone was seen to let the bytes of an old request land seconds after it was reported as failed.)
- *few and large*: one slice list for each chunk, far below the thousand at which its connection pool refuses.

This module must not know which chunk is wanted next.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from gyre.errors import GyreError
from gyre.weights.transfer.chunk_transports import Pulled, TcpTransport, Want
from gyre.weights.transfer.connections import ConnectionPool
from gyre.weights.transfer.protocol import Stalled
from gyre.weights.version.arena import Arena, VersionFiles
from gyre.weights.version.manifest import Chunk

PROGRESS_S = 2
TRANSFER_S = 30
POLL_FIRST_S, POLL_LONGEST_S = 0.0002, 0.005

_ENVIRONMENT = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # else a new connection for each slice
    "MC_TCP_SLICE_SIZE": str(1 << 20),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": str(PROGRESS_S),
    "MC_TRANSFER_TIMEOUT": str(TRANSFER_S),
    "GLOG_minloglevel": "2",
}

_LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")
"""Libraries that its wheel needs and does not bring, each after those that it needs."""


RDMA_DEVICES = Path("/sys/class/infiniband")


class MooncakeMissing(GyreError):
    """Mooncake cannot be used here; the message says why."""

    code = "weights.mooncake"


def load(host: str = "127.0.0.1") -> Any:
    """The class TransferEngine, for addresses of `host`'s family: Mooncake knows one in a process. Environment
    variables that are set already stay. Raises MooncakeMissing with the reason."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if ":" in host:
        os.environ.setdefault("MC_USE_IPV6", "1")
    folder = os.environ.get("GYRE_IBVERBS_PATH", "")
    for library in _LIBRARIES:
        try:
            ctypes.CDLL(os.path.join(folder, library) if folder else library, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue  # the import below names what is missing
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise MooncakeMissing(
            f"mooncake-transfer-engine cannot be imported: {error}.",
            hint="pip install 'gyre-rl[mooncake]' (or mooncake-cpu), and the system's libibverbs1, libnuma1, libcurl4.",
        ) from error


class MooncakeFailed(GyreError):
    """Mooncake did not bring a chunk from a source that answers."""

    code = "weights.mooncake_failed"


class MooncakeEngine:
    """An engine of this process, and the memory that is registered with it. `protocol` is `rdma` or `tcp`. Raises
    MooncakeMissing if it cannot start."""

    def __init__(self, host: str = "127.0.0.1", *, protocol: str = "tcp", device: str = "") -> None:
        if protocol == "rdma" and not (RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())):
            # Mooncake would use TCP and not say so.
            raise MooncakeMissing(f"this machine has no RDMA device: there is nothing in {RDMA_DEVICES}.")
        host = host.strip("[]")
        self._engine = load(host)()
        self.protocol = protocol
        self._registered: dict[int, tuple[int, Any]] = {}
        self._lock = threading.Lock()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
            raise MooncakeMissing(f"Mooncake's engine does not start on {host} with {protocol}.")
        port = self._engine.get_rpc_port()
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def register(self, view: memoryview | NDArray[np.uint8]) -> int:
        """Register memory, which peers may then read; returns its address. Raises MooncakeMissing."""
        array = np.frombuffer(view, np.uint8)
        address = int(array.ctypes.data)
        with self._lock:
            known = self._registered.get(address)
            if known is not None and known[0] == array.nbytes:
                return address
            if known is not None:
                self._engine.unregister_memory(address)
            if self._engine.register_memory(address, array.nbytes) != 0:
                raise MooncakeMissing(f"Mooncake does not register {array.nbytes} bytes.")
            self._registered[address] = (array.nbytes, array)  # held, so that nobody else gets this address
        return address

    def keep(self, views: Iterable[memoryview | NDArray[np.uint8]]) -> None:
        """Deregister all memory but these views."""
        kept = {int(np.frombuffer(view, np.uint8).ctypes.data) for view in views if len(view)}
        with self._lock:
            for address in [address for address in self._registered if address not in kept]:
                self._engine.unregister_memory(address)
                del self._registered[address]

    def read(self, peer: str, theirs: int, ours: int, nbytes: int) -> None:
        """Copy their memory to ours. Raises Stalled, ConnectionError; nothing lands afterwards."""
        task = self._engine.batch_transfer_async_read(peer, [ours], [theirs], [nbytes])
        if task == 0:
            raise ConnectionResetError(f"Mooncake does not reach {peer}")
        pause_s = POLL_FIRST_S
        began = time.monotonic()
        while (status := self._engine.transfer_check_status(task)) == 0:
            time.sleep(pause_s)
            pause_s = min(POLL_LONGEST_S, 1.5 * pause_s)
        if status == 1:
            return
        waited_s = time.monotonic() - began
        if waited_s >= 0.9 * PROGRESS_S:
            raise Stalled(f"Mooncake's read from {peer} ended after {waited_s:.1f} s.")
        raise ConnectionResetError(f"Mooncake's read from {peer} failed with {status}")


def self_test(engine: MooncakeEngine, nbytes: int = 1 << 20) -> None:
    """Read by a second engine of this process from this one, and compare. Raises MooncakeMissing."""
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    host = engine.address.rpartition(":")[0]
    other = MooncakeEngine(host, protocol=engine.protocol)
    theirs, ours = engine.register(source), other.register(target)
    try:
        other.read(engine.address, theirs, ours, nbytes)
    except (OSError, Stalled) as error:
        raise MooncakeMissing(f"Mooncake's self-test failed: {error}.") from error
    finally:
        other.keep(())
        engine.keep(())
    if not np.array_equal(source, target):
        raise MooncakeMissing("Mooncake's self-test brought other bytes.")


def memory_of(engine: MooncakeEngine, arena: Arena) -> Callable[[VersionFiles, Chunk], dict[str, Any]]:
    """For `ChunkServer.memory`."""

    def where(files: VersionFiles, chunk: Chunk) -> dict[str, Any]:
        address = engine.register(files.view_of(chunk.file)) + chunk.offset
        engine.keep(view for one in arena.all_versions() for _, view in one.mapped())
        return {"peer": engine.address, "address": address}

    return where


def remote_memory(reply: dict[str, Any], source: str, nbytes: int) -> tuple[str, int]:
    """Where the source at `source` says that so many bytes lie: its engine's `host:port`, and their address. Raises
    ConnectionAbortedError for what cannot be. The engine would dial whatever machine a source names."""
    peer, address = reply.get("peer"), reply.get("address")
    if type(peer) is not str or type(address) is not int:
        raise ConnectionAbortedError("the source does not say where its memory is")
    host, _, port = peer.rpartition(":")
    if host != source.rpartition(":")[0]:
        raise ConnectionAbortedError(f"the source names the memory of another machine: {peer[:100]!r}")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 2**16):
        raise ConnectionAbortedError(f"the source names no port: {peer[:100]!r}")
    if not 0 < address <= 2**64 - nbytes:
        raise ConnectionAbortedError(f"the source names memory that cannot be: {nbytes} bytes at {address}")
    return peer, address


class MooncakeTransport:
    """Reads chunks from the memory of the source whose ChunkServer is at `address` into `files`."""

    name = "mooncake"

    def __init__(
        self,
        address: str,
        token: str,
        engine: MooncakeEngine,
        files: VersionFiles,
        *,
        relay: str = "",
        stall_s: float = 5.0,
        abandoned: Callable[[], bool] = lambda: False,
        pool: ConnectionPool | None = None,
    ) -> None:
        self._line = TcpTransport(
            address, token, relay=relay, stall_s=stall_s, abandoned=abandoned, pool=pool
        )
        self._source = address
        self._engine = engine
        self._files = files

    @property
    def dial_s(self) -> float:
        return self._line.dial_s

    @dial_s.setter
    def dial_s(self, seconds: float) -> None:
        self._line.dial_s = seconds

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._line.ask(request)

    def pull(self, want: Want, into: memoryview) -> Pulled:
        """Read one chunk. Besides what every transport raises: MooncakeMissing if the source has none, MooncakeFailed
        if the source answers and Mooncake does not bring the chunk."""
        chunk = want.chunk
        reply = self._line.ask(
            {
                "op": "chunk",
                "via": "memory",
                "checksum": want.manifest.checksum,
                "index": chunk.index,
                "insist": want.insist,
            }
        )
        if reply.get("status") != "ok":
            if reply.get("status") == "unknown":
                raise MooncakeMissing(
                    f"the source has none: {str(reply.get('why') or 'nobody said why')[:300]}"
                )
            return Pulled(str(reply.get("status")), told=reply)
        peer, theirs = remote_memory(reply, self._source, chunk.nbytes)
        ours = self._engine.register(self._files.view_of(chunk.file)) + chunk.offset
        began = time.monotonic()
        try:
            self._engine.read(peer, theirs, ours, chunk.nbytes)
        except (OSError, Stalled) as error:
            self._line.ask({"op": "have", "checksum": want.manifest.checksum})  # raises if the source is gone
            raise MooncakeFailed(f"{error}.") from error
        seconds = time.monotonic() - began
        digest = xxhash.xxh3_64_hexdigest(into)
        return Pulled("ok", digest, wire_bytes=chunk.nbytes, seconds=seconds, told=reply)

    def close(self) -> None:
        self._line.close()
