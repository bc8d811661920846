"""The server of an arena's chunks: those of whole versions, and the verified ones of a version being fetched.

The origin, which made a version, super-seeds: it sends each chunk once and then names the receivers that have it.
Receivers serve each other, so the trainer's link carries about one copy however many instances there are. A receiver
that finds nobody able insists, and is served. Chunks go through a few upload slots
(`gyre.weights.transfer.upload_slots`), so that each is soon whole and can be passed on.

Invariants:
- *only what is right*: a chunk is sent only if it is in its version's `have`, which holds verified chunks alone;
- *no mixture*: pages that make room for another version are not sent on; the connection ends in mid-chunk instead;
- *a reader costs nobody*: each connection has its own thread and stall timer; none holds up the owner.

This module must not know why a version is wanted.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

from gyre.errors import Unauthorized
from gyre.weights.codecs.delta_history import DeltaSteps, limit_for
from gyre.weights.codecs.encoding import encode, is_known
from gyre.weights.transfer.address import format_address, may_name
from gyre.weights.transfer.encryption import Encryption
from gyre.weights.transfer.protocol import (
    REQUEST_LIMIT,
    SEND_BLOCK,
    Abandoned,
    PeerConnection,
    Stalled,
    is_allowed,
    receive_caller,
)
from gyre.weights.transfer.upload_slots import UploadSlots
from gyre.weights.version.arena import Arena, VersionFiles, VersionGone
from gyre.weights.version.manifest import DTYPES, Chunk, TensorSpec

IDLE_S = 120.0
"""Idle time after which a connection is closed; the receiver dials again."""

IDLE_CONNECTIONS, CROWDED_IDLE_S = 64, 2.0
"""With more connections than this, each of which has a thread, idle ones are closed after the shorter time."""

WORTH_IT = {"delta": 0.5, "planes": 0.9, "fp8": 0.9}
"""Largest encoded size, as a share of the raw size. A larger chunk goes raw: decoding would cost more than it saves."""

ENCODED_KEPT_BYTES = 256 << 20

ENTRY_BYTES = 512
"""What an entry of the cache takes besides its data; that encoding is not worth it is all that some have."""

LONGEST_WAIT_S = 1.0
"""Longest wait for an upload slot, even if the receiver would wait longer: it may hear of another source meanwhile."""

HOLDERS_TOLD, PEERS_TOLD = 16, 64
"""Most holders and peers named in one reply, chosen at random; the next reply names others."""

UNKNOWN_CALLERS, PROVES_WITHIN_S = 64, 1.0
"""Most connections at one time that have not proven the token yet. Where there are as many, one that has had longer
than that for it makes room for the next."""

RELAYS_KNOWN = 4096
"""Most addresses kept of those who asked for a version; the longest silent are forgotten first."""


class EncodedChunks:
    """A cache of encoded chunks, made here or received, so that each is encoded once. The oldest are dropped first."""

    def __init__(self, limit_bytes: int = ENCODED_KEPT_BYTES) -> None:
        self._limit = limit_bytes
        self._held: OrderedDict[tuple[str, int, str, str], bytes | None] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()
        self._making: dict[tuple[str, int, str, str], threading.Lock] = {}
        self.steps = DeltaSteps()
        """Deltas outlast the versions that they were made from."""

    def put(self, key: tuple[str, int, str, str], data: bytes | None) -> None:
        with self._lock:
            if key in self._held:
                return
            self._held[key] = data
            self._size += _held_bytes(data)
            target, index, codec, base = key
            if codec == "delta" and data is not None:
                self.steps.add(base, target, index, data)
            while self._size > self._limit:
                _, old = self._held.popitem(last=False)
                self._size -= _held_bytes(old)

    def get(self, key: tuple[str, int, str, str], make: Callable[[], bytes | None]) -> bytes | None:
        """The encoded chunk, by `make` if it is not cached; None if encoding is not worth it. If several threads ask
        for one chunk, one of them makes it; where `make` raises there, the next of them tries."""
        with self._lock:
            if key in self._held:
                return self._held[key]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._held:
                    return self._held[key]
            try:
                data = make()
                self.put(key, data)
            finally:
                with self._lock:
                    self._making.pop(key, None)
        return data

    def forget(self, checksums: Set[str]) -> None:
        """Forget chunks of versions other than these. Deltas stay, with `steps`."""
        with self._lock:
            for key in [key for key in self._held if key[0] not in checksums]:
                self._size -= _held_bytes(self._held.pop(key))


def _held_bytes(data: bytes | None) -> int:
    return ENTRY_BYTES + len(data or b"")


class ChunkServer:
    """A server that listens from its construction, on `host` and `port` (0: a free one), until `close`."""

    def __init__(
        self,
        arena: Arena,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        networks: Sequence[str] = (),
        stall_s: float = 5.0,
        pace: Callable[[int], None] | None = None,
        reach: str = "",
        encryption: Encryption | None = None,
    ) -> None:
        """`reach` is the address that others dial, if `host` is not one (0.0.0.0, say)."""
        self.arena = arena
        self.encoded = EncodedChunks()
        self.sent_bytes = 0
        """Bytes of chunks sent, as they went over the wire."""
        self.origin_of: set[str] = set()
        """Checksums of versions that were made here."""
        self.memory: Callable[[VersionFiles, Chunk], dict[str, Any]] | None = None
        """Returns a chunk's address in memory, for receivers that read it by Mooncake."""
        self.no_memory = "no Mooncake"
        """Why there is no `memory`."""
        self._encryption = encryption
        self._token = token
        self._networks = tuple(networks)
        self._stall_s = stall_s
        self._pace = pace
        self._given: dict[str, dict[str, int]] = {}
        """By checksum of the origin's versions: the chunks that each relay was sent or is being sent, as bits."""
        self._relays: dict[str, dict[str, float]] = {}
        self._slots = UploadSlots()
        self._lock = threading.Lock()
        self._unknown: dict[socket.socket, float] = {}
        """Connections that have not proven the token, and since when; the oldest first."""
        self._connections: set[socket.socket] = set()
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=256)
        self.port: int = self._listener.getsockname()[1]
        host = reach or host
        self.address = format_address(host, self.port)
        self._thread = threading.Thread(target=self._accept, name="gyre-chunks", daemon=True)
        self._thread.start()

    def forget(self, checksums: Set[str]) -> None:
        """Forget everything about versions other than these."""
        with self._lock:
            self.origin_of &= checksums
            self._relays = {of: known for of, known in self._relays.items() if of in checksums}
            self._given = {of: given for of, given in self._given.items() if of in checksums}
        self.encoded.forget(checksums)

    def prepare(self, older: VersionFiles | None, files: VersionFiles) -> None:
        """Encode the deltas from `older`, whose pages may soon be reused, if deltas were asked for lately. That takes
        one core about a second per gigabyte; receivers are served meanwhile."""
        self.encoded.steps.limit_bytes = limit_for(sum(file.size_bytes for file in files.specs))
        if (
            not self.encoded.steps.is_wanted()
            or older is None
            or older is files
            or not are_alike(older, files)
        ):
            return
        with contextlib.suppress(VersionGone):  # one of the two makes room: deltas are only an optimization
            for chunk in files.chunks:
                with files.reading():
                    self._step(older, files, chunk)

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accept
        self._listener.close()
        with self._lock:
            pool = list(self._connections)
        for link in pool:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5.0)

    # -- connections -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing:
            try:
                link, peer = self._listener.accept()
            except OSError:  # closed, or out of descriptors: try again a little later
                if not self._closing:
                    time.sleep(0.05)
                continue
            with self._lock:
                refused = not is_allowed(peer[0], self._networks) or not self._has_place()
                if not refused:
                    self._unknown[link] = time.monotonic()
                    self._connections.add(link)
            if refused:
                link.close()
                continue
            threading.Thread(
                target=self._converse, args=(link, peer[0]), name="gyre-chunk", daemon=True
            ).start()

    def _has_place(self) -> bool:
        """Whether there is a place for another caller, whom nobody knows yet."""
        if len(self._unknown) < UNKNOWN_CALLERS:
            return True
        silent, since = next(iter(self._unknown.items()))
        if time.monotonic() - since < PROVES_WITHIN_S:
            return False
        del self._unknown[silent]
        with contextlib.suppress(OSError):  # it has ended by itself
            silent.shutdown(socket.SHUT_RDWR)  # its thread closes it
        return True

    def _converse(self, link: socket.socket, host: str) -> None:
        connection: PeerConnection | None = None
        try:
            connection = receive_caller(
                link,
                self._token,
                stall_s=self._stall_s,
                abandoned=lambda: self._closing,
                pace=self._pace,
                encryption=self._encryption,
            )
            with self._lock:
                self._unknown.pop(link, None)
            while not self._closing:
                idle_s = IDLE_S if len(self._connections) <= IDLE_CONNECTIONS else CROWDED_IDLE_S
                self._answer(connection, connection.receive_json(limit=REQUEST_LIMIT, idle_s=idle_s), host)
        except (OSError, Stalled, Abandoned, Unauthorized, VersionGone):
            pass  # the receiver knows which chunks it has, and asks again or elsewhere
        finally:
            with self._lock:
                self._connections.discard(link)
                self._unknown.pop(link, None)
            link.close()
            if connection is not None:
                connection.close()  # an encrypted connection has a descriptor of its own

    def _answer(self, connection: PeerConnection, request: dict[str, Any], host: str) -> None:
        what = request.get("op")
        checksum = str(request.get("checksum", ""))
        files = self.arena.find(checksum) if checksum else self.arena.newest()
        if files is None or files.manifest is None:
            connection.send_json({"status": "gone"})
            return
        if what == "manifest":
            connection.send_json({"status": "ok", "manifest": files.manifest.to_dict()})
            return
        told = request.get("relay", "")
        relay = told if isinstance(told, str) and may_name(told, host, self._networks) else ""
        # Others are told to dial it: a receiver speaks for itself, or for the networks that receivers are in.
        if what == "have":
            connection.send_json({"status": "ok", **self._told(files, relay)})
        elif what == "chunk":
            self._send_chunk(connection, request, files, relay, relay or host)
        else:
            connection.send_json({"status": "unknown"})

    def _told(self, files: VersionFiles, relay: str) -> dict[str, Any]:
        """The part of each reply that says which chunks are here, and which chunks others have or get."""
        assert files.manifest is not None
        checksum = files.manifest.checksum
        given, holders = self._given_to_others(checksum, relay)
        return {
            "have": _bits(files),
            "given": given,
            "holders": holders,
            "peers": self._peers(checksum, relay, holders),
        }

    def _peers(self, checksum: str, relay: str, first: Iterable[str]) -> list[str]:
        """The relays that asked for this version lately, at most `PEERS_TOLD`; those in `first` come first."""
        now = time.monotonic()
        with self._lock:
            known = self._relays.setdefault(checksum, {})
            if relay:
                known.pop(relay, None)
                known[relay] = now  # the last one now
                if len(known) > RELAYS_KNOWN:
                    del known[next(iter(known))]
            lately = {address for address, seen in known.items() if address != relay and now - seen < IDLE_S}
        told = lately & set(first)
        others = list(lately - told)
        return [*told, *random.sample(others, min(len(others), PEERS_TOLD - len(told)))]

    # -- chunks --------------------------------------------------------------------------------------

    def _send_chunk(
        self,
        connection: PeerConnection,
        request: dict[str, Any],
        files: VersionFiles,
        relay: str,
        caller: str,
    ) -> None:
        index = request.get("index")
        if not isinstance(index, int) or index not in files.have:
            connection.send_json({"status": "missing", **self._told(files, relay)})
            return
        if request.get("via") == "memory":
            self._tell_where(connection, request, files, index, relay)
            return
        if self._is_elsewhere(files, index, relay, request):
            connection.send_json({"status": "elsewhere", **self._told(files, relay)})
            return
        with files.reading():
            codec, data, spent = self._encoded(request, files, files.chunks[index])
        view = memoryview(data).cast("B")
        slot = self._slots.take(caller, _wait_s(request), view.nbytes)
        if slot is None:
            connection.send_json({"status": "busy", **self._told(files, relay)})
            return
        try:
            with files.reading(), self._giving(files, index, relay, request) as elsewhere:
                if elsewhere:  # another receiver got the chunk while this one waited
                    connection.send_json({"status": "elsewhere", **self._told(files, relay)})
                    return
                reply = {"status": "ok", "codec": codec, "nbytes": view.nbytes, "encode_s": spent}
                if request.get("codec") == "delta" and codec == "none":
                    reply["has_base"] = self._is_base(str(request.get("base", "")), files)
                connection.send_json({**reply, **self._told(files, relay)})
                for at in range(0, view.nbytes, SEND_BLOCK):
                    if files.revoked:
                        raise VersionGone(f"{files.path.name} makes room for another version.")
                    connection.send(view[at : at + SEND_BLOCK], idle=slot.lapse, went_on=slot.went_on)
            slot.release(view.nbytes)
        finally:
            slot.release()
        with self._lock:
            self.sent_bytes += view.nbytes

    def _tell_where(
        self, connection: PeerConnection, request: dict[str, Any], files: VersionFiles, index: int, relay: str
    ) -> None:
        with self._giving(files, index, relay, request) as elsewhere:
            if elsewhere:
                connection.send_json({"status": "elsewhere", **self._told(files, relay)})
                return
            where = self.memory(files, files.chunks[index]) if self.memory is not None else None
            connection.send_json(
                {"status": "ok", **where, **self._told(files, relay)}
                if where is not None
                else {"status": "unknown", "why": self.no_memory}
            )

    def _is_elsewhere(self, files: VersionFiles, index: int, relay: str, request: dict[str, Any]) -> bool:
        """Whether this is the origin, and another relay has or gets this chunk."""
        checksum = files.manifest.checksum if files.manifest is not None else ""
        if checksum not in self.origin_of or request.get("insist"):
            return False
        with self._lock:
            given = self._given.get(checksum, {})
            return any(bits >> index & 1 for other, bits in given.items() if other != relay)

    @contextlib.contextmanager
    def _giving(self, files: VersionFiles, index: int, relay: str, request: dict[str, Any]) -> Iterator[bool]:
        """Yields whether the chunk is elsewhere. If not, it counts as given to `relay`, unless the block raises."""
        checksum = files.manifest.checksum if files.manifest is not None else ""
        if checksum not in self.origin_of or request.get("insist") or not relay:
            yield self._is_elsewhere(files, index, relay, request)
            return
        bit = 1 << index
        with self._lock:
            given = self._given.setdefault(checksum, {})
            elsewhere = any(bits & bit for other, bits in given.items() if other != relay)
            if not elsewhere:
                given[relay] = given.get(relay, 0) | bit
        try:
            yield elsewhere
        except BaseException:
            if not elsewhere:  # the relay did not get it: another may
                with self._lock:
                    given[relay] &= ~bit
            raise

    def _given_to_others(self, checksum: str, relay: str) -> tuple[str, dict[str, str]]:
        """The chunks that other relays were sent or are being sent, as bits: of all of them, and by relay for some."""
        with self._lock:
            holders = {other: bits for other, bits in self._given.get(checksum, {}).items() if other != relay}
        given = 0
        for bits in holders.values():
            given |= bits
        told = random.sample(list(holders), min(len(holders), HOLDERS_TOLD))
        return f"{given:x}", {other: f"{holders[other]:x}" for other in told}

    def _encoded(
        self, request: dict[str, Any], files: VersionFiles, chunk: Chunk
    ) -> tuple[str, bytes | memoryview, float]:
        manifest = files.manifest
        assert manifest is not None
        codec = request.get("codec")
        raw = files.view(chunk)
        if not is_known(codec) or codec == "none":
            return "none", raw, 0.0
        began = time.monotonic()

        def make() -> bytes | None:
            data = bytes(encode(codec, raw, word=word_of(manifest.tensors)))
            return data if len(data) < WORTH_IT.get(codec, 1.0) * len(raw) else None

        if codec == "delta":
            data = self._delta(str(request.get("base", "")), files, chunk)
        else:
            data = self.encoded.get((manifest.checksum, chunk.index, codec, ""), make)
        spent = time.monotonic() - began
        return (codec, data, spent) if data is not None else ("none", raw, spent)

    def _delta(self, base: str, files: VersionFiles, chunk: Chunk) -> bytes | None:
        """The delta against `base`, composed of kept steps, of which the last is made now if need be. None if no steps
        lead from `base`, or the delta is too large."""
        assert files.manifest is not None
        steps, within = self.encoded.steps, WORTH_IT["delta"] * chunk.nbytes
        steps.asked()
        known = steps.path(base, files.manifest.checksum, chunk.index, within)
        if known is not None:
            return known
        for older in sorted(
            self.arena.all_versions(), key=lambda one: one.manifest is None or one.manifest.checksum != base
        ):
            if older is files or older.manifest is None or not are_alike(older, files):
                continue
            between = older.manifest.checksum
            if between != base and steps.path(base, between, chunk.index, within) is None:
                continue
            with contextlib.suppress(VersionGone):  # `older` makes room for another version
                self._step(older, files, chunk)
            known = steps.path(base, files.manifest.checksum, chunk.index, within)
            if known is not None:
                return known
        return None

    def _is_base(self, base: str, files: VersionFiles) -> bool:
        """Whether a delta against this base can lead to these files."""
        alike = [
            one for one in self.arena.all_versions() if one.manifest is not None and are_alike(one, files)
        ]
        return self.encoded.steps.reaches(base, [one.manifest.checksum for one in alike if one.manifest])

    def _step(self, older: VersionFiles, files: VersionFiles, chunk: Chunk) -> None:
        """Keep this chunk's delta from `older` if it is small enough. Raises VersionGone."""
        manifest = files.manifest
        if older.manifest is None or manifest is None or chunk.index not in older.have:
            return

        def make() -> bytes | None:
            with older.reading():
                data = bytes(
                    encode("delta", files.view(chunk), word=word_of(manifest.tensors), base=older.view(chunk))
                )
            return data if len(data) < WORTH_IT["delta"] * chunk.nbytes else None

        data = self.encoded.get((manifest.checksum, chunk.index, "delta", older.manifest.checksum), make)
        if data is not None:
            self.encoded.steps.add(older.manifest.checksum, manifest.checksum, chunk.index, data)


def are_alike(one: VersionFiles, other: VersionFiles) -> bool:
    """Whether both versions have their chunks at the same places."""
    return one.specs == other.specs and one.chunk_bytes == other.chunk_bytes


def word_of(tensors: Sequence[TensorSpec]) -> int:
    """The element size, in bytes, of most of the weights."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        word = DTYPES[tensor.dtype][1]
        sizes[word] = sizes.get(word, 0) + tensor.nbytes
    return max(sizes, key=lambda word: sizes[word]) if sizes else 2


def _wait_s(request: dict[str, Any]) -> float:
    wanted = request.get("wait_s")
    return min(LONGEST_WAIT_S, max(0.0, wanted)) if isinstance(wanted, int | float) else 0.0


def _bits(files: VersionFiles) -> str:
    """The bitfield in hexadecimal, bit i for chunk i; "all" for a whole version."""
    manifest = files.manifest
    assert manifest is not None
    if len(files.have) == len(manifest.digests):
        return "all"
    number = 0
    for index in list(files.have):
        number |= 1 << index
    return f"{number:x}"
