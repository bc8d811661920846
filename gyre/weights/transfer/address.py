"""The address of a source of weights: `host:port`, an IPv6 host in brackets.

A host is an IPv4 address, an IPv6 address (link-local ones with a zone), or a name of the DNS: labels of 1 to 63
letters, digits, hyphens and underscores, together at most 253. A name whose last label is a number is none: resolvers
read `2130706433`, `0x7f.1` and `127.1` as addresses.

Addresses come from other processes and are passed on to third ones, so whoever takes one in checks it here.

Invariants:
- *dialled without surprise*: what is an address here raises OSError or nothing where it is resolved and dialled;
- *a peer speaks for itself*: `may_name` says whether a peer's word for an address is believed.

This module must not know who dials, or what is asked over the connection.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple

MOST_NAME, MOST_ZONE = 253, 32

_PORT = r"(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"


def _before(most: int) -> str:
    """Up to `most` groups of an IPv6 address, before its `::`."""
    return f"(?:(?:{_H16}:){{0,{most - 1}}}{_H16})?"


_IPV6 = "|".join(
    (
        f"(?:{_H16}:){{6}}{_LS32}",
        f"::(?:{_H16}:){{5}}{_LS32}",
        *(f"{_before(5 - after)}::(?:{_H16}:){{{after}}}{_LS32}" for after in (4, 3, 2, 1, 0)),
        f"{_before(6)}::{_H16}",
        f"{_before(7)}::",
    )
)
"""RFC 3986, section 3.2.2."""

_ZONE = rf"%[A-Za-z0-9][A-Za-z0-9._-]{{0,{MOST_ZONE - 1}}}"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_NUMBER = r"(?:[0-9]+|0[xX][0-9A-Fa-f]*)"
_MORE = "[A-Za-z0-9._-]"
_NAME = (
    rf"(?={_MORE}{{1,{MOST_NAME}}}(?!{_MORE}))(?!(?:{_MORE}*\.)?{_NUMBER}(?!{_MORE})){_LABEL}(?:\.{_LABEL})*"
)

HOST = rf"(?:{_IPV4}|\[(?:{_IPV6}|[fF][eE][89aAbB][0-9A-Fa-f]:[0-9A-Fa-f:]{{1,34}}{_ZONE})\]|{_NAME})"
ADDRESS = rf"^{HOST}:{_PORT}\Z"
"""The regular expression of one, for the bounds of frames. Of an IPv6 address with a zone `is_address` sees more."""

_ADDRESS = re.compile(ADDRESS)


class HostPort(NamedTuple):
    """A host, without brackets, and a port. Its text is that of an address."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_address(self.host, self.port)


def is_address(text: object) -> bool:
    return isinstance(text, str) and _ADDRESS.match(text) is not None and _is_zone_right(text)


def bracketed(host: str) -> str:
    """The host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def format_address(host: str, port: int) -> str:
    """`host:port`; `host` with or without brackets. Raises ValueError where that is no address."""
    address = f"{bracketed(host)}:{port}"
    if not is_address(address):
        raise ValueError(f"{host[:100]!r} and {port!r} are no host and port")
    return address


def parse_address(address: str) -> HostPort:
    """Raises ValueError where it is no address."""
    if not is_address(address):
        raise ValueError(f"{str(address)[:100]!r} is no address of the form host:port")
    host, _, port = address.rpartition(":")
    return HostPort(host.strip("[]"), int(port))


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port, for a dial. Raises ConnectionAbortedError where it is no address."""
    try:
        return parse_address(address)
    except ValueError as error:
        raise ConnectionAbortedError(str(error)) from None


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address without its zone, an IPv4 one where it is mapped into IPv6; None for a name."""
    try:
        found = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found


def may_name(address: str, caller: str, networks: Sequence[str] = ()) -> bool:
    """Whether a peer that dialled from the host `caller` may say that it serves at `address`: that is the host which it
    dialled from, or one in `networks` (CIDR notation), which the job names."""
    if not is_address(address):
        return False
    named, own = ip_of(parse_address(address).host), ip_of(caller)
    if named is None:  # a name means what its owner's server answers today
        return False
    if named == own:
        return True
    return any(named in ipaddress.ip_network(network, strict=False) for network in networks)


def may_pass_on(address: str, teller: str) -> bool:
    """Whether `address`, where others serve as a peer at the host `teller` says, may be dialled: an IP address that
    means the same machine here as there. A peer on the own machine may name others on it."""
    if not is_address(address):
        return False
    named, by = ip_of(parse_address(address).host), ip_of(teller)
    if named is None:
        return False
    if named.is_loopback:
        return by is not None and by.is_loopback
    if named.is_link_local:
        return by is not None and by.is_link_local
    return not (named.is_multicast or named.is_unspecified)


def _is_zone_right(text: str) -> bool:
    if "%" not in text:
        return True
    try:
        ipaddress.IPv6Address(text.partition("%")[0].lstrip("["))
    except ValueError:
        return False
    return True
