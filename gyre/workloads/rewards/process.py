"""One process of the reward pool, with everything that it starts.

Invariants:
- *nobody is left behind*: the process is guarded (`gyre.engines.guarded`), and gone with every process that it started
  when the pool drops it, closes or dies;
- *nobody waits for it*: what is sent and what comes does not block, whatever the process does.

This module must not know of groups, samples or tokens.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import sys
from typing import Any

from gyre.engines.guarded import END_S, Guarded
from gyre.workloads.rewards.frames import Incoming, packed


class RewardProcess:
    """`selector` tells when it has answered: `key.data` is the process. `deadline` is the pool's to set."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        worker = f"from gyre.workloads.rewards.worker import main; main({requests}, {answers})"
        try:
            self._process = Guarded(
                [sys.executable, "-c", worker],
                stdout=2,  # the user's prints
                pass_fds=(requests, answers),
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
        by_itself = self._process.has_ended()
        returncode = self._process.end()
        for fd in (self._requests, self._answers):
            os.close(fd)
        return _ending(returncode) if by_itself else ""

    def ended(self) -> str:
        """How it ended, after its answers have ended. It and everything that it started is gone."""
        self._process.wait(END_S)
        return self.end() or "closed the way to the pool"


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with status {returncode}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"was ended by signal {-returncode}"
