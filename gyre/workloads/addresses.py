"""A machine's own address, as Ray or the kernel says it, and ports of it that are held until somebody listens there.

A host's name is asked for nothing: on many machines it resolves to loopback, or to nothing at all.

Invariants:
- *said, not guessed*: an address comes from Ray, or from the kernel's route to a known peer;
- *held*: a reserved port is bound from `reserve` on, so that no other gang of this machine gets it.

This module must not import Ray or torch.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
import threading
from typing import Any

import psutil

RENDEZVOUS_PORTS = range(20_000, 32_768)
"""Ports above those of Ray's workers, and below those that Linux gives to outgoing connections."""

PORT_TRIES = 64

_held: dict[tuple[str, int], socket.socket] = {}
_holding = threading.Lock()


def bare(host: str) -> str:
    """A host without the brackets that an IPv6 address has in a URL."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def url_host(host: str) -> str:
    """A host as it stands before a port: an IPv6 address in brackets."""
    return f"[{bare(host)}]" if ":" in host else host


def family_of(host: str) -> socket.AddressFamily:
    """AF_INET6 for an IPv6 address, AF_INET for everything else."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None if no interface of this machine has it."""
    wanted = _parsed(address)
    if wanted is None:
        return None
    zone = bare(address).partition("%")[2]
    loopback: str | None = None
    by_interface: dict[str, list[Any]] = psutil.net_if_addrs()
    for name, entries in by_interface.items():
        for entry in entries:
            own = _parsed(entry.address)
            if own is None:
                continue
            if own == wanted and zone in ("", name):
                return name
            if own.is_loopback and loopback is None:
                loopback = name
    return loopback if wanted.is_loopback else None  # all of 127.0.0.0/8 is here, whatever it is called


def is_own(address: str) -> bool:
    """Whether an interface of this machine has this address."""
    return interface_of(address) is not None


def own_address(known: str, peer: str) -> str:
    """This machine's address for its peers: `known` if an interface has it; else the one that the kernel takes towards
    `peer`, for behind an address translation nobody can listen at the address that others dial. Raises OSError where
    there is no way to `peer`."""
    if known and is_own(known):
        return bare(known)
    if is_own(peer):
        return bare(peer)
    return address_towards(peer)


def address_towards(peer: str) -> str:
    """The address that the kernel takes as the sender's towards `peer`. Nothing is sent. Raises OSError."""
    found = socket.getaddrinfo(bare(peer), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[4])
        return str(probe.getsockname()[0])


def network_environment(address: str) -> dict[str, str]:
    """What makes Gloo and NCCL of this process use `address`, for a vertex that makes its own process groups: names
    of interfaces, for they take no address. Empty if no interface has it."""
    interface = interface_of(address)
    if interface is None:
        return {}
    family = "AF_INET6" if family_of(address) is socket.AF_INET6 else "AF_INET"
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",  # else each interface whose name begins so
        "NCCL_SOCKET_FAMILY": family,
    }


def reserve(host: str) -> int:
    """Bind a port of `host` and hold it, without listening, until `take`. Whoever listens there with SO_REUSEADDR, as
    torch's stores do, still can. Raises OSError."""
    held = _bound(host)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port = int(held.getsockname()[1])
    with _holding:
        _held[(bare(host), port)] = held
    return port


def take(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` and `port`: the reserved one, or a new one. Raises OSError."""
    with _holding:
        held = _held.pop((bare(host), port), None)
    if held is None:
        if is_own(host):
            return socket.create_server((bare(host), port), family=family_of(host), backlog=1024)
        # Behind an address translation: what others dial is no address of this machine.
        return socket.create_server(("", port), family=family_of(host), backlog=1024)
    held.listen(1024)
    return held


def free_port(host: str) -> int:
    """A port on which nobody listens now, and which no outgoing connection gets before the rendezvous listens there,
    which on a busy machine is many seconds later. `reserve` holds one."""
    with _bound(host) as probe:
        return int(probe.getsockname()[1])


def _bound(host: str) -> socket.socket:
    family = family_of(host)
    where = bare(host) if is_own(host) else ""
    for port in random.sample(RENDEZVOUS_PORTS, PORT_TRIES):
        found = socket.socket(family)
        with contextlib.suppress(OSError):  # in use
            found.bind(_sockaddr(family, where, port))
            return found
        found.close()
    found = socket.socket(family)
    try:
        found.bind(_sockaddr(family, where, 0))
    except OSError:
        found.close()
        raise
    return found


def _sockaddr(family: socket.AddressFamily, host: str, port: int) -> tuple[object, ...]:
    if not host:
        return ("::" if family is socket.AF_INET6 else "", port)
    return tuple(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4])


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address without its zone; None for a name, and for a hardware address."""
    try:
        return ipaddress.ip_address(bare(address).partition("%")[0])
    except ValueError:
        return None
