"""One chunk from one source, by whichever way: `pull(want, into)`.

    tcp      from a ChunkServer, in any codec
    shared   from a folder that another process of this machine published, where it cannot be linked
    mooncake in `gyre.weights.transfer.mooncake`

A transport is one thread's at a time, whichever, and keeps its connections. What it wrote is not verified: the caller
compares.

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
from gyre.weights.transfer.protocol import REPLY_LIMIT, Abandoned, PeerConnection, dial
from gyre.weights.version.arena import MANIFEST
from gyre.weights.version.manifest import Chunk, WeightManifest, WeightMismatch


@dataclass(frozen=True, slots=True)
class Source:
    """Somebody who may have a version. `address` is its ChunkServer's host:port; `path` the folder of the version
    itself, where it is on this machine."""

    address: str = ""
    path: str = ""

    def __str__(self) -> str:
        return self.address or self.path


@dataclass(frozen=True, slots=True)
class Want:
    """A chunk of the version with this manifest. A delta is against `base`, whose bytes of this chunk are `base_view`.
    `insist`: who has it was asked already. `wait_s`: for the source's turn, where it sends to others now."""

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
    """`status`: ok, missing (not there yet), elsewhere (another receiver has it), busy (sends to others now), gone
    (the whole version). `digest` is
    the xxh3-64 of the chunk as it was written. `seconds` is the link's, `encode_s` and `decode_s` what
    encoding and decoding took, on cores as busy as they are. `told` is
    what the source says of itself and others: `have`, `given`, `peers`."""

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
    """`relay` is this receiver's own ChunkServer, that others are told of; empty where it serves nobody.

    It takes a connection to this address from `pool`, if there is one, and `close` gives it back, or ends it where
    something is still on its way.

    `ahead` is what was asked for while the chunk before was on its way: the source goes on without waiting for us. It
    is the next to be pulled here; else the connection ends."""

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

    def pull(self, want: Want, into: memoryview, ahead: Callable[[], Want | None] = lambda: None) -> Pulled:
        """`ahead()` is asked what to ask for next, once this chunk comes."""
        if want is self.ahead and self._line is not None:
            self.ahead = None
            began = time.monotonic()  # it is on its way by now: the wait for it is the link's
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
        digest = xxhash.xxh3_64()
        encoded, decode_s = None, 0.0
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
                spent = time.monotonic()
                decode(codec, data, into, word=want.word, base=want.base_view)
                decode_s = time.monotonic() - spent
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
                self._line.abandoned, self._line.stall_s = self._abandoned, self._stall_s
        if self._line is not None:
            try:
                return self._ask(self._line, request)
            except (ConnectionError, ssl.SSLError):
                pass  # it has ended since it was used
        self._line = dial(
            self._address,
            self._token,
            stall_s=self._stall_s,
            abandoned=self._abandoned,
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


def _seconds(told: object) -> float:
    return float(told) if isinstance(told, int | float) and 0 <= told < 3600 else 0.0
