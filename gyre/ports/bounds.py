"""The bounds of a port that speaks HTTP: how long a request may take to come, how large it may be, and how many callers
may be there who have not shown a token."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PortBounds:
    handshake_s: float = 10.0
    """For the TLS handshake: some three round trips, with room for lost packets."""
    head_s: float = 10.0
    """For a request's line and headers, from the connection's or the request's first moment. They fit in a packet or
    two."""
    body_idle_s: float = 10.0
    """Longest silence within a body: lost packets are sent again within a few seconds."""
    body_s: float = 60.0
    """For a whole body, however steadily it comes: the largest one, at 1 KiB/s."""
    write_stall_s: float = 60.0
    """For a peer to take what waits in the server's buffer (some 48 KiB): a page of events needs no more at 1 KiB/s."""
    keep_alive_s: float = 20.0
    """Idle time after which a connection is closed. Clients close theirs first (httpx after 5 s, aiohttp after 15 s):
    what is sent on a connection while its server closes it is lost."""
    head_bytes: int = 64 << 10
    """Largest line and headers: what browsers and proxies send is at most some 16 KiB."""
    body_bytes: int = 64 << 10
    """Largest body where `body_bytes_of` has none for its path: a command is some 200 bytes."""
    body_bytes_of: Mapping[str, int] = field(default_factory=dict)
    """Largest body by path."""
    unproven: int = 512
    """Most connections that have not shown a token; beyond them the oldest of the address with the most is closed."""
    unproven_per_address: int = 256
    """The same for one address. Machines behind one NAT share it, and show their token within milliseconds."""
    reserve_descriptors: int = 128
    """Descriptors that the port leaves to the process (databases, Ray, logs); at most a quarter of the limit."""

    def largest_body(self, path: str) -> int:
        return self.body_bytes_of.get(path, self.body_bytes)


def highest_descriptor(reserve: int) -> int:
    """The highest number of a descriptor that a port may keep. The kernel gives the lowest free number, so a higher one
    says that the process's limit is near."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 30
    return soft - min(reserve, soft // 4)
