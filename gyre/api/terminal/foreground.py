"""A job in the foreground of a terminal: shown while it runs, and stopped gracefully when its user interrupts.

Ctrl-C and SIGTERM both tell the job to stop, and give it time; a second one ends it at once. However it ends, no
process of a cluster that was started here is left, and the job's end is in its journal.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from gyre.api.handle import JobHandle
from gyre.api.orphaned_jobs import end_lost_job
from gyre.api.ray_session import cluster_is_gone, disconnect, owns_cluster
from gyre.api.terminal.run_end import INTERRUPTED_BY, last_lines
from gyre.api.terminal.signals import signals_ignored
from gyre.errors import GyreError, JobFailed, Unreachable
from gyre.failover import JobPhase
from gyre.failover.events import StopRequested
from gyre.master.master_api import View
from gyre.store import open_store

NOT_STARTED = "interrupted before the job was running; nothing of it is left"

STOP_ASKED_WITHIN_S = 10.0
STOPPED_WITHIN_S = 60.0
"""How long an interrupted job may take to stop gracefully."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def terminable() -> Iterator[None]:
    """Within the block SIGTERM raises `Terminated`, so that it stops a job gracefully, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def starting() -> Iterator[None]:
    """A block that starts a job, and leaves nothing where it is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        print(NOT_STARTED, file=sys.stderr, flush=True)
        raise


@contextmanager
def in_foreground(handle: JobHandle) -> Iterator[None]:
    """A block with a running job: the job is stopped when the block is interrupted, and its end is cleaned up."""
    interrupted = ""
    try:
        yield
    except KeyboardInterrupt as signalled:
        interrupted = f"{INTERRUPTED_BY}{'SIGTERM' if isinstance(signalled, Terminated) else 'Ctrl-C'}"
        _stop(handle, interrupted)
        raise
    finally:
        with signals_ignored():
            handle.close()
            own = owns_cluster()
            disconnect()
            if own:
                _write_end(handle, interrupted)
            _say_end(handle)


def cluster_watched(show: Callable[[View], object]) -> Callable[[View], object]:
    """`show`, after a look whether the head of our own cluster lives. Raises Unreachable where it has ended."""

    def look(view: View) -> None:
        if address := cluster_is_gone():
            raise Unreachable(
                f"The head of the job's Ray cluster at {address} has ended, and the job with it "
                f"(last known: {view['job']['phase']}, step {view['job']['step']}).",
                hint=f"gyre resume {view['job']['name']} goes on from its last checkpoint.",
            )
        show(view)

    return look


def _stop(handle: JobHandle, reason: str) -> None:
    print("stopping the job; press Ctrl-C again to end at once …", file=sys.stderr, flush=True)
    try:
        handle.stop(reason, deadline_s=STOP_ASKED_WITHIN_S)
        handle.wait(STOPPED_WITHIN_S)
    except JobFailed:
        return  # the job had failed before it was told to stop; its journal says how
    except (GyreError, TimeoutError) as error:
        print(f"the job did not stop gracefully: {error}", file=sys.stderr, flush=True)


def _say_end(handle: JobHandle) -> None:
    """Print how the job ended, if it has: whatever way the block was left."""
    try:
        view = handle.status()
    except GyreError as error:
        print(f"how the job ended cannot be read: {error}", file=sys.stderr, flush=True)
        return
    finally:
        handle.close()
    if JobPhase(view["job"]["phase"]).ended:
        for line in last_lines(view):
            print(line, file=sys.stderr, flush=True)


def _write_end(handle: JobHandle, why: str) -> None:
    """Write the job's end into its journal. The master ended with the cluster, perhaps before it could."""
    try:
        with open_store(handle.store_url, create=False) as store:
            row = store.job(handle.job_id)
            end_lost_job(store, row, why, first=(StopRequested(why),) if why else ())
    except GyreError as error:
        print(f"the job's end could not be written: {error}", file=sys.stderr, flush=True)
