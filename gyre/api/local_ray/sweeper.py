"""The end of what a killed driver leaves: the processes of its own Ray cluster, their weights in shared memory, and
the session's folder.

    python sweeper.py FOLDER DRIVER

A process of this program is started before the driver starts Ray in FOLDER, in a session of its own. It sleeps until
the driver has ended, and sweeps unless the driver ended in order, which is when the record below is gone. Where it was
killed too, the next command that starts a cluster in FOLDER sweeps (`sweep_left`).

    <FOLDER>/driver-<identity of the driver>     the record: a line for each session of processes that the driver began

The processes of a driver are those with its mark in their environment, those of the recorded sessions, those whose
command line names the driver's Ray session, and what these started.

Invariants:
- *only the dead's*: a driver that lives is not swept, and nothing of a cluster that the driver had only joined: such a
  driver has neither record nor mark;
- *only one's own*: processes and files of another user stay;
- *what is held stays*: a folder in shared memory that a living process has locked is not removed.

It runs by its path without site-packages, and imports nothing of weight: it takes some 10 MB for as long as the driver
lives.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from gyre.process_identity import ProcessIdentity, processes, session_members
else:
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from process_identity import ProcessIdentity, processes, session_members

    sys.path.pop()

MARK = "GYRE_DRIVER"
"""The environment variable of the cluster's processes that holds the driver's identity."""

OWNER_FILE = ".driver"
"""In a folder of weights: the driver of the cluster that its owner belongs to."""

RECORD = "driver-"

_SHARED = "/dev/shm"
_WEIGHTS = "gyre-weights-"

_BY_ITSELF_S = 1.0
"""Ray's servers end with the driver, and most of the others with these; an engine's guard removes its segments."""
_GUARDS_S = 4.0
"""From when on the guards of engines and Python's resource trackers are ended too: they clean up after the others."""
_END_S = 8.0
"""A process that lives longer hangs in the kernel."""
_LOOK_S = 0.1
_POLL_S = 0.5
"""How often to look for the driver on a kernel without pidfds."""


def record_path(folder: str, driver: ProcessIdentity) -> str:
    return os.path.join(folder, f"{RECORD}{driver}")


def note(folder: str, driver: ProcessIdentity, leaders: list[ProcessIdentity]) -> None:
    """Add sessions of processes to the driver's record; made if it is not there."""
    descriptor = os.open(
        record_path(folder, driver), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600
    )
    try:
        os.write(descriptor, "".join(f"{leader}\n" for leader in leaders).encode())
    finally:
        os.close(descriptor)


def forget(folder: str, driver: ProcessIdentity) -> None:
    """Remove the driver's record: it ends in order, and leaves nothing to sweep."""
    with contextlib.suppress(OSError):
        os.unlink(record_path(folder, driver))


def sweep_left(folder: str) -> list[ProcessIdentity]:
    """Sweep what drivers have left that were killed with their sweepers; returns those drivers."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    drivers = [ProcessIdentity.parse(name.removeprefix(RECORD)) for name in names if name.startswith(RECORD)]
    left = []
    for driver in drivers:
        if driver is None or driver.is_alive() or not _is_own(record_path(folder, driver)):
            continue
        if driver.boot.partition(".")[0] == ProcessIdentity.own().boot.partition(".")[0] != "" and (
            not driver.is_here()
        ):
            continue  # of another pid namespace of this machine: it may live
        left.append(driver)
        sweep(folder, driver)
    return left


def sweep(folder: str, driver: ProcessIdentity) -> None:
    """End the processes of a driver that has ended, and remove their files. Takes `_END_S` at most."""
    leaders = _recorded(folder, driver)
    names = os.path.join(folder, "session_").encode(), f"_{driver.pid}".encode()
    began = time.monotonic()
    while True:
        passed = time.monotonic() - began
        left = _processes_of(driver, leaders, names)
        if not left or passed > _END_S:
            break
        for process, how in left.items():
            with contextlib.suppress(OSError):
                if passed > _GUARDS_S or (passed > _BY_ITSELF_S and not how):
                    process.signal(signal.SIGKILL)
                elif passed > _BY_ITSELF_S and how == "guard":
                    process.signal(signal.SIGUSR1)  # end all of the engine, now
        time.sleep(_LOOK_S)
    # A process is seen to have ended a moment before the kernel has let go of its locks.
    while not _remove_weights(driver) and time.monotonic() - began < _END_S:
        time.sleep(_LOOK_S)
    _remove_sessions(folder, driver)
    forget(folder, driver)


def _recorded(folder: str, driver: ProcessIdentity) -> list[ProcessIdentity]:
    try:
        with open(record_path(folder, driver)) as file:
            found = [ProcessIdentity.parse(line) for line in file]
    except OSError:
        return []
    return [leader for leader in found if leader is not None]


def _processes_of(
    driver: ProcessIdentity, leaders: list[ProcessIdentity], names: tuple[bytes, bytes]
) -> dict[ProcessIdentity, str]:
    """The processes that are left, with `guard` or `tracker` for those that clean up after others."""
    if not driver.is_here():
        return {}  # of before the machine's start
    mine = os.getpid()
    mark = f"{MARK}={driver}".encode()
    parents = {process: parent for process, parent in processes().items() if process.pid != mine}
    own = {process for process in parents if _is_own(f"/proc/{process.pid}")}
    found = {member for leader in leaders for member in session_members(leader)} & own
    commands = {process: _read(process, "cmdline").split(b"\0") for process in own}
    for process in own - found:
        # A process that is older than the driver cannot be its child.
        if process.started < driver.started:
            continue
        if mark in _read(process, "environ").split(b"\0") or _names(commands[process], names):
            found.add(process)
    by_pid = {process.pid for process in found}
    while more := {p for p in own - found if parents[p] in by_pid and p.started >= driver.started}:
        found |= more
        by_pid |= {process.pid for process in more}
    return {process: _cleans_up(commands[process]) for process in found}


def _names(command: list[bytes], names: tuple[bytes, bytes]) -> bool:
    """Whether one of its arguments is, or is within, the driver's Ray session."""
    begin, end = names
    for part in command:
        at = part.find(begin)
        if at >= 0 and part[at + len(begin) :].partition(b"/")[0].endswith(end):
            return True
    return False


def _cleans_up(command: list[bytes]) -> str:
    if any(part.endswith(b"/gyre/engines/process_guard.py") for part in command):
        return "guard"
    return "tracker" if any(b"multiprocessing.resource_tracker" in part for part in command) else ""


def _read(process: ProcessIdentity, name: str) -> bytes:
    try:
        with open(f"/proc/{process.pid}/{name}", "rb") as file:
            return file.read()
    except OSError:  # it has ended
        return b""


def _remove_weights(driver: ProcessIdentity) -> bool:
    """Whether none of the driver's is left: what is locked stays."""
    import fcntl

    all_gone = True
    for name in _listed(_SHARED):
        if not name.lstrip(".").startswith(_WEIGHTS):
            continue
        path = os.path.join(_SHARED, name)
        try:
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # a link, or gone
            continue
        try:
            if os.fstat(held).st_uid != os.getuid() or _owner_in(held) != str(driver):
                continue
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_tree(path)
        except OSError:  # a living process has it
            all_gone = False
        finally:
            os.close(held)
    return all_gone


def _owner_in(folder: int) -> str:
    try:
        descriptor = os.open(OWNER_FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        return ""
    with open(descriptor) as file:
        return file.read(300).strip()


def _remove_sessions(folder: str, driver: ProcessIdentity) -> None:
    """Ray's sessions that have the driver's pid in their names and are younger than it: older ones were of another."""
    for name in _listed(folder):
        path = os.path.join(folder, name)
        if name.startswith("session_2") and name.endswith(f"_{driver.pid}") and _is_own(path):
            _remove_tree(path)
    latest = os.path.join(folder, "session_latest")
    if os.path.islink(latest) and not os.path.exists(latest):
        with contextlib.suppress(OSError):
            os.unlink(latest)


def _remove_tree(path: str) -> None:
    import shutil  # only where something is removed: it takes memory

    shutil.rmtree(path, ignore_errors=True)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _is_own(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.getuid()
    except OSError:
        return False


def await_end(process: ProcessIdentity) -> None:
    """Returns when the process has ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except (OSError, AttributeError):
        while process.is_alive():
            time.sleep(_POLL_S)
        return
    try:
        if process.is_alive():  # else the pid is another's
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
    finally:
        os.close(descriptor)


def main(folder: str, driver: ProcessIdentity) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the command, which ends in order
    await_end(driver)
    if os.path.lexists(record_path(folder, driver)):
        sweep(folder, driver)


if __name__ == "__main__":
    _driver = ProcessIdentity.parse(sys.argv[2])
    assert _driver is not None
    main(sys.argv[1], _driver)
