"""The weight plane's frames: what is none ends the connection, and costs no more than it is long."""

from __future__ import annotations

import socket
import threading

import pytest

from gyre.weights.transfer.protocol import PeerConnection


def heard(data: bytes) -> dict:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        sender = threading.Thread(target=lambda: (far.sendall(data), far.shutdown(socket.SHUT_WR)))
        sender.start()
        try:
            return PeerConnection(near, stall_s=20.0).receive_json(limit=1 << 20)
        finally:
            sender.join()


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def test_a_frame_is_heard() -> None:
    assert heard(framed(b'{"op": "have"}')) == {"op": "have"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff\xff\xff",
        framed(b""),
        framed(b"[]"),
        framed(b"\xff"),
        framed(b"[" * 100_000),
        framed(b'{"a":' * 100_000),
        framed(b'{"a": ' + b"9" * 5000 + b"}"),
        framed(b'{"op": "have"}')[:-1],
    ],
    ids=lambda data: data[:12].hex(),
)
def test_what_is_none_ends_the_connection(data: bytes) -> None:
    with pytest.raises(ConnectionError):
        heard(data)
