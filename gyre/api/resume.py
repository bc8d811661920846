"""An ended job goes on: with its journal, its ledger, its data position and its last checkpoint.

It keeps its id and its name; its processes are new, on this or another cluster. How long it runs and where may change,
what it is may not (`gyre.config.changes`).

Invariants:
- *nothing is begun anew*: prompts that were drawn stay drawn, those that were trained stay trained, and samples that
  were in flight go on from the ledger;
- *the journal has it*: the going on is an event, with what changed, so that the history still folds;
- *all or nothing*: a job that cannot go on ends again, and its name is free.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.api.handle import JobHandle
from gyre.api.home import Home, home
from gyre.api.job_replay import coordinator_of
from gyre.api.orphaned_jobs import end_lost_job, is_lost
from gyre.api.ray_session import NAMESPACE, connect
from gyre.api.submit import Rest, checked, end_processes, may_wait, start_master, take_back
from gyre.api.terminal.signals import signals_held
from gyre.config import JobSpec, parse_job
from gyre.config.changes import Changes, changes_between, check_changes
from gyre.config.sections.model import NAME, source_of
from gyre.errors import Conflict, Fenced, NotFound, StoreLost
from gyre.failover import Reason, state_from
from gyre.failover.events import JobContinued
from gyre.graph import can_come_later, compile_job, fit_to_cluster
from gyre.master.job_context import Issued, entry_of
from gyre.master.store_notes import forget_mark, read_mark
from gyre.observe.run_labels import label
from gyre.store import JobRow, Store, open_store


def resume_job(
    job: str,
    spec: Mapping[str, Any] | None = None,
    *,
    store_url: str | None = None,
    ray_address: str | None = None,
    start_local: bool = True,
    home_path: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    tls_cert: str | Path = "",
    tls_key: str | Path = "",
    plain_http: bool = False,
    no_wait: bool = False,
) -> JobHandle:
    """Have an ended job (an id, or the newest of a name) go on, and return its handle once its master answers.

    `spec` is the whole configuration that it goes on with, as plain data; None for that which it had. `store_url` is
    where the job is; None for the store in the home. The cluster, the master's address and the wait for room are as for
    `submit_job`.
    Raises NotFound, Conflict (it runs, or its name is taken), ConfigError for a change that cannot be made, GraphError,
    StoreError and Unreachable.
    """
    place = home(home_path)
    place.check_writable()
    store_url = store_url or place.database_url()
    rest = Rest(host, port, token, str(tls_cert), str(tls_key), plain_http)
    with open_store(store_url, create=False) as store:
        row = _ended(store, job, place)
        before = row.spec
        after = parse_job({**_with_first_weights(before if spec is None else spec, before), "name": row.name})
        resolved, notes = checked(after, ray_address, start_local=start_local, has_weights=True)
        changes = changes_between(
            compile_job(parse_job(before)).spec.model_dump(mode="json"), _plain(resolved)
        )
        check_changes(changes)
        rest.check(here=store_url.startswith("sqlite"))
        address = connect(ray_address, start_local=start_local, place=place)
        from gyre.master.ray_cluster import living_nodes

        plan = fit_to_cluster(
            compile_job(resolved).plan,
            living_nodes(),
            can_come_later(resolved),
            waits=may_wait(no_wait=no_wait),
        )
        copied = age_of_copy(store, place.job_directory(row.job_id))
        epoch = claim(store, row, resolved, address)
        try:
            end_processes(row.job_id)  # a master that has ended its job lingers, to tell the end
            write_continuation(store, row.job_id, epoch, resolved, changes)
            _label(store, row.job_id, resolved, changes)
            forget_mark(place.job_directory(row.job_id))  # the user accepts the store as it is
            start_master(resolved, row.job_id, store_url, place.job_directory(row.job_id), rest)
        except Fenced:
            raise _goes_on(row) from None
        except BaseException as error:
            with signals_held():
                give_back(store, row)
                take_back(store, row.job_id, error)
            raise
    return JobHandle(
        row.job_id,
        store_url,
        token,
        home_path=str(place.path),
        notes=(*notes, *(note for note in plan.notes if note not in notes), *copied),
    )


def _label(store: Store, job_id: str, spec: JobSpec, changes: Changes) -> None:
    """Give the job the tags and the note of a spec that has others than before, beside the tags that it was given
    since: those it keeps."""
    if changes.keys() & {"tags", "notes"}:
        label(store, job_id, add=spec.tags, notes=spec.notes if "notes" in changes else None)


def age_of_copy(store: Store, directory: Path) -> list[str]:
    """A note that the store is older than the last master of the job in `directory` saw, or another one; else none."""
    mark = read_mark(directory)
    try:
        if mark is not None:
            store.check_mark(mark)
    except StoreLost as error:
        return [f"{error.message} The job goes on from what it holds."]
    return []


def _ended(store: Store, job: str, place: Home) -> JobRow:
    """The row of the job, which has ended; one whose cluster is gone is ended first. Raises Conflict for one that runs,
    NotFound for one whose folder is not here."""
    row = store.job(job)
    if row.live:
        if not is_lost(store, row):
            raise Conflict(
                f"Job {row.name} runs ({row.phase}); only one that has ended can go on.",
                hint=f"gyre stop {row.name}, or gyre stop --lost {row.name} if its cluster is gone for good.",
            )
        end_lost_job(store, row)
        row = store.job(row.job_id)
    if not state_from(store.journal(row.job_id).snapshot()).job.job_id:
        raise Conflict(f"Job {row.name} never began: nothing is there to go on from.", hint="Run it again.")
    checkpoints = place.job_directory(row.job_id) / "checkpoints"
    state = state_from(store.journal(row.job_id).snapshot()).job
    if state.checkpoint_path and not Path(state.checkpoint_path).is_dir() and not checkpoints.is_dir():
        raise NotFound(
            f"The checkpoint of job {row.name}, {state.checkpoint_path}, is not on this machine.",
            hint="Go on where its home is, or bring its folder here.",
        )
    return row


def _with_first_weights(spec: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with the first weights that the job was given when it began: a job file does not name them."""
    kept = {NAME: before["config"][NAME]} if source_of(before["config"]) else {}
    return {**spec, "config": {**kept, **(spec.get("config") or {})}}


def claim(store: Store, row: JobRow, spec: JobSpec, address: str) -> int:
    """Take the job and its name, and store what it goes on with. Returns the epoch to write under. Raises Conflict if
    somebody else has it go on, or its name was given away."""
    journal = store.journal(row.job_id)
    epoch = journal.take_over(now=time.time(), pid=os.getpid())
    if not state_from(journal.snapshot()).job.phase.ended:
        raise _goes_on(row)
    store.update_job(
        row.job_id,
        epoch=epoch,
        phase="starting",
        reason=Reason.CONTINUED.value,
        message="",
        spec=_plain(spec),
        ended_at=None,
        ray_address=address,
        namespace=NAMESPACE,
        url=None,
    )
    return epoch


def write_continuation(store: Store, job_id: str, epoch: int, spec: JobSpec, changes: Changes) -> None:
    """Write that the job goes on. Its next master finds the starts among the commands that are to be done. Raises
    Fenced if somebody else has taken it since."""
    now = time.time()
    journal = store.journal(job_id)
    event = JobContinued({name: role.total for name, role in spec.roles.items()}, changes)
    decision = coordinator_of(spec).decide(state_from(journal.snapshot()), event, now)
    name = f"continued-{uuid.uuid4().hex[:12]}"
    issued = [Issued(f"{name}/{number}", command) for number, command in enumerate(decision.commands)]
    entry = entry_of(
        decision,
        event,
        seq=journal.last_seq() + 1,
        event_id=name,
        at=now,
        actor="user",
        issued=issued,
        done=[row.id for row in journal.pending_commands()],  # the end is not to be carried out again
    )
    journal.append(epoch, [entry])


def _goes_on(row: JobRow) -> Conflict:
    return Conflict(
        f"Job {row.name} goes on already: somebody else resumed it.", hint=f"gyre show {row.name}"
    )


def give_back(store: Store, row: JobRow) -> None:
    """Store again what the job ended with, unless it is written that it goes on."""
    if state_from(store.journal(row.job_id).snapshot()).job.phase.ended:
        store.update_job(row.job_id, spec=row.spec)


def _plain(spec: JobSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json")
