"""Ends a master that hangs, so that Ray starts it anew.

Nobody above the master watches it. A master whose process dies is restarted by Ray within a second; one that is
alive but stuck (stopped, deadlocked) is not. Its vertices notice, for no watch call comes any more. The guard in each
vertex then ends the process that the last watch call named, if it is on this machine. A guard on another machine can
do nothing, and leaves it to those that can.

Killing a master is always safe: everything that it knows is in the journal. But the next one would be no quicker where
the machine is busy, so a master that its machine does not let run is given more time.
"""

from __future__ import annotations

import signal
import sys

from gyre.process_activity import Activity, activity_of
from gyre.process_identity import ProcessIdentity
from gyre.workloads.vertex.observed_process import describe_process

ACTIVITY_OVER_S = 0.2
"""For so long a silent master is looked at: many turns of a busy machine's scheduler."""

PATIENCE = 3.0
"""Such a master is given so many times as long as another."""


class MasterProcesses:
    """The processes of masters on this machine."""

    def is_alive(self, master: ProcessIdentity) -> bool:
        return master.is_alive()

    def activity(self, pid: int) -> Activity | None:
        return activity_of(pid, ACTIVITY_OVER_S)

    def describe(self, pid: int) -> str:
        return describe_process(pid)

    def end(self, master: ProcessIdentity) -> bool:
        """Whether it was there."""
        return master.signal(signal.SIGKILL)


class MasterWatchdog:
    """`look` is called now and then while no master is heard. `hung_after_s` is what a living one is granted."""

    def __init__(self, hung_after_s: float, processes: MasterProcesses | None = None) -> None:
        self.hung_after_s = hung_after_s
        self.master: ProcessIdentity | None = None
        """Who watched last, as it says itself in its watch calls. On another machine it is never alive here."""
        self._processes = processes or MasterProcesses()
        self._ended: ProcessIdentity | None = None

    def look(self, silent_s: float) -> dict[str, object] | None:
        """`silent_s` since a master was heard. What was found of the master that it ended, or None."""
        master = self.master
        if silent_s < self.hung_after_s or master is None or master == self._ended:
            return None
        if not self._processes.is_alive(master):
            return None
        pid = master.pid
        if silent_s < PATIENCE * self.hung_after_s and self._is_starved(pid):
            return None
        evidence = {"pid": pid, "silent_s": round(silent_s, 1), "stack": self._processes.describe(pid)}
        # All vertices of a machine notice at about the same time. The first ends the master and tells what it saw; the
        # others see what is left of it, which must not replace that.
        self._ended = master
        if not self._processes.is_alive(master):
            return None
        print(
            f"the master (pid {pid}) is silent for {silent_s:.0f} s; ending it.", file=sys.stderr, flush=True
        )
        if not self._processes.end(master):
            return None
        return evidence

    def _is_starved(self, pid: int) -> bool:
        seen = self._processes.activity(pid)
        return seen is not None and seen.is_starved
