"""Loopback names: they can only mean this machine, so no token is needed and a proxy is never right."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(name: str) -> bool:
    """Whether a host name or address is loopback as written; no name is resolved."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"
