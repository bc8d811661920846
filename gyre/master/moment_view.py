"""A moment of a job's journal, as plain data: what the REST interface and the command line show of it.

Apart from `master_api`, which knows no store.
"""

from __future__ import annotations

from typing import Any

from gyre.master.master_api import view_of
from gyre.observe.history import Moment


def moment_of(moment: Moment) -> dict[str, Any]:
    """`view`, of the state after the event; `event`, or None before the first one; `first` and `last`, the numbers of
    the journal's events."""
    job = moment.state.job
    progress = {"step": job.step, "version": job.version, **job.result}
    return {
        "view": view_of(moment.state, seq=moment.seq, progress=progress, answering=False),
        "event": None if moment.event is None else moment.event.as_view(),
        "first": moment.first,
        "last": moment.last,
    }
