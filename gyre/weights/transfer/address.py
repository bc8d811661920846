"""The address of a source of weights: `host:port`, an IPv6 host in brackets.

Addresses come from other processes and are passed on to third ones, so whoever takes one in checks it here.
"""

from __future__ import annotations

import re

PORT = r"(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
HOST = (
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,32})?\])"
)
ADDRESS = rf"^{HOST}:{PORT}\Z"
"""The regular expression of one."""

_ADDRESS = re.compile(ADDRESS)


def is_address(text: object) -> bool:
    return isinstance(text, str) and _ADDRESS.match(text) is not None


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port. Raises ConnectionAbortedError where it is no address."""
    if not is_address(address):
        raise ConnectionAbortedError(f"{address[:100]!r} is no address of the form host:port")
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
