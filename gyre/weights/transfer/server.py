"""Serves the chunks of an arena: whole versions, and of one that is being fetched what is there and right.

Who made a version (the origin) sends each chunk once, and then names who has it: receivers serve each other, so the
trainer's link carries about one copy however many instances there are. Who is told so and finds nobody able insists,
and is served. Chunks go a few at a time, in turns (`gyre.weights.transfer.upload_slots`), so that each is soon there
to be passed on.

Invariants:
- *only what is right*: a chunk is sent when it is in its slot's `have`, which holds verified chunks alone;
- *no mixture*: pages that make room for another version are not sent on; the connection ends in mid-chunk instead;
- *a reader costs nobody*: each connection has a thread and a stall timer of its own; none holds up the owner.

This module must not know why somebody wants a version.
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
from gyre.weights.transfer.address import is_address
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
from gyre.weights.version.arena import Arena, SlotGone, VersionFiles
from gyre.weights.version.manifest import DTYPES, Chunk, TensorSpec

IDLE_S = 120.0
"""A connection on which nobody asks is closed: the receiver dials again."""

IDLE_CONNECTIONS, CROWDED_IDLE_S = 64, 2.0
"""Each connection has a thread. Where there are more than so many, those on which nobody asks are closed sooner."""

WORTH_IT = {"delta": 0.5, "planes": 0.9, "fp8": 0.9}
"""Above this part of the raw size a chunk goes as it is: decoding would cost more than it saves."""

ENCODED_KEPT_BYTES = 256 << 20

LONGEST_WAIT_S = 1.0
"""For a turn, however long a receiver would wait: it may have heard of another source since."""

HOLDERS_TOLD, PEERS_TOLD = 16, 64
"""In one reply, at random where there are more: each is asked on, and who asks hears of others the next time."""

UNKNOWN_CALLERS = 64
"""Connections that have not proven themselves yet, at one time."""


class EncodedChunks:
    """What was encoded, or came encoded, so that the next one who asks does not cost it again. The oldest go first."""

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
            self._size += len(data or b"")
            target, index, codec, base = key
            if codec == "delta" and data is not None:
                self.steps.add(base, target, index, data)
            while self._size > self._limit:
                _, old = self._held.popitem(last=False)
                self._size -= len(old or b"")

    def get(self, key: tuple[str, int, str, str], make: Callable[[], bytes | None]) -> bytes | None:
        """None where encoding is not worth it. One thread makes what several ask for."""
        with self._lock:
            if key in self._held:
                return self._held[key]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._held:
                    return self._held[key]
            data = make()
            self.put(key, data)
        with self._lock:
            self._making.pop(key, None)
        return data


class ChunkServer:
    """Listens when made, on `host` and a free port unless `port` says which, and serves until `close`."""

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
        """`reach` is what others call `host`, where that is no address of one machine."""
        self.arena = arena
        self.encoded = EncodedChunks()
        self.sent_bytes = 0
        """Of chunks, as they went over the wire."""
        self.origin_of: set[str] = set()
        """Checksums of versions that were made here."""
        self.memory: Callable[[VersionFiles, Chunk], dict[str, Any]] | None = None
        """Says where a chunk lies for those who read it from memory themselves, by Mooncake."""
        self.no_memory = "no Mooncake"
        """Why it does not."""
        self._encryption = encryption
        self._token = token
        self._networks = tuple(networks)
        self._stall_s = stall_s
        self._pace = pace
        self._given: dict[str, dict[str, int]] = {}
        """Of the origin's versions: the chunks that each relay was sent, or is being sent, as bits."""
        self._relays: dict[str, dict[str, float]] = {}
        self._turns = UploadSlots()
        self._lock = threading.Lock()
        self._unknown = 0
        self._connections: set[socket.socket] = set()
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=256)
        self.port: int = self._listener.getsockname()[1]
        host = reach or host
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._thread = threading.Thread(target=self._accept, name="gyre-chunks", daemon=True)
        self._thread.start()

    def forget(self, checksums: Set[str]) -> None:
        """Of versions other than these nothing need be remembered."""
        with self._lock:
            self.origin_of &= checksums
            self._relays = {of: known for of, known in self._relays.items() if of in checksums}
            self._given = {of: given for of, given in self._given.items() if of in checksums}

    def prepare(self, older: VersionFiles | None, slot: VersionFiles) -> None:
        """Encode what changed from `older`, whose pages may soon be another's, where deltas were asked for lately. It
        takes a second a gigabyte of one core; who asks meanwhile is served."""
        self.encoded.steps.limit_bytes = limit_for(sum(file.size_bytes for file in slot.files))
        if not self.encoded.steps.is_wanted() or older is None or older is slot or not are_alike(older, slot):
            return
        with contextlib.suppress(SlotGone):  # one of them makes room already: what is not made is not there
            for chunk in slot.chunks:
                with slot.reading():
                    self._step(older, slot, chunk)

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
            except OSError:  # closed, or out of descriptors: then a little later
                if not self._closing:
                    time.sleep(0.05)
                continue
            with self._lock:
                refused = self._unknown >= UNKNOWN_CALLERS or not is_allowed(peer[0], self._networks)
                if not refused:
                    self._unknown += 1
                    self._connections.add(link)
            if refused:
                link.close()
                continue
            threading.Thread(
                target=self._converse, args=(link, peer[0]), name="gyre-chunk", daemon=True
            ).start()

    def _converse(self, link: socket.socket, host: str) -> None:
        known = False
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
            known = True
            with self._lock:
                self._unknown -= 1
            while not self._closing:
                idle_s = IDLE_S if len(self._connections) <= IDLE_CONNECTIONS else CROWDED_IDLE_S
                self._answer(connection, connection.receive_json(limit=REQUEST_LIMIT, idle_s=idle_s), host)
        except (OSError, Stalled, Abandoned, Unauthorized, SlotGone):
            pass  # the receiver knows what it has, and comes back or goes elsewhere
        finally:
            with self._lock:
                self._connections.discard(link)
                if not known:
                    self._unknown -= 1
            link.close()
            if connection is not None:
                connection.close()  # another descriptor, where it is encrypted

    def _answer(self, connection: PeerConnection, request: dict[str, Any], host: str) -> None:
        what = request.get("op")
        checksum = str(request.get("checksum", ""))
        slot = self.arena.find(checksum) if checksum else self.arena.newest()
        if slot is None or slot.manifest is None:
            connection.send_json({"status": "gone"})
            return
        if what == "manifest":
            connection.send_json({"status": "ok", "manifest": slot.manifest.to_dict()})
            return
        told = request.get("relay", "")
        relay = told if is_address(told) else ""  # it is told to others, who dial it
        if what == "have":
            connection.send_json({"status": "ok", **self._told(slot, relay)})
        elif what == "chunk":
            self._send_chunk(connection, request, slot, relay, relay or host)
        else:
            connection.send_json({"status": "unknown"})

    def _told(self, slot: VersionFiles, relay: str) -> dict[str, Any]:
        """What goes with each reply: which chunks are here, and who else has or gets which."""
        assert slot.manifest is not None
        checksum = slot.manifest.checksum
        given, holders = self._given_to_others(checksum, relay)
        return {
            "have": _bits(slot),
            "given": given,
            "holders": holders,
            "peers": self._peers(checksum, relay, holders),
        }

    def _peers(self, checksum: str, relay: str, first: Iterable[str]) -> list[str]:
        """Who asked for this version lately and serves it too; so many, and those of `first` among them."""
        now = time.monotonic()
        with self._lock:
            known = self._relays.setdefault(checksum, {})
            if relay:
                known[relay] = now
            lately = {address for address, seen in known.items() if address != relay and now - seen < IDLE_S}
        told = lately & set(first)
        others = list(lately - told)
        return [*told, *random.sample(others, min(len(others), PEERS_TOLD - len(told)))]

    # -- chunks --------------------------------------------------------------------------------------

    def _send_chunk(
        self, connection: PeerConnection, request: dict[str, Any], slot: VersionFiles, relay: str, caller: str
    ) -> None:
        index = request.get("index")
        if not isinstance(index, int) or index not in slot.have:
            connection.send_json({"status": "missing", **self._told(slot, relay)})
            return
        if request.get("via") == "memory":
            self._tell_where(connection, request, slot, index, relay)
            return
        if self._is_elsewhere(slot, index, relay, request):
            connection.send_json({"status": "elsewhere", **self._told(slot, relay)})
            return
        with slot.reading():
            codec, data, spent = self._encoded(request, slot, slot.chunks[index])
        view = memoryview(data).cast("B")
        turn = self._turns.take(caller, _wait_s(request), view.nbytes)
        if turn is None:
            connection.send_json({"status": "busy", **self._told(slot, relay)})
            return
        try:
            with slot.reading(), self._giving(slot, index, relay, request) as elsewhere:
                if elsewhere:  # it went to another while this one waited
                    connection.send_json({"status": "elsewhere", **self._told(slot, relay)})
                    return
                reply = {"status": "ok", "codec": codec, "nbytes": view.nbytes, "encode_s": spent}
                if request.get("codec") == "delta" and codec == "none":
                    reply["has_base"] = self._is_base(str(request.get("base", "")), slot)
                connection.send_json({**reply, **self._told(slot, relay)})
                for at in range(0, view.nbytes, SEND_BLOCK):
                    if slot.revoked:
                        raise SlotGone(f"{slot.path.name} makes room for another version.")
                    connection.send(view[at : at + SEND_BLOCK], idle=turn.lapse, went_on=turn.went_on)
            turn.let_go(view.nbytes)
        finally:
            turn.let_go()
        with self._lock:
            self.sent_bytes += view.nbytes

    def _tell_where(
        self, connection: PeerConnection, request: dict[str, Any], slot: VersionFiles, index: int, relay: str
    ) -> None:
        with self._giving(slot, index, relay, request) as elsewhere:
            if elsewhere:
                connection.send_json({"status": "elsewhere", **self._told(slot, relay)})
                return
            where = self.memory(slot, slot.chunks[index]) if self.memory is not None else None
            connection.send_json(
                {"status": "ok", **where, **self._told(slot, relay)}
                if where is not None
                else {"status": "unknown", "why": self.no_memory}
            )

    def _is_elsewhere(self, slot: VersionFiles, index: int, relay: str, request: dict[str, Any]) -> bool:
        """Whether this is the origin, and another has this chunk or is getting it."""
        checksum = slot.manifest.checksum if slot.manifest is not None else ""
        if checksum not in self.origin_of or request.get("insist"):
            return False
        with self._lock:
            given = self._given.get(checksum, {})
            return any(bits >> index & 1 for other, bits in given.items() if other != relay)

    @contextlib.contextmanager
    def _giving(self, slot: VersionFiles, index: int, relay: str, request: dict[str, Any]) -> Iterator[bool]:
        """Whether the chunk is elsewhere; if not, it counts as given to `relay`, unless it does not get there."""
        checksum = slot.manifest.checksum if slot.manifest is not None else ""
        if checksum not in self.origin_of or request.get("insist") or not relay:
            yield self._is_elsewhere(slot, index, relay, request)
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
            if not elsewhere:  # it has not got it: the next one may
                with self._lock:
                    given[relay] &= ~bit
            raise

    def _given_to_others(self, checksum: str, relay: str) -> tuple[str, dict[str, str]]:
        """Bits of the chunks that other relays were sent, or are being sent: of all, and of some of them each."""
        with self._lock:
            holders = {other: bits for other, bits in self._given.get(checksum, {}).items() if other != relay}
        given = 0
        for bits in holders.values():
            given |= bits
        told = random.sample(list(holders), min(len(holders), HOLDERS_TOLD))
        return f"{given:x}", {other: f"{holders[other]:x}" for other in told}

    def _encoded(
        self, request: dict[str, Any], slot: VersionFiles, chunk: Chunk
    ) -> tuple[str, bytes | memoryview, float]:
        manifest = slot.manifest
        assert manifest is not None
        codec = request.get("codec")
        raw = slot.view(chunk)
        if not is_known(codec) or codec == "none":
            return "none", raw, 0.0
        began = time.monotonic()

        def make() -> bytes | None:
            data = bytes(encode(codec, raw, word=word_of(manifest.tensors)))
            return data if len(data) < WORTH_IT.get(codec, 1.0) * len(raw) else None

        if codec == "delta":
            data = self._delta(str(request.get("base", "")), slot, chunk)
        else:
            data = self.encoded.get((manifest.checksum, chunk.index, codec, ""), make)
        spent = time.monotonic() - began
        return (codec, data, spent) if data is not None else ("none", raw, spent)

    def _delta(self, base: str, slot: VersionFiles, chunk: Chunk) -> bytes | None:
        """Against `base`, by steps that are kept, the last of them made now where need be. None where nothing leads
        from there, or it comes to too much."""
        assert slot.manifest is not None
        steps, within = self.encoded.steps, WORTH_IT["delta"] * chunk.nbytes
        steps.asked()
        known = steps.path(base, slot.manifest.checksum, chunk.index, within)
        if known is not None:
            return known
        for older in sorted(
            self.arena.slots(), key=lambda one: one.manifest is None or one.manifest.checksum != base
        ):
            if older is slot or older.manifest is None or not are_alike(older, slot):
                continue
            between = older.manifest.checksum
            if between != base and steps.path(base, between, chunk.index, within) is None:
                continue
            with contextlib.suppress(SlotGone):  # it makes room just now
                self._step(older, slot, chunk)
            known = steps.path(base, slot.manifest.checksum, chunk.index, within)
            if known is not None:
                return known
        return None

    def _is_base(self, base: str, slot: VersionFiles) -> bool:
        """Whether a delta against this version can lead to what is in `slot`."""
        alike = [one for one in self.arena.slots() if one.manifest is not None and are_alike(one, slot)]
        return self.encoded.steps.reaches(base, [one.manifest.checksum for one in alike if one.manifest])

    def _step(self, older: VersionFiles, slot: VersionFiles, chunk: Chunk) -> None:
        """Keep what changed in this chunk, if it is less than half of it. Raises SlotGone."""
        manifest = slot.manifest
        if older.manifest is None or manifest is None or chunk.index not in older.have:
            return

        def make() -> bytes | None:
            with older.reading():
                data = bytes(
                    encode("delta", slot.view(chunk), word=word_of(manifest.tensors), base=older.view(chunk))
                )
            return data if len(data) < WORTH_IT["delta"] * chunk.nbytes else None

        data = self.encoded.get((manifest.checksum, chunk.index, "delta", older.manifest.checksum), make)
        if data is not None:
            self.encoded.steps.add(older.manifest.checksum, manifest.checksum, chunk.index, data)


def are_alike(one: VersionFiles, other: VersionFiles) -> bool:
    """Whether chunk i of one is at the same place as chunk i of the other."""
    return one.files == other.files and one.chunk_bytes == other.chunk_bytes


def word_of(tensors: Sequence[TensorSpec]) -> int:
    """The bytes of the element that most of the weights have."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        word = DTYPES[tensor.dtype][1]
        sizes[word] = sizes.get(word, 0) + tensor.nbytes
    return max(sizes, key=lambda word: sizes[word]) if sizes else 2


def _wait_s(request: dict[str, Any]) -> float:
    wanted = request.get("wait_s")
    return min(LONGEST_WAIT_S, max(0.0, wanted)) if isinstance(wanted, int | float) else 0.0


def _bits(slot: VersionFiles) -> str:
    """Bit i of the number in hexadecimal: chunk i is there. "all" for a whole version."""
    manifest = slot.manifest
    assert manifest is not None
    if len(slot.have) == len(manifest.digests):
        return "all"
    number = 0
    for index in list(slot.have):
        number |= 1 << index
    return f"{number:x}"
