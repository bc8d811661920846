"""When a peer counts as gone though its connection stands: its machine vanished, or the network swallows what is sent.

Both ends of a connection send a WebSocket ping when nothing came for `HEARTBEAT_S`, and give the connection up when
nothing comes for half of that again. The operating system gives it up earlier where it has data to send and nobody
acknowledges it.

This module must not know about frames.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

HEARTBEAT_S = 12.0
"""Silence after which a ping is sent. Half of it more is what a peer may take to answer: a process that is garbage
collecting, compiling or short of a core answers late, and is not gone."""

UNACKNOWLEDGED_S = 15.0
"""How long the peer's machine may leave data unacknowledged."""


def watch_acknowledgements(sock: Any, within_s: float = UNACKNOWLEDGED_S) -> None:
    """Have the operating system break a connection when data was not acknowledged for so long.
    Nothing is done where the system has no such option, or the socket is none of TCP."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None and sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, int(within_s * 1000))
