"""Ports for tests that run beside others: none is found free here and somebody else's a moment later."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from gyre.workloads.addresses import free_port as port_of


def free_port() -> int:
    """One to listen on, of 127.0.0.1, below those that Linux gives to whoever asks for any: until somebody listens
    there, it is nobody's but by an unlikely draw."""
    return port_of("127.0.0.1")


@contextlib.contextmanager
def nobody_listens() -> Iterator[str]:
    """An address of this machine that refuses every connection for as long as the block lasts."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
