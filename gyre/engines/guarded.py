"""A process with everything that it starts, under a guard: started, watched and ended in one way.

Invariants:
- *nobody is left behind*: the guard (`gyre.engines.process_guard`) ends the process and whatever it started, also in
  sessions of their own, when it is to end, and when this process dies;
- *nobody else is hit*: the guard is reaped last. Until then nothing else can have its number, or that of its group.

This module must not know what the process does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from gyre.engines import process_guard

END_S = 10.0
"""Time for the guard to end them all; then it is killed with its group."""

_LOOK_S = 0.005
"""How often to see whether the guard has exited: Python waits for no process without reaping it."""


class Guarded:
    def __init__(self, command: Sequence[str], **options: Any) -> None:
        """`options` are subprocess.Popen's. Its standard input is the guard's sign that this process lives."""
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", process_guard.__file__, "0", *command],
            stdin=subprocess.PIPE,
            start_new_session=True,
            **options,
        )

    def has_ended(self) -> bool:
        """Whether they are gone: the guard ends last."""
        if self._guard.returncode is not None:  # reaped by whoever polled it
            return True
        return os.waitid(os.P_PID, self._guard.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, within_s: float) -> bool:
        """Wait until they are gone, for so long at most. Returns whether they are."""
        until = time.monotonic() + within_s
        while not (ended := self.has_ended()) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return ended

    def end(self) -> int:
        """End them all, those that are left. Returns the exit status of the process, negative for a signal."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self.wait(END_S)
        if self._guard.returncode is None:  # whoever killed the guard left the others of its group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._guard.pid, signal.SIGKILL)
        return self._guard.wait()
