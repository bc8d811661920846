"""Machines' network: a namespace for each, joined by a bridge on which the head has an address of its own.

Its names are those of the soak's own part of the machine (`tests.soak.isolation`), and go with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

NETWORK = "10.213.0.0/24"
HEAD = "10.213.0.1"
BRIDGE = "gyresoak"

COMMAND_S = 20.0
"""For one command that changes the network."""

GONE_S = 20.0
"""For the processes of a machine to be gone after they were killed."""


class Link:
    """A machine's namespace and its cable."""

    def __init__(self, number: int) -> None:
        self.name = f"gyresoak{number}"
        self.address = f"10.213.0.{number}"
        self._cable = f"gs{number}"
        inside = f"{self._cable}p"
        _ip("netns", "add", self.name)
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", inside)
        _ip("link", "set", inside, "netns", self.name)
        _ip("link", "set", self._cable, "master", BRIDGE)
        _ip("link", "set", self._cable, "up")
        self._inside("addr", "add", f"{self.address}/24", "dev", inside)
        self._inside("link", "set", inside, "up")
        self._inside("link", "set", "lo", "up")

    def _inside(self, *words: str) -> None:
        _ip("-n", self.name, *words)

    def command(self, *words: str) -> list[str]:
        """The command line that runs this on the machine."""
        return ["ip", "netns", "exec", self.name, *words]

    def swallow(self) -> None:
        """From now on nothing arrives, and nobody is told."""
        _ip("link", "set", self._cable, "down")

    def heal(self) -> None:
        _ip("link", "set", self._cable, "up")
        _run("tc", "qdisc", "del", "dev", self._cable, "root", check=False)

    def throttle(self, rate: str = "2mbit") -> None:
        limit = ("tbf", "rate", rate, "burst", "64kbit", "latency", "400ms")
        _run("tc", "qdisc", "add", "dev", self._cable, "root", *limit)

    def reset(self) -> None:
        """End the machine's TCP connections, as a router that lost its table does."""
        for words in (self.command("ss", "-K", "dst", NETWORK), ["ss", "-K", "dst", self.address]):
            _run(*words, check=False)  # those that end meanwhile are an error to it

    def processes(self) -> list[int]:
        return [int(word) for word in _run("ip", "netns", "pids", self.name, check=False).split()]

    def signal_all(self, number: signal.Signals) -> int:
        """Send everybody on the machine a signal. Returns how many there were."""
        found = self.processes()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(found)

    def close(self) -> None:
        """Raises TimeoutError if its processes do not die."""
        deadline = time.monotonic() + GONE_S
        while self.signal_all(signal.SIGKILL):
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {self.processes()} of {self.name} do not die")
            time.sleep(0.02)
        _ip("link", "del", self._cable)
        _ip("netns", "del", self.name)


@contextlib.contextmanager
def bridge() -> Iterator[None]:
    """The network that the machines share. Raises CalledProcessError where it cannot be made, mostly for want of
    root."""
    _ip("link", "add", BRIDGE, "type", "bridge")
    try:
        _ip("addr", "add", f"{HEAD}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        yield
    finally:
        _ip("link", "del", BRIDGE)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str, check: bool = True) -> str:
    """What the command wrote. Raises CalledProcessError, and TimeoutExpired."""
    return subprocess.run(words, capture_output=True, text=True, check=check, timeout=COMMAND_S).stdout
