"""Transports, each of which pulls one chunk from one source: `pull(want, into)`.

    tcp      from a ChunkServer, in any codec
    shared   from a folder of another process on this machine, if it cannot be linked
    mooncake in `gyre.weights.transfer.mooncake`

One thread at a time uses a transport, which keeps its connections. The caller verifies the bytes.

This module must not know which chunk is wanted next, or what follows upon a failure.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import xxhash

from gyre.weights.codecs.encoding import Codec, decode
from gyre.weights.transfer.connections import ConnectionPool
from gyre.weights.transfer.encryption import Encryption
from gyre.weights.transfer.protocol import HANDSHAKE_S, REPLY_LIMIT, Abandoned, PeerConnection, dial
from gyre.weights.version.manifest import MANIFEST, Chunk, WeightManifest, WeightMismatch


@dataclass(frozen=True, slots=True)
class Source:
    """A process that may have a version. `address` is its ChunkServer's host:port; `path` is the version's folder, if
    it is on this machine."""

    address: str = ""
    path: str = ""

    def __str__(self) -> str:
        return self.address or self.path


@dataclass(frozen=True, slots=True)
class Want:
    """A chunk of the version with this manifest. A delta is against `base`, whose bytes of this chunk are `base_view`.
    `insist` says that nobody else could give it. `wait_s` is how long to wait for an upload slot."""

    manifest: WeightManifest
    chunk: Chunk
    codec: Codec = "none"
    word: int = 2
    base: str = ""
    base_view: memoryview | None = None
    insist: bool = False
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of a pull. `status` is ok, missing (not there yet), elsewhere (another receiver has it), busy (no free
    upload slot) or gone (the whole version). `digest` is the xxh3-64 of the chunk as it was written. `seconds` is the
    link's time, `encode_s` and `decode_s` are wall time. `told` is what the source says of itself and others: `have`,
    `given`, `peers`."""

    status: str
    digest: str = ""
    codec: str = "none"
    wire_bytes: int = 0
    seconds: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    told: Mapping[str, Any] = field(default_factory=dict)
    encoded: bytes | None = None


class Transport(Protocol):
    name: str

    def pull(self, want: Want, into: memoryview) -> Pulled:
        """Raises OSError, Stalled, Abandoned, Unauthorized, WeightMismatch."""
        ...

    def close(self) -> None: ...


class TcpTransport:
    """Pulls chunks from the ChunkServer at `address`. `relay` is this receiver's own ChunkServer, of which the source
    tells others; empty if there is none.

    A connection comes from `pool`, if that has one. `close` gives it back, or ends it if bytes are still on their way.

    `ahead` is a chunk that was asked for while the one before was on its way, so that the source need not wait for us.
    It has to be pulled next; otherwise the connection ends."""

    name = "tcp"

    def __init__(
        self,
        address: str,
        token: str,
        *,
        relay: str = "",
        stall_s: float = 5.0,
        abandoned: Callable[[], bool] = lambda: False,
        pace: Callable[[int], None] | None = None,
        encryption: Encryption | None = None,
        pool: ConnectionPool | None = None,
    ) -> None:
        """Connections of `pool` are not paced."""
        self._pace = pace
        self._encryption = encryption
        self._connections = pool if pace is None else None
        self._address = address
        self._token = token
        self._relay = relay
        self._stall_s = stall_s
        self._abandoned = abandoned
        self._line: PeerConnection | None = None
        self.ahead: Want | None = None
        self.dial_s = HANDSHAKE_S
        """How long a dial may take, until both sides have proven the token."""
        self.cut_off = False
        """Set by another thread to end what is on its way."""

    def _is_abandoned(self) -> bool:
        return self.cut_off or self._abandoned()

    def pull(self, want: Want, into: memoryview, ahead: Callable[[], Want | None] = lambda: None) -> Pulled:
        """Pull one chunk. `ahead()` returns what to ask for next, and is called when this chunk begins to come."""
        if want is self.ahead and self._line is not None:
            self.ahead = None
            began = time.monotonic()  # asked for earlier: any wait from now on is the link's
            reply = self._hear(self._line)
        else:
            reply = self.ask(_request(want))
            began = time.monotonic()
        if reply.get("status") != "ok":
            return Pulled(str(reply.get("status")), told=reply)
        assert self._line is not None
        codec, nbytes = str(reply.get("codec")), reply.get("nbytes")
        if not isinstance(nbytes, int) or nbytes < 0:
            self._end()
            raise ConnectionAbortedError("no such reply")
        digest, encoded, decode_s = xxhash.xxh3_64(), None, 0.0
        try:
            following = ahead()
            if following is not None:
                self._line.send_json({**_request(following), "relay": self._relay})
                self.ahead = following
            if codec == "none":
                if nbytes != into.nbytes:
                    raise WeightMismatch(f"chunk {want.chunk.index} came with {nbytes} bytes.")
                self._line.receive_into(into, digest.update)
                seconds = time.monotonic() - began
            else:
                if nbytes > into.nbytes:
                    raise WeightMismatch(f"chunk {want.chunk.index} came with {nbytes} bytes in {codec}.")
                data = bytearray(nbytes)
                self._line.receive_into(memoryview(data))
                seconds = time.monotonic() - began
                decode_s = _decoded(codec, data, into, want)
                digest.update(into)
                encoded = bytes(data)
        except BaseException:
            self._end()  # the rest of the chunk is still on its way
            raise
        return Pulled(
            "ok",
            digest=digest.hexdigest(),
            codec=codec,
            wire_bytes=nbytes,
            seconds=seconds,
            encode_s=_seconds(reply.get("encode_s")),
            decode_s=decode_s,
            told=reply,
            encoded=encoded,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One frame there, one back. A connection that has ended meanwhile is dialled once more."""
        if self.ahead is not None:
            self._end()  # the reply would be that of another request
        if self._line is None and self._connections is not None:
            self._line = self._connections.take(self._address)
            if self._line is not None:
                self._line.abandoned, self._line.stall_s = self._is_abandoned, self._stall_s
        if self._line is not None:
            try:
                return self._ask(self._line, request)
            except (ConnectionError, ssl.SSLError):
                pass  # it has ended since it was used
        self._line = dial(
            self._address,
            self._token,
            stall_s=self._stall_s,
            within_s=min(self.dial_s, self._stall_s),
            abandoned=self._is_abandoned,
            pace=self._pace,
            encryption=self._encryption,
        )
        return self._ask(self._line, request)

    def _ask(self, connection: PeerConnection, request: dict[str, Any]) -> dict[str, Any]:
        try:
            connection.send_json({**request, "relay": self._relay})
        except BaseException:
            self._end()
            raise
        return self._hear(connection)

    def _hear(self, connection: PeerConnection) -> dict[str, Any]:
        try:
            return connection.receive_json(limit=REPLY_LIMIT)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        if self._line is not None and self.ahead is None and self._connections is not None:
            connection, self._line = self._line, None
            self._connections.keep(self._address, connection)
        self._end()

    def _end(self) -> None:
        self.ahead = None
        if self._line is not None:
            self._line.close()
            self._line = None


def _request(want: Want) -> dict[str, Any]:
    return {
        "op": "chunk",
        "checksum": want.manifest.checksum,
        "index": want.chunk.index,
        "codec": want.codec,
        "base": want.base,
        "insist": want.insist,
        "wait_s": want.wait_s,
    }


class SharedTransport:
    """Reads the files of a version that another process of this machine published."""

    name = "shared"

    def __init__(self, path: str, *, abandoned: Callable[[], bool] = lambda: False) -> None:
        self._path = Path(path)
        self._abandoned = abandoned

    def pull(self, want: Want, into: memoryview) -> Pulled:
        chunk, began = want.chunk, time.monotonic()
        digest = xxhash.xxh3_64()
        try:
            with open(self._path / want.manifest.files[chunk.file].name, "rb", buffering=0) as file:
                file.seek(chunk.offset)
                at = 0
                while at < chunk.nbytes:
                    if self._abandoned():
                        raise Abandoned("no more use for it.")
                    got = file.readinto(into[at : at + (1 << 20)])
                    if not got:
                        return Pulled("gone")
                    digest.update(into[at : at + got])
                    at += got
            if not (self._path / MANIFEST).exists():
                return Pulled("gone")
        except FileNotFoundError:
            return Pulled("gone")
        seconds = time.monotonic() - began
        return Pulled("ok", digest.hexdigest(), wire_bytes=chunk.nbytes, seconds=seconds)

    def close(self) -> None:
        pass


def _decoded(codec: str, data: bytearray, into: memoryview, want: Want) -> float:
    """Decode a chunk as it came, and return the seconds that it took."""
    began = time.monotonic()
    decode(codec, data, into, word=want.word, base=want.base_view)
    return time.monotonic() - began


def _seconds(told: object) -> float:
    return float(told) if isinstance(told, int | float) and 0 <= told < 3600 else 0.0
