"""Serves the chunks of an arena: whole versions, and of one that is being fetched what is there and right.

Who made a version (the origin) sends each chunk once, and then names who has it: receivers serve each other, so the
trainer's link carries about one copy however many instances there are. Who is told so and finds nobody able insists,
and is served.

Invariants:
- *only what is right*: a chunk is sent when it is in its slot's `have`, which holds verified chunks alone;
- *no mixture*: pages that make room for another version are not sent on; the connection ends in mid-chunk instead;
- *a reader costs nobody*: each connection has a thread and a stall timer of its own; none holds up the owner.

This module must not know why somebody wants a version.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from typing import Any

from gyre.errors import Unauthorized
from gyre.weights.arena import Arena, Slot, SlotGone
from gyre.weights.codecs import CODECS, encode
from gyre.weights.manifest import DTYPES, Chunk, TensorSpec
from gyre.weights.wire import REQUEST_LIMIT, Abandoned, Line, Stalled, is_allowed, receive_caller

IDLE_S = 120.0
"""A connection on which nobody asks is closed: the receiver dials again."""

WORTH_IT = {"delta": 0.5, "planes": 0.9, "fp8": 0.9}
"""Above this part of the raw size a chunk goes as it is: decoding would cost more than it saves."""

ENCODED_KEPT_BYTES = 256 << 20

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

    def put(self, key: tuple[str, int, str, str], data: bytes | None) -> None:
        with self._lock:
            if key in self._held:
                return
            self._held[key] = data
            self._size += len(data or b"")
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
    ) -> None:
        self.arena = arena
        self.encoded = EncodedChunks()
        self.sent_bytes = 0
        """Of chunks, as they went over the wire."""
        self.origin_of: set[str] = set()
        """Checksums of versions that were made here."""
        self.memory: Callable[[Slot, Chunk], dict[str, Any]] | None = None
        """Says where a chunk lies for those who read it from memory themselves, by Mooncake."""
        self._token = token
        self._networks = tuple(networks)
        self._stall_s = stall_s
        self._pace = pace
        self._given: dict[str, dict[str, int]] = {}
        """Of the origin's versions: the chunks that each relay was sent, or is being sent, as bits."""
        self._relays: dict[str, dict[str, float]] = {}
        self._lock = threading.Lock()
        self._unknown = 0
        self._lines: set[socket.socket] = set()
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._thread = threading.Thread(target=self._accept, name="gyre-chunks", daemon=True)
        self._thread.start()

    def forget(self, checksums: Set[str]) -> None:
        """Of versions other than these nothing need be remembered."""
        with self._lock:
            self.origin_of &= checksums
            self._relays = {of: known for of, known in self._relays.items() if of in checksums}
            self._given = {of: given for of, given in self._given.items() if of in checksums}

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accept
        self._listener.close()
        with self._lock:
            lines = list(self._lines)
        for link in lines:
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
                    self._lines.add(link)
            if refused:
                link.close()
                continue
            threading.Thread(target=self._converse, args=(link,), name="gyre-chunk", daemon=True).start()

    def _converse(self, link: socket.socket) -> None:
        known = False
        try:
            line = receive_caller(
                link, self._token, stall_s=self._stall_s, abandoned=lambda: self._closing, pace=self._pace
            )
            known = True
            with self._lock:
                self._unknown -= 1
            while not self._closing:
                self._answer(line, line.receive_json(limit=REQUEST_LIMIT, idle_s=IDLE_S))
        except (OSError, Stalled, Abandoned, Unauthorized, SlotGone):
            pass  # the receiver knows what it has, and comes back or goes elsewhere
        finally:
            with self._lock:
                self._lines.discard(link)
                if not known:
                    self._unknown -= 1
            link.close()

    def _answer(self, line: Line, request: dict[str, Any]) -> None:
        what = request.get("op")
        checksum = str(request.get("checksum", ""))
        slot = self.arena.find(checksum) if checksum else self.arena.newest()
        if slot is None or slot.manifest is None:
            line.send_json({"status": "gone"})
            return
        if what == "manifest":
            line.send_json({"status": "ok", "manifest": slot.manifest.to_dict()})
            return
        relay = str(request.get("relay", ""))[:100]
        told = {
            "have": _bits(slot),
            **self._given_to_others(checksum, relay),
            "peers": self._peers(checksum, relay),
        }
        if what == "have":
            line.send_json({"status": "ok", **told})
        elif what == "chunk":
            self._send_chunk(line, request, slot, relay, told)
        else:
            line.send_json({"status": "unknown"})

    def _peers(self, checksum: str, relay: str) -> list[str]:
        """Who asked for this version lately and serves it too."""
        now = time.monotonic()
        with self._lock:
            known = self._relays.setdefault(checksum, {})
            if relay:
                known[relay] = now
            return [address for address, seen in known.items() if address != relay and now - seen < IDLE_S]

    # -- chunks --------------------------------------------------------------------------------------

    def _send_chunk(
        self, line: Line, request: dict[str, Any], slot: Slot, relay: str, told: dict[str, Any]
    ) -> None:
        manifest = slot.manifest
        assert manifest is not None
        index = request.get("index")
        if not isinstance(index, int) or index not in slot.have:
            line.send_json({"status": "missing", **told})
            return
        bit, counted = 1 << index, False
        if manifest.checksum in self.origin_of and not request.get("insist"):
            with self._lock:
                given = self._given.setdefault(manifest.checksum, {})
                elsewhere = any(bits & bit for other, bits in given.items() if other != relay)
                if relay and not elsewhere:
                    given[relay] = given.get(relay, 0) | bit
                    counted = True
            if elsewhere:
                line.send_json({"status": "elsewhere", **told})
                return
        try:
            if request.get("via") == "memory":
                where = self.memory(slot, slot.chunks[index]) if self.memory is not None else None
                line.send_json(
                    {"status": "ok", **where, **told} if where is not None else {"status": "unknown"}
                )
                return
            with slot.reading():
                chunk = slot.chunks[index]
                codec, data, spent = self._encoded(request, slot, chunk)
                line.send_json(
                    {
                        "status": "ok",
                        "codec": codec,
                        "nbytes": memoryview(data).nbytes,
                        "encode_s": spent,
                        **told,
                    }
                )
                view = memoryview(data).cast("B")
                for at in range(0, view.nbytes, 4 << 20):
                    if slot.revoked:
                        raise SlotGone(f"{slot.path.name} makes room for another version.")
                    line.send(view[at : at + (4 << 20)])
            with self._lock:
                self.sent_bytes += view.nbytes
        except BaseException:
            if counted:  # it has not got it: the next one may
                with self._lock:
                    given[relay] &= ~bit
            raise

    def _given_to_others(self, checksum: str, relay: str) -> dict[str, Any]:
        """Bits of the chunks that other relays were sent, or are being sent: of each, and of all."""
        with self._lock:
            holders = {other: bits for other, bits in self._given.get(checksum, {}).items() if other != relay}
        given = 0
        for bits in holders.values():
            given |= bits
        return {"given": f"{given:x}", "holders": {other: f"{bits:x}" for other, bits in holders.items()}}

    def _encoded(
        self, request: dict[str, Any], slot: Slot, chunk: Chunk
    ) -> tuple[str, bytes | memoryview, float]:
        manifest = slot.manifest
        assert manifest is not None
        codec, base = request.get("codec"), str(request.get("base", ""))
        raw = slot.view(chunk)
        if codec not in CODECS or codec == "none":
            return "none", raw, 0.0
        word = word_of(manifest.tensors)
        began = time.monotonic()

        def make() -> bytes | None:
            if codec == "delta":
                older = self.arena.find(base)
                if older is None or not are_alike(older, slot) or chunk.index not in older.have:
                    return None
                with older.reading():
                    data = bytes(encode("delta", raw, word=word, base=older.view(chunk)))
            else:
                data = bytes(encode(codec, raw, word=word))
            return data if len(data) < WORTH_IT[codec] * len(raw) else None

        key = (manifest.checksum, chunk.index, codec, base if codec == "delta" else "")
        data = self.encoded.get(key, make)
        spent = time.monotonic() - began
        return (codec, data, spent) if data is not None else ("none", raw, spent)


def are_alike(one: Slot, other: Slot) -> bool:
    """Whether chunk i of one is at the same place as chunk i of the other."""
    return one.files == other.files and one.chunk_bytes == other.chunk_bytes


def word_of(tensors: Sequence[TensorSpec]) -> int:
    """The bytes of the element that most of the weights have."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        word = DTYPES[tensor.dtype][1]
        sizes[word] = sizes.get(word, 0) + tensor.nbytes
    return max(sizes, key=lambda word: sizes[word]) if sizes else 2


def _bits(slot: Slot) -> str:
    """Bit i of the number in hexadecimal: chunk i is there. "all" for a whole version."""
    manifest = slot.manifest
    assert manifest is not None
    if len(slot.have) == len(manifest.digests):
        return "all"
    number = 0
    for index in list(slot.have):
        number |= 1 << index
    return f"{number:x}"
