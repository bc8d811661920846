"""Which names can only mean this machine: where a token is not needed, and a proxy never right."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(name: str) -> bool:
    """Whether a host name or address, as written, is loopback; nothing is resolved."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"
