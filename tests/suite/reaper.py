"""`python -m tests.suite.reaper COMMAND…` runs a command, and ends whatever it leaves, wherever that has gone.

Orphans of the command become children of this process (PR_SET_CHILD_SUBREAPER in prctl(2)), so that none is missed:
Ray's servers have sessions of their own, and some write over their environment. It ends with whoever started it, too.
Its exit status is the command's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

LEAVES_WITHIN_S = 5.0
"""For what ends by itself once the command is gone."""
INTERRUPTED_S = 20.0
"""For a command that was interrupted to end what it started: file systems, control groups, folders."""
KILLED_S = 10.0


def main(command: list[str]) -> int:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    process = subprocess.Popen(command, start_new_session=True)
    stopped = False

    def stop(_signal: int, _frame: object) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            signal.alarm(round(INTERRUPTED_S))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, lambda _signal, _frame: process.kill())
    status = _status_of(process.pid)
    signal.alarm(0)
    for words in end_what_is_left():
        print(f"ended what was left: {words}", flush=True)
    return status


def _status_of(pid: int) -> int:
    """Wait until it has ended; 128 and the signal's number if by a signal. Orphans that end meanwhile are reaped."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def end_what_is_left() -> list[str]:
    """Kill this process's descendants that do not end by themselves. Returns their command lines."""
    me, words = psutil.Process(), {}
    begun = time.monotonic()
    while left := _living(me):
        if time.monotonic() - begun > LEAVES_WITHIN_S + KILLED_S:
            break  # the kernel holds them; who reads the log sees which
        if time.monotonic() - begun > LEAVES_WITHIN_S:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    words[process.pid] = " ".join(process.cmdline())[:120] or process.name()
                    process.kill()
        time.sleep(0.05)
    return [f"{pid} {line}" for pid, line in words.items()]


def _living(me: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return me.children(recursive=True)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
