"""Who a process is: its pid alone names another process once that one has ended.

A pid is given again. Together with the moment at which its process started it is not, and together with the boot of
the machine, and with its pid namespace, the text of an identity can be kept in a file and compared after years.

Invariants:
- *compared first*: no signal goes to a pid before its process is seen to be the one that was meant; the signal goes by
  a pidfd that was open meanwhile, so nothing comes in between;
- *unknown is not touched*: without `/proc` there are no identities, and nobody is signalled.

Scripts that run by their path without site-packages load this file too: it imports the standard library alone, and
little of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NamedTuple


class ProcessIdentity(NamedTuple):
    """One process. `started`: in clock ticks since the machine's boot. `boot`: that boot's id, and the pid namespace
    that the pid is of."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """That of the process which has the pid now; None if there is none, or the system does not tell."""
        found = _stat(pid)
        return None if found is None else cls(pid, found.started, _boot())

    @classmethod
    def own(cls) -> ProcessIdentity:
        return cls.of(os.getpid()) or cls(os.getpid(), 0, "")

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """From its text form; None for any other text."""
        pid, _, rest = text.strip().partition("-")
        started, _, boot = rest.partition("-")
        if not (pid.isascii() and pid.isdigit() and started.isascii() and started.isdigit() and boot):
            return None
        return cls(int(pid), int(started), boot)

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}-{self.boot}"

    def is_here(self) -> bool:
        """Whether it is, or was, a process of this boot of this machine: only then is something known of it."""
        return bool(self.boot) and self.boot == _boot()

    def is_alive(self) -> bool:
        """Whether it runs on this machine. A process that has ended and was not yet waited for does not."""
        found = _stat(self.pid) if self.is_here() else None
        return found is not None and found.started == self.started and found.state not in "ZX"

    def signal(self, number: int) -> bool:
        """Send the process a signal; False if it has ended. Raises PermissionError if it is another user's."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except (OSError, AttributeError):  # a kernel without pidfds: the comparison alone
            descriptor = -1
        try:
            if not self.is_alive():
                return False
            if descriptor < 0:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return True


class _Stat(NamedTuple):
    state: str
    parent: int
    group: int
    session: int
    started: int


def signal_group(leader: ProcessIdentity, number: int) -> None:
    """Signal the processes of the group that `leader` led, whether it lives or not.

    The kernel gives nobody the pid of a leader while its group has members, so a process that has its pid and is
    another shows that the group is gone.
    """
    for member in _members(leader, lambda found: found.group):
        with contextlib.suppress(PermissionError):  # it has become another user's
            member.signal(number)


def session_members(leader: ProcessIdentity) -> list[ProcessIdentity]:
    """The processes of the session that `leader` began, whether it lives or not."""
    return _members(leader, lambda found: found.session)


def processes() -> dict[ProcessIdentity, int]:
    """All processes of this machine that run, with the pids of their parents."""
    boot = _boot()
    return {
        ProcessIdentity(pid, found.started, boot): found.parent
        for pid, found in _stats().items()
        if found.state not in "ZX"
    }


def _members(leader: ProcessIdentity, belongs: object) -> list[ProcessIdentity]:
    assert callable(belongs)
    found = _stats()
    namesake = found.get(leader.pid)
    if not leader.is_here() or (namesake is not None and namesake.started != leader.started):
        return []
    return [
        ProcessIdentity(pid, stat.started, leader.boot)
        for pid, stat in found.items()
        if belongs(stat) == leader.pid and stat.started >= leader.started and stat.state not in "ZX"
    ]


def _stats() -> dict[int, _Stat]:
    try:
        entries = os.listdir("/proc")
    except OSError:
        return {}
    stats = {int(entry): _stat(int(entry)) for entry in entries if entry.isdigit()}
    return {pid: stat for pid, stat in stats.items() if stat is not None}


def _stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
        return _Stat(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


_boots: dict[int, str] = {}
"""By the process that asked: a fork may be in another pid namespace."""


def _boot() -> str:
    pid = os.getpid()
    if pid not in _boots:
        _boots.clear()
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
            _boots[pid] = f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
        except OSError:
            _boots[pid] = ""
    return _boots[pid]
