"""Where a job's rollout manager listens: a file in the job's directory, which whoever dials reads before each dial.

Invariants:
- *whole or not at all*: a reader finds the old file or the new one;
- *for nobody else's eyes*: it holds the job's secret, and only its owner may read it.

This module must not import the manager or an agent: a trainer's rank that only looks for the address would load both.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gyre.rollouts.protocol.credentials import pinned_context, weights_key

ENDPOINT_FILE = "rollouts.json"


class Endpoint(Protocol):
    """Where the manager is, asked before each dial: it may have moved."""

    def where(self) -> tuple[str, str] | None:
        """URL and token; None while unknown."""

    def trust(self) -> ssl.SSLContext | None:
        """What to trust of an https URL; None for the machine's own authorities."""


@dataclass(frozen=True, slots=True)
class FixedEndpoint:
    """A manager that stays where it is."""

    url: str
    token: str
    context: ssl.SSLContext | None = None

    def where(self) -> tuple[str, str]:
        return self.url, self.token

    def trust(self) -> ssl.SSLContext | None:
        return self.context


@dataclass(frozen=True, slots=True)
class JobEndpoint:
    """What the manager has written into the job's directory."""

    directory: Path
    joins: bool = False
    """With the default join token, and not with the job's secret."""
    context: ssl.SSLContext | None = None
    """Trusted instead of the certificate that lies there."""

    def where(self) -> tuple[str, str] | None:
        return read_join_endpoint(self.directory) if self.joins else read_endpoint(self.directory)

    def trust(self) -> ssl.SSLContext | None:
        return self.context or read_trust(self.directory)


def read_endpoint(directory: Path) -> tuple[str, str] | None:
    """The manager's URL and the job's secret, or None where it has not started yet."""
    told = _read(directory)
    if told is None:
        return None
    return told["url"], told.get("secret") or told["token"]


def read_join_endpoint(directory: Path) -> tuple[str, str] | None:
    """The manager's URL and the default join token, or None where it has not started yet."""
    told = _read(directory)
    return None if told is None else (told["url"], told["token"])


def read_weights_endpoint(directory: Path) -> tuple[str, str] | None:
    """The manager's URL and the weights key, or None where it has not started yet."""
    where = read_endpoint(directory)
    return None if where is None else (where[0], weights_key(where[1]))


def _read(directory: Path) -> dict[str, str] | None:
    told = _content(directory)
    secret = told.get("secret") or ""
    found = {"url": told.get("url"), "token": told.get("token"), "secret": secret}
    # What is not printable goes into no header and no URL.
    if not all(isinstance(text, str) and text.isprintable() for text in found.values()):
        return None
    return found  # type: ignore[return-value]


def _content(directory: Path) -> dict[str, Any]:
    """What the file has; nothing where it is not there, or damaged."""
    try:
        told = json.loads((directory / ENDPOINT_FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def read_trust(directory: Path) -> ssl.SSLContext | None:
    """What to trust of a manager that speaks TLS: the very certificate that it wrote there. None without one."""
    certificate = _content(directory).get("certificate")
    if not certificate:
        return None
    try:
        return pinned_context(certificate)
    except (ssl.SSLError, TypeError, ValueError):  # it is none
        return None


def write_endpoint(directory: Path, told: dict[str, Any]) -> None:
    """`told` has `url`, `secret` (the job's own), `token` (the default join token), and with TLS `certificate` (PEM);
    what else it has is for people to read."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ENDPOINT_FILE
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(told, file)
    partial.rename(path)
