"""A TCP connection of the weight plane: authentication, small JSON frames, and bytes that must keep coming.

Invariants:
- *no token in clear*: each side proves that it has the token by an HMAC over both sides' random numbers; nothing else
  is sent before both have proven it;
- *progress, not patience*: a wait ends `stall_s` after the last byte, however much is still to come. What is small has
  a deadline for the whole, so that nobody is waited for byte by byte: a dial, the proofs, a frame;
- *bounded*: a frame says its length, and a frame that is too long ends the connection. Nothing is unpickled;
- *one connection, one proof*: on an encrypted connection (`gyre.weights.transfer.encryption`) the proofs cover the
  certificate of its handshake, so that nobody without the token can stand in between. A connection in clear is for
  private networks only.

This module must not know the meaning of requests.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from gyre.errors import GyreError, Unauthorized
from gyre.weights.transfer.address import split_address
from gyre.weights.transfer.encryption import Encryption

MAGIC = b"gyre-weights/1\n\0"
_NONCE = 32
_PROOF = 32

HANDSHAKE_S = 5.0
REQUEST_LIMIT = 1 << 16
REPLY_LIMIT = 1 << 26
"""Largest reply; the manifest of a model with a hundred thousand tensors has about 15 MB."""

BLOCK = 4 << 20
"""Bytes that a receiver takes between two checks whether to go on, and then hashes. A larger block would have left the
cache by then; with smaller ones threads would wait more often for the interpreter's lock."""

SEND_BLOCK = 16 << 20
"""Bytes that a sender, which reads nothing twice, sends between two checks."""

PACED_BLOCK = 1 << 20
"""Bytes between two checks on a paced link."""

TLS_BLOCK = 64 << 10
"""Bytes that an encrypted connection sends at once: OpenSSL reports progress only after a whole block."""

WAKE_BYTES = 2 << 20
"""Bytes for which a receiver in mid-chunk is woken, instead of for each packet."""

SLOWEST_FRAME_BYTES_S = 64 << 10
"""Rate at which a frame has to come after the first `stall_s`."""

_LOOK_S = 0.25
"""Time within which a wait notices that it has to end."""


class Stalled(GyreError):
    """The other side is connected and sends or takes nothing."""

    code = "weights.stalled"


class Abandoned(GyreError):
    """This side no longer needs the transfer."""

    code = "weights.abandoned"


class PeerConnection:
    """One connection. `abandoned()` is called often; once it is true, waits raise Abandoned. `pace(nbytes)` is called
    after each part that was sent or received, and may wait to leave the link to others."""

    def __init__(
        self,
        link: socket.socket,
        *,
        stall_s: float,
        abandoned: Callable[[], bool] = lambda: False,
        pace: Callable[[int], None] | None = None,
    ) -> None:
        self._link = link
        self.stall_s = stall_s
        self.abandoned = abandoned
        self._pace = pace
        self.until = float("inf")
        """When a wait for bytes ends, whatever comes (time.monotonic)."""
        self._wakes_at = 1
        self._flags = int(socket.MSG_WAITALL)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if isinstance(link, ssl.SSLSocket):  # it takes no flags, and would ignore the kernel's timeouts
            self._flags = 0
            link.settimeout(_LOOK_S)
            return
        # The kernel's own timeouts: Python's would call `poll` before each part, and take parts as small as they come.
        link.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            link.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, int(_LOOK_S * 1e6)))

    def send(
        self,
        data: memoryview | bytes,
        idle: Callable[[], None] = lambda: None,
        went_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Send all of `data`. At least every quarter of a second `went_on` is called if bytes moved, and `idle` if none
        did. Raises Stalled, Abandoned, OSError."""
        view = memoryview(data).cast("B")
        block = SEND_BLOCK if self._pace is None else PACED_BLOCK
        if not self._flags:
            block = TLS_BLOCK
        at, moved = 0, time.monotonic()
        while at < view.nbytes:
            try:
                sent = self._link.send(view[at : at + block])
            except (BlockingIOError, TimeoutError):
                idle()
                self._look(moved)
                continue
            if self._pace is not None:
                self._pace(sent)
            at += sent
            moved = time.monotonic()
            went_on()
            if self.abandoned():
                raise Abandoned("no more use for it.")

    def receive_into(self, view: memoryview, seen: Callable[[memoryview], None] | None = None) -> None:
        """Fill `view`; `seen` gets each part as it comes. Raises Stalled, Abandoned, ConnectionError."""
        at, told, moved = 0, 0, time.monotonic()
        end = view.nbytes
        block = BLOCK if self._pace is None else PACED_BLOCK
        while at < end:
            self._wake_at(WAKE_BYTES if end - at >= block + WAKE_BYTES else 1)
            try:
                got = self._link.recv_into(view[at : min(end, at + block)], 0, self._flags)
            except (BlockingIOError, TimeoutError):
                self._look(moved)
                continue
            if not got:
                raise ConnectionResetError("the other side has closed the connection")
            at += got
            if self._pace is not None:
                self._pace(got)
            moved = time.monotonic()
            if moved > self.until and at < end:
                raise Stalled("what came, came too slowly.")
            if seen is not None and (at - told >= block or at == end):
                seen(view[told:at])
                told = at
            if self.abandoned():
                raise Abandoned("no more use for it.")

    def send_json(self, frame: dict[str, Any]) -> None:
        body = json.dumps(frame, separators=(",", ":")).encode()
        self.send(len(body).to_bytes(4, "little") + body)

    def receive_json(self, *, limit: int, idle_s: float | None = None) -> dict[str, Any]:
        """Receive one frame, which must begin within `idle_s` (None: `stall_s`). Raises ConnectionError for anything
        else."""
        head = bytearray(4)
        stall_s, self.stall_s = self.stall_s, idle_s if idle_s is not None else self.stall_s
        self.until = time.monotonic() + 2 * self.stall_s  # four bytes
        try:
            self.receive_into(memoryview(head))
        finally:
            self.stall_s, self.until = stall_s, float("inf")
        size = int.from_bytes(head, "little")
        if size > limit:
            raise ConnectionAbortedError(f"a frame of {size} bytes")
        body = bytearray(size)
        self.until = time.monotonic() + self.stall_s + size / SLOWEST_FRAME_BYTES_S
        try:
            self.receive_into(memoryview(body))
        finally:
            self.until = float("inf")
        try:
            frame = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ConnectionAbortedError(f"no frame: {error}") from error
        if not isinstance(frame, dict):
            raise ConnectionAbortedError("no frame")
        return frame

    def is_at_rest(self) -> bool:
        """Whether the connection is open and has no unexpected data."""
        watched = select.poll()  # knows descriptors of any number
        watched.register(self._link, select.POLLIN)
        return not watched.poll(0)

    def close(self) -> None:
        self._link.close()

    def _wake_at(self, nbytes: int) -> None:
        """Set how many bytes wake the receiver: at most the bytes that are still to come, or it would never wake."""
        if (
            nbytes != self._wakes_at and self._flags
        ):  # TLS polls first, and would take a slow link for a stalled one
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wakes_at = nbytes

    def _look(self, moved: float) -> None:
        if self.abandoned():
            raise Abandoned("no more use for it.")
        waited = time.monotonic() - moved
        if waited >= self.stall_s or time.monotonic() > self.until:
            raise Stalled(f"nothing moved for {waited:.1f} s.")


def dial(
    address: str,
    token: str,
    *,
    stall_s: float,
    within_s: float = HANDSHAKE_S,
    abandoned: Callable[[], bool] = lambda: False,
    pace: Callable[[int], None] | None = None,
    encryption: Encryption | None = None,
) -> PeerConnection:
    """A connection to `host:port`, on which both sides have proven the token, within `within_s` and `stall_s`. Raises
    OSError, Stalled, Abandoned, Unauthorized."""
    within_s = min(within_s, stall_s)
    until = time.monotonic() + within_s
    link = _connect(address, until, abandoned)
    if encryption is not None:
        link = encryption.dial(link, max(0.001, until - time.monotonic()))
    connection = PeerConnection(link, stall_s=within_s, abandoned=abandoned, pace=pace)
    connection.until = until
    try:
        hello = bytearray(len(MAGIC) + _NONCE)
        connection.receive_into(memoryview(hello))
        if hello[: len(MAGIC)] != MAGIC:
            raise ConnectionAbortedError(f"{address} is not a source of weights")
        theirs, ours = bytes(hello[len(MAGIC) :]), secrets.token_bytes(_NONCE)
        bound = _binding(link, encryption)
        connection.send(ours + _proof(token, b"receiver", theirs, ours, bound))
        answer = bytearray(_PROOF)
        try:
            connection.receive_into(memoryview(answer))
        except ConnectionError:
            raise Unauthorized(f"{address} does not accept the token.") from None
        if not hmac.compare_digest(bytes(answer), _proof(token, b"source", theirs, ours, bound)):
            raise Unauthorized(f"{address} does not know the token: it is not of this job.")
    except BaseException:
        link.close()
        raise
    connection.stall_s, connection.until = stall_s, float("inf")
    return connection


def _connect(address: str, until: float, abandoned: Callable[[], bool]) -> socket.socket:
    """A TCP connection by the time `until`. Of a name with several addresses each has an equal share of the time that
    is left, so that one which swallows packets does not hide the others. Raises OSError, Abandoned."""
    host, port = split_address(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError = OSError(f"{address} is no address")
    for at, (family, kind, protocol, _, where) in enumerate(found):
        now = time.monotonic()
        try:
            return _connect_to(
                family, kind, protocol, where, now + max(0.0, until - now) / (len(found) - at), abandoned
            )
        except OSError as error:
            failure = error
    raise failure


def _connect_to(
    family: int, kind: int, protocol: int, where: Any, until: float, abandoned: Callable[[], bool]
) -> socket.socket:
    link = socket.socket(family, kind, protocol)
    try:
        link.setblocking(False)
        error = link.connect_ex(where)
        watched = select.poll()  # knows descriptors of any number
        watched.register(link, select.POLLOUT)
        while error == errno.EINPROGRESS:
            left_s = until - time.monotonic()
            if abandoned():
                raise Abandoned("no more use for it.")
            if left_s <= 0:
                raise TimeoutError(f"{where[0]} does not answer")
            if watched.poll(1000 * min(_LOOK_S, left_s)):
                error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        return link
    except BaseException:
        link.close()
        raise


def receive_caller(
    link: socket.socket, token: str, *, stall_s: float, encryption: Encryption | None = None, **options: Any
) -> PeerConnection:
    """The accepting side of `dial`. Raises OSError, Stalled, Unauthorized; the caller only sees the connection end.
    `link` belongs to the connection from now on, and is closed if this raises."""
    if encryption is not None:
        link = encryption.accept(link, HANDSHAKE_S)
    try:
        connection = PeerConnection(link, stall_s=HANDSHAKE_S, **options)
        connection.until = time.monotonic() + HANDSHAKE_S
        ours, bound = secrets.token_bytes(_NONCE), _binding(link, encryption)
        connection.send(MAGIC + ours)
        answer = bytearray(_NONCE + _PROOF)
        connection.receive_into(memoryview(answer))
        theirs, proof = bytes(answer[:_NONCE]), bytes(answer[_NONCE:])
        if not hmac.compare_digest(proof, _proof(token, b"receiver", ours, theirs, bound)):
            raise Unauthorized("the token is wrong.")
        connection.send(_proof(token, b"source", ours, theirs, bound))
    except BaseException:
        link.close()
        raise
    connection.stall_s, connection.until = stall_s, float("inf")
    return connection


def _binding(link: socket.socket, encryption: Encryption | None) -> bytes:
    """The bytes that the proofs cover besides the random numbers; empty on a connection in clear."""
    if encryption is None or not isinstance(link, ssl.SSLSocket):
        return b""
    return encryption.binding(link)


def _proof(token: str, side: bytes, source: bytes, receiver: bytes, bound: bytes) -> bytes:
    return hmac.new(token.encode(), MAGIC + side + source + receiver + bound, hashlib.sha256).digest()


def is_allowed(host: str, networks: Sequence[str]) -> bool:
    """Whether the address `host` is in one of these networks in CIDR notation; True if there are no networks."""
    if not networks:
        return True
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in ipaddress.ip_network(network, strict=False) for network in networks)


def address_towards(url: str) -> str:
    """This machine's address on the way to `url`, at which peers on that network reach it; loopback if the way is not
    known. Nothing is sent."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 9
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
