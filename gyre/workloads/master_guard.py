"""Ends a master that hangs, so that Ray starts it anew.

Nobody above the master watches it. A master whose process dies is restarted by Ray within a second; one that is
alive but stuck (stopped, deadlocked) is not. Its vertices notice, for no watch call comes any more. The guard in each
vertex then looks up who the master is, and if that is still the same process after a while, and on this machine,
kills it. A guard on another machine can do nothing, and leaves it to those that can.

Killing a master is always safe: everything that it knows is in the journal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from gyre.errors import GyreError
from gyre.store import open_store
from gyre.workloads.inspect_process import describe_process

PROCESS_TITLE = "MasterActor"
"""What Ray names the process of a master; a pid that was given to another program meanwhile is not touched."""


class MasterGuard:
    """`look` is called now and then while no master is heard. `hung_after_s` is what a living one is granted."""

    def __init__(
        self,
        *,
        job_id: str,
        store_url: str,
        hung_after_s: float,
        kill: Callable[[int], None] = lambda pid: os.kill(pid, signal.SIGKILL),
    ) -> None:
        self.hung_after_s = hung_after_s
        self._job_id = job_id
        self._store_url = store_url
        self._kill = kill
        self._suspect = 0
        self._suspected_at = 0.0

    def look(self, silent_s: float, now: float) -> dict[str, object] | None:
        """`silent_s` since a master was heard, at `now` (monotonic). What was found of the master it ended, or None."""
        if silent_s < self.hung_after_s:
            self._suspect = 0
            return None
        pid = self._master_here()
        if pid != self._suspect:
            # A successor gets its own time: it may be loading the journal.
            self._suspect, self._suspected_at = pid, now
            return None
        if not pid or now - self._suspected_at < self.hung_after_s / 2:
            return None
        evidence = {"pid": pid, "silent_s": round(silent_s, 1), "stack": describe_process(pid)}
        print(
            f"the master (pid {pid}) is silent for {silent_s:.0f} s; ending it.", file=sys.stderr, flush=True
        )
        with contextlib.suppress(ProcessLookupError):  # another guard was quicker
            self._kill(pid)
        self._suspect = 0
        return evidence

    def _master_here(self) -> int:
        """The pid of the job's master, if it runs on this machine; else 0."""
        try:
            with open_store(self._store_url, create=False, read_only=True) as store:
                row = store.job(self._job_id)
                known = store.journal(self._job_id).snapshot().get(("job", "job"), {})
        except GyreError:
            return 0  # the store is not reachable from here, or not now
        pid = row.master_pid or 0
        if not row.live or known.get("master_node") != socket.gethostname():
            return 0
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            return 0
        return pid if PROCESS_TITLE in title else 0
