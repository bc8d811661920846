"""Ends a master that hangs, so that Ray starts it anew.

Nobody above the master watches it. A master whose process dies is restarted by Ray within a second; one that is
alive but stuck (stopped, deadlocked) is not. Its vertices notice, for no watch call comes any more. The guard in each
vertex then ends the process that the last watch call named, if it is on this machine. A guard on another machine can
do nothing, and leaves it to those that can.

Killing a master is always safe: everything that it knows is in the journal. But the next one would be no quicker where
the machine is busy, so a master that its machine does not let run is given more time.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from gyre.workloads.vertex.cpu_activity import cpu_activity
from gyre.workloads.vertex.stacks import describe_process

ACTIVITY_OVER_S = 0.2
"""For so long a silent master is looked at: many turns of a busy machine's scheduler."""

STARVED_SHARE = 0.3
"""CPUs that the threads of a silent master wait for, on average, from which on its machine is to blame; as the master
judges vertices (`gyre.failover.suspicions`)."""

PATIENCE = 3.0
"""Such a master is given so many times as long as another."""

PROCESS_TITLE = "MasterActor"
"""What Ray names the process of a master; a pid that was given to another program meanwhile is not touched."""

Identity = tuple[int, str]
"""Process id and host name of a master, as it says itself in its watch calls."""


class MasterWatchdog:
    """`look` is called now and then while no master is heard. `hung_after_s` is what a living one is granted."""

    def __init__(
        self,
        hung_after_s: float,
        *,
        host: str = "",
        kill: Callable[[int], None] = lambda pid: os.kill(pid, signal.SIGKILL),
        is_master: Callable[[int], bool] | None = None,
        activity: Callable[[int, float], tuple[str, float, float] | None] = cpu_activity,
        describe: Callable[[int], str] = describe_process,
    ) -> None:
        self.hung_after_s = hung_after_s
        self.master: Identity | None = None
        """Who watched last."""
        self._host = host or socket.gethostname()
        self._kill = kill
        self._is_master = is_master or _is_master
        self._activity = activity
        self._describe = describe
        self._ended: Identity | None = None

    def look(self, silent_s: float) -> dict[str, object] | None:
        """`silent_s` since a master was heard. What was found of the master that it ended, or None."""
        master = self.master
        if silent_s < self.hung_after_s or master is None or master == self._ended:
            return None
        pid, host = master
        if host != self._host or not self._is_master(pid):
            return None
        if silent_s < PATIENCE * self.hung_after_s and self._is_starved(pid):
            return None
        evidence = {"pid": pid, "silent_s": round(silent_s, 1), "stack": self._describe(pid)}
        # All vertices of a machine notice at about the same time. The first ends the master and tells what it saw; the
        # others see what is left of it, which must not replace that.
        self._ended = master
        if not self._is_master(pid):
            return None
        print(
            f"the master (pid {pid}) is silent for {silent_s:.0f} s; ending it.", file=sys.stderr, flush=True
        )
        try:
            self._kill(pid)
        except ProcessLookupError:
            return None
        return evidence

    def _is_starved(self, pid: int) -> bool:
        """Whether the process would go on if its machine let it: it lacks CPUs, or waits for a disk."""
        seen = self._activity(pid, ACTIVITY_OVER_S)
        if seen is None:
            return False
        state, _, waited = seen
        return state == "D" or (state in "RS" and waited >= STARVED_SHARE)


def _is_master(pid: int) -> bool:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return PROCESS_TITLE in title
