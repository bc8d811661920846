"""One process of the reward pool, with everything that it starts.

Invariants:
- *nobody is left behind*: the process runs under a guard (`gyre.engines.process_guard`), which ends it and every
  process that it started, also those in sessions of their own, when the pool drops it, closes or dies;
- *nobody waits for it*: what is sent and what comes does not block, whatever the process does.

This module must not know of groups, samples or tokens.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gyre.engines import process_guard
from gyre.workloads.rewards.frames import Incoming, packed

_GUARD = Path(process_guard.__file__)
_END_S = 10.0
"""Time for the guard to end them all; then it is killed with its group."""
_LOOK_S = 0.005
"""How often to see whether the guard has exited: Python waits for no process without reaping it."""


class RewardProcess:
    """`selector` tells when it has answered: `key.data` is the process. `deadline` is the pool's to set."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        worker = f"from gyre.workloads.rewards.worker import main; main({requests}, {answers})"
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), "0", sys.executable, "-c", worker],
                stdin=subprocess.PIPE,  # the guard's sign that the pool lives
                stdout=2,  # the user's prints
                pass_fds=(requests, answers),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        finally:
            os.close(requests)
            os.close(answers)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._answers, False)
        self._incoming = Incoming(self._answers)
        self._outgoing = memoryview(b"")
        self._selector = selector
        self._ended = False
        selector.register(self._answers, selectors.EVENT_READ, self)
        self.deadline = math.inf
        self.pid: int | None = None
        """Of the process itself, once it is ready."""
        self.work: Any = None
        """What it is asked for."""

    @property
    def ready(self) -> bool:
        return self.pid is not None

    def ask(self, content: Any) -> None:
        """Send a request; `flush` sends what the process does not take at once."""
        self._outgoing = memoryview(packed(content))
        self.flush()

    def flush(self) -> None:
        waited = bool(self._outgoing) and self._requests in self._selector.get_map()
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._requests, self._outgoing) :]
        except BlockingIOError:
            if not waited:
                self._selector.register(self._requests, selectors.EVENT_WRITE, self)
            return
        except BrokenPipeError:  # it has died: its answers end
            self._outgoing = memoryview(b"")
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._requests)

    def receive(self) -> Any | None:
        """Its answer, or None if that is not whole yet. Raises EOFError if it has ended, StrangeFrame."""
        return self._incoming.read()

    def end(self) -> str:
        """End it and everything that it started; returns how it had ended by itself, "" if it had not."""
        if self._ended:
            return ""
        self._ended = True
        for fd in (self._requests, self._answers):
            with contextlib.suppress(KeyError, ValueError):  # the selector may be closed
                self._selector.unregister(fd)
        by_itself = self._has_exited()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._await_exit()
        # Before the guard is reaped: until then nothing else can have its number, or that of its group. Whoever killed
        # the guard left the others of the group.
        if self._guard.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._guard.pid, signal.SIGKILL)
        returncode = self._guard.wait()
        for fd in (self._requests, self._answers):
            os.close(fd)
        return _ending(returncode) if by_itself else ""

    def ended(self) -> str:
        """How it ended, after its answers have ended. It and everything that it started is gone."""
        self._await_exit()  # the guard ends last
        return self.end() or "closed the way to the pool"

    def _has_exited(self) -> bool:
        if self._guard.returncode is not None:  # reaped by whoever polled it
            return True
        return os.waitid(os.P_PID, self._guard.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _await_exit(self) -> None:
        """Wait for the guard, for `_END_S` at most, and leave it to be reaped."""
        until = time.monotonic() + _END_S
        while not self._has_exited() and time.monotonic() < until:
            time.sleep(_LOOK_S)


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with status {returncode}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"was ended by signal {-returncode}"
