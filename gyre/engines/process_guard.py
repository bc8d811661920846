"""A small process between an agent and its engine, so that no engine outlives its agent.

    python process_guard.py GRACE_S COMMAND [ARGUMENT ...]

It runs COMMAND and ends with it: with the same exit status, or by the same signal. Its standard input is a pipe that
only the agent holds. It stops the engine, and every process that the engine started, when that pipe closes, when the
agent is gone, or on SIGTERM; SIGTERM first, SIGKILL to whatever is left after GRACE_S.
On SIGUSR1 it kills them at once.

Invariants:
- *no segment is left*: Python's resource trackers are ended last, when they have removed what the engine's processes
  had in `/dev/shm`; then the guard removes what it saw these processes map there, unless it is older than the guard,
  in a folder, or mapped by somebody else. (SGLang ends by SIGKILL, and says itself that it leaves 25 MB a time.)
- *nothing is left*: on Linux, processes that the engine's own processes left behind become the guard's children
  (PR_SET_CHILD_SUBREAPER), also those in sessions of their own; the guard ends after all of them;
- *the guard's death is the engine's*: the engine's first process is killed with the guard (PR_SET_PDEATHSIG). The
  guard leads the process group, so that whoever killed it can kill the rest by the group.

It runs by its path, without site-packages (`python -I -S`), and imports of Gyre who processes are, alone: it starts in
some 20 ms and takes little memory beside engines that are large.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING or __package__:
    from gyre.process_identity import ProcessIdentity, processes
else:
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from process_identity import ProcessIdentity, processes

    sys.path.pop()

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 1.0
"""How often to see that the agent lives, for when somebody else holds its end of the pipe too."""
_SEGMENTS_S = 5.0
"""How often to look what it maps: some ten milliseconds for a large engine, which has thousands of mappings."""
_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
_SHARED = "/dev/shm/"
_TRACKERS_S = 3.0
"""Time that Python's resource trackers get to clean up after the others; an idle machine needs some milliseconds."""


def main(grace_s: float, command: list[str]) -> NoReturn:
    agent = os.getppid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    os.set_blocking(read_end, False)
    for number in _HEARD:
        signal.signal(number, lambda *_: None)  # only to wake `select`, which reads the number from the pipe
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    others, segments, look_at = _segments(), set[str](), time.monotonic() + _LOOK_S
    engine = _start(command)
    status, stopping = None, False
    while status is None and not stopping:
        ready, _, _ = select.select([0, read_end], [], [], _LOOK_S)
        if time.monotonic() > look_at:  # once it is dead there is nothing to see
            look_at = time.monotonic() + _SEGMENTS_S
            segments |= _mapped([process.pid for process in _descendants()])
        numbers = os.read(read_end, 4096) if read_end in ready else b""
        asked = any(number != signal.SIGCHLD for number in numbers)
        left_alone = os.getppid() != agent or (0 in ready and not os.read(0, 4096))
        stopping = asked or left_alone
        if signal.SIGUSR1 in numbers:
            grace_s = 0.0
        status = _reap(engine)
    segments |= _mapped([process.pid for process in _descendants()])
    if status is None and grace_s:
        os.kill(engine, signal.SIGTERM)
        status = _reap_within(engine, grace_s)
    status = _end_all(engine, status)
    _remove(segments - others)
    _end_like(status)


def _start(command: list[str]) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for number in _HEARD:
            signal.signal(number, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _reap(engine: int) -> int | None:
    """Collect whoever ended; the engine's wait status if it was among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == engine:
            status = ended


def _reap_within(engine: int, seconds: float) -> int | None:
    """The engine's wait status; None if it is still there after so long."""
    until = time.monotonic() + seconds
    while (status := _reap(engine)) is None and time.monotonic() < until:
        time.sleep(0.02)
    return status


def _end_all(engine: int, status: int | None) -> int:
    """Kill every descendant and collect them; the engine's wait status."""
    spare_until = time.monotonic() + _TRACKERS_S
    while True:
        spare = time.monotonic() < spare_until
        for process in _descendants():
            if not (spare and _is_tracker(process)):
                process.signal(signal.SIGKILL)
        ended = _reap(engine)
        status = ended if status is None else status
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return status if status is not None else signal.SIGKILL
        time.sleep(0.01)


def _is_tracker(process: ProcessIdentity) -> bool:
    """Whether it is Python's own cleaner of shared memory and semaphores, which ends when all others have."""
    try:
        with open(f"/proc/{process.pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def _mapped(pids: list[int]) -> set[str]:
    """The files that lie in `/dev/shm` itself and that these processes have in their memory."""
    found = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as file:
                paths = {line.split(maxsplit=5)[-1].strip() for line in file if f" {_SHARED}" in line}
        except OSError:
            continue
        found |= {path for path in paths if "/" not in path.removeprefix(_SHARED) and "(deleted)" not in path}
    return found


def _segments() -> set[str]:
    try:
        return {_SHARED + name for name in os.listdir(_SHARED)}
    except OSError:
        return set()


def _remove(segments: set[str]) -> None:
    segments &= _segments()
    if segments:
        segments -= _mapped([int(entry) for entry in os.listdir("/proc") if entry.isdigit()])
    for path in segments:
        with contextlib.suppress(OSError):  # somebody else removed it, or it is somebody else's
            os.unlink(path)


def _descendants() -> list[ProcessIdentity]:
    """Linux: by /proc. Elsewhere the guard knows only its process group, and ends that with itself."""
    parents, found, below = processes(), [], {os.getpid()}
    while more := [process for process, parent in parents.items() if parent in below]:
        found += more
        below = {process.pid for process in more}
    return found


def _end_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file, the engine's, is enough
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
