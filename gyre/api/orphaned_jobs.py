"""Orphaned jobs: jobs whose cluster died, recognised because nothing answers any more, and ended in the journal.

No process of such a job is left to write its end, so the command that needs the job's name, or is to stop it, writes
it.

Invariants:
- *only the dead*: a job is ended here when neither its master nor its cluster answers, and both were on this
  machine; nothing can be known about another machine's, so there the user has to say that it is lost;
- *when it was last alive*: its end is when it gave its last sign, not when somebody looks;
- *fenced first*: the epoch is raised before anything is written, so a master that lives after all stops;
- *the history has it*: the end is an event like any other, and the fold stays equal to the snapshot.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Sequence

from gyre.api.client import GyreClient
from gyre.api.job_replay import coordinator_of
from gyre.api.ray_session import answers, is_own_host
from gyre.api.tls import anybody
from gyre.config import parse_job
from gyre.config.sections.model import source_of
from gyre.errors import ConfigError, NotFound, Unreachable
from gyre.failover import JobState, state_from
from gyre.failover.events import ClusterLost, Event, JobSubmitted
from gyre.master.job_context import entry_of
from gyre.observe.run_summary import keep_summary
from gyre.store import Entry, JobRow, Store

PROBE_S = 2.0


def is_lost(store: Store, row: JobRow) -> bool:
    """Whether a live job's master and cluster, both of this machine, are gone."""
    address = _own_cluster(row)
    return bool(address) and _is_gone(row, address, state_from(store.journal(row.job_id).snapshot()))


def lost_state(store: Store, row: JobRow, state: JobState) -> JobState | None:
    """How the job, which reads as `state`, will read once its end is written, if its master and its cluster are gone;
    else None. Nothing is written: a read leaves no trace."""
    address = _own_cluster(row)
    if not address or not state.job.job_id or state.job.phase.ended or not _is_gone(row, address, state):
        return None
    detail = f"its Ray cluster at {address} is gone, and its master with it"
    return coordinator_of(parse_job(row.spec)).decide(state, ClusterLost(detail), last_sign(store, row)).state


def last_sign(store: Store, row: JobRow) -> float:
    """When the job was last seen alive, in seconds since 1970: its newest event or number; now where it has none."""
    journal = store.journal(row.job_id)
    events = journal.events(after=max(journal.last_seq() - 1, 0), limit=1)
    numbers = store.series(row.job_id).extents().values()
    signs = [*(event.at for event in events), *(extent.last for extent in numbers)]
    return max(signs, default=time.time())


def _own_cluster(row: JobRow) -> str:
    """The address of the cluster on this machine that a live job is said to run on; empty if there is none."""
    address = (row.ray_address or "") if row.live else ""
    return address if address and is_own_host(address.rpartition(":")[0].strip("[]")) else ""


def _is_gone(row: JobRow, address: str, state: JobState) -> bool:
    if state.job.master_node not in ("", socket.gethostname()):
        return False
    return not master_answers(row) and not answers(address, timeout_s=PROBE_S)


def master_answers(row: JobRow) -> bool:
    """Whether the job's own master answers at its address. A master that asks for a token is taken for the job's
    own."""
    if not row.url:
        return False
    try:
        with GyreClient(row.url, timeout_s=PROBE_S, trust=anybody()) as client:
            client.view(row.job_id)
    except (Unreachable, NotFound, ConfigError):
        return False
    except Exception:  # any answer shows that something lives there
        return True
    return True


def end_lost_job(store: Store, row: JobRow, detail: str = "", first: Sequence[Event] = ()) -> None:
    """Write the end of an orphaned job, after the events in `first`. Does nothing if the job has ended."""
    if not row.live:
        return
    journal = store.journal(row.job_id)
    now = last_sign(store, row)
    epoch = journal.take_over(now=time.time(), pid=os.getpid())
    detail = detail or f"its Ray cluster at {row.ray_address} is gone"
    state = state_from(journal.snapshot())
    coordinator = coordinator_of(parse_job(row.spec))
    events = [] if state.job.phase.ended else [*first, ClusterLost(detail)]
    if not state.job.job_id:  # its master never wrote anything
        roles = {role: spec.total for role, spec in coordinator.spec.roles.items()}
        events.insert(0, JobSubmitted(row.job_id, row.name, roles, source_of(coordinator.spec.config)))
    entries: list[Entry] = []
    for event in events:
        decision = coordinator.decide(state, event, now)
        state = decision.state
        entries.append(
            entry_of(
                decision,
                event,
                seq=journal.last_seq() + 1 + len(entries),
                event_id=f"lost-{uuid.uuid4().hex[:12]}",
                at=now,
                actor="user",
            )
        )
    if entries:
        journal.append(epoch, entries)
    store.update_job(
        row.job_id,
        phase=state.job.phase.value,
        reason=state.job.reason.value,
        message=state.job.message[:500],
        ended_at=state.job.ended_at or now,
        epoch=epoch,
    )
    keep_summary(store, row.job_id, row.spec, state, seq=journal.last_seq())
