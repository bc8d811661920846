"""Machines joined by a bridge, each a network namespace with a name and a hosts file of its own.

Names carry the pid of whoever made them and its start time, so that the next run removes what a killed one left, and
nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

NAME = re.compile(r"\bgy([0-9a-f]{6})([0-9a-f]{3})[bvpn]")
"""No longer than the 15 characters that an interface's name may have."""
HOSTS = Path("/etc/netns")
ENDS_WITHIN_S = 10.0


class Machine:
    """`hosts` are the lines of its /etc/hosts; its name is `machineN`, and it has two addresses."""

    def __init__(self, run: str, number: int, hosts: str) -> None:
        self.name = f"{run}n{number}"
        self.ipv4, self.ipv6 = f"10.214.0.{number}", f"fd00:6779::{number}"
        self.hostname = f"machine{number}"
        _ip("netns", "add", self.name)
        folder = HOSTS / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(hosts.format(name=self.hostname))
        outside, inside = f"{run}v{number}", f"{run}p{number}"
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
        _ip("link", "set", inside, "netns", self.name, "name", "cable0")
        _ip("link", "set", outside, "master", f"{run}b")
        _ip("link", "set", outside, "up")
        _ip("-n", self.name, "link", "set", "lo", "up")
        # As where containers or a VPN run: an interface that comes first, and leads nowhere.
        _ip("-n", self.name, "link", "add", "docker0", "type", "bridge")
        _ip("-n", self.name, "addr", "add", f"172.17.0.{number}/16", "dev", "docker0")
        _ip("-n", self.name, "link", "set", "docker0", "up")
        # On the cable too there are others, before the machine's own.
        _ip("-n", self.name, "addr", "add", f"192.168.77.{number}/32", "dev", "cable0")
        _ip("-n", self.name, "addr", "add", f"{self.ipv4}/24", "dev", "cable0")
        _ip("-n", self.name, "addr", "add", f"{self.ipv6}/64", "dev", "cable0", "nodad")
        _ip("-n", self.name, "link", "set", "cable0", "up")

    def popen(self, *words: str, **options: object) -> subprocess.Popen[str]:
        """A process on the machine, which has its name and its hosts file."""
        inside = ["unshare", "--uts", "sh", "-c", f'hostname {self.hostname} && exec "$0" "$@"', *words]
        command = ["ip", "netns", "exec", self.name, *inside]
        return subprocess.Popen(command, text=True, **options)  # type: ignore[call-overload, no-any-return]


@contextlib.contextmanager
def machines(count: int, *, hosts: str) -> Iterator[list[Machine]]:
    """So many of them. Raises CalledProcessError where none can be made, mostly for want of root."""
    sweep()
    run = _run_of(os.getpid(), _started(os.getpid()))
    try:
        _ip("link", "add", f"{run}b", "type", "bridge")
        _ip("link", "set", f"{run}b", "up")
        yield [Machine(run, number, hosts) for number in range(1, count + 1)]
    finally:
        _remove(run)


def can_make_machines() -> bool:
    """Whether this process may make namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    return (
        subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False).returncode
        == 0
    )


def sweep() -> None:
    """Remove what runs left whose process is gone."""
    told = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=False).stdout
    told += subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for pid, start in {(int(found[1], 16), found[2]) for found in NAME.finditer(told)}:
        if _started(pid) != start:
            _remove(_run_of(pid, start))


def _run_of(pid: int, start: str) -> str:
    return f"gy{pid:06x}{start}"


def _remove(run: str) -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name in re.findall(rf"^{run}n\d", listed, re.MULTILINE):
        _kill_all(name)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        shutil.rmtree(HOSTS / name, ignore_errors=True)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=False).stdout
    for name in re.findall(rf"\b({run}[bvp]\d?)\b", links):
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)


def _kill_all(namespace: str) -> None:
    until = time.monotonic() + ENDS_WITHIN_S
    while time.monotonic() < until:
        told = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
        if not told.stdout.split():
            return
        for word in told.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(word), signal.SIGKILL)
        time.sleep(0.05)


def _started(pid: int) -> str:
    """Three digits of when a process began; "" if there is none."""
    try:
        return f"{int(psutil.Process(pid).create_time() * 100) % 0x1000:03x}"
    except psutil.NoSuchProcess:
        return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
