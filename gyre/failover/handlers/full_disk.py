"""Decisions about disks that have no room left.

Invariants:
- *waiting is not failing*: while a disk is full nothing is started, and what fails meanwhile, or because of it, takes
  from no budget. The state has a deadline of its own, `failover.wait_for_room_s`;
- *errno says it*: a write that failed for want of room begins the state too, also where the disk looks empty (a
  quota). What is known from such words alone excuses a vertex `SAID.most_attempts` times without progress.

Who starts vertices waits for the disks by itself (`gyre.master.vertex_scheduler`), so the state needs no command.
"""

from __future__ import annotations

from collections.abc import Iterable

from gyre.config import Budget
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import Draft
from gyre.failover.handlers.ending import end_job
from gyre.failover.incidents import Fault
from gyre.failover.layout import JobLayout
from gyre.failover.state import JobPhase, JobRecord, Reason, VertexRecord

DISK_TIMER = "disk/"
"""Prefix of the timers that end the waiting; since when the disk is full and its key follow."""

AFTERMATH_S = 15.0
"""How long after a disk has room again a death still counts as the full disk's: a process that could not write its
files dies seconds later, and says nothing of it."""

SAID = Budget(max=1000, window_s=86_400, attempts=20)
"""How often a failed write excuses a vertex without progress, where nobody sees a full disk."""


def disk_filled(layout: JobLayout, draft: Draft, event: e.DiskFilled, now: float) -> Iterable[c.Command]:
    yield from _fill(
        layout, draft, now, event.where, event.node, event.required_bytes, event.available_bytes, said=False
    )


def disk_has_room(layout: JobLayout, draft: Draft, event: e.DiskHasRoom, now: float) -> Iterable[c.Command]:
    key = key_of(event.node, event.where)
    if key in draft.job.full_disks:
        left = {name: disk for name, disk in draft.job.full_disks.items() if name != key}
        draft.set_job(full_disks=left, disk_had_room_at=now)
        draft.moved = True  # the job's reason follows
    return ()


def waited_too_long(layout: JobLayout, draft: Draft, timer: str, now: float) -> Iterable[c.Command]:
    since, _, key = timer.removeprefix(DISK_TIMER).partition("/")
    disk = draft.job.full_disks.get(key)
    if disk is None or repr(disk["since"]) != since or draft.job.phase is JobPhase.STOPPING:
        return []
    waited_s = layout.spec.failover.wait_for_room_s
    error = f"{lack_of_disk(draft.job)}; it waited {waited_s:g} s (failover.wait_for_room_s)"
    return end_job(draft, now, outcome=JobPhase.FAILED, reason=Reason.DISK_FULL, message=error, error=error)


def key_of(node: str, where: str) -> str:
    return f"{node}:{where}"


def lack_of_disk(job: JobRecord) -> str:
    """The job's message while a disk is full; "" if none is."""
    if not job.full_disks:
        return ""
    first = job.full_disks[min(job.full_disks)]
    others = f", and {len(job.full_disks) - 1} more" if len(job.full_disks) > 1 else ""
    on = f" on {first['node']}" if first["node"] else ""
    if first["said"]:
        return f"no room on a disk{on}{others}: {first['where']}. It goes on by itself when there is room."
    required, available = (in_mib(first[key]) for key in ("required_bytes", "available_bytes"))
    return (
        f"no room on the disk of {first['where']}{on}{others}: required {required}, available {available}. "
        "Free some: it goes on by itself within seconds."
    )


def in_mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def is_in_the_way(draft: Draft, now: float, *, over_s: float = 0.0) -> bool:
    """Whether a disk is full, or was within the last `AFTERMATH_S`, or within the last `over_s` if that is longer."""
    at = draft.job.disk_had_room_at
    return bool(draft.job.full_disks) or (at is not None and now - at < max(AFTERMATH_S, over_s))


def begin_by_words(
    layout: JobLayout, draft: Draft, record: VertexRecord, fault: Fault, now: float
) -> list[c.Command]:
    """Begin the state because a write failed where no disk is seen to be full."""
    said = str(fault.evidence.get("error", ""))[:200] or "a write failed for want of room"
    return list(_fill(layout, draft, now, f"{record.id}: {said}", record.node, 0, 0, said=True))


def _fill(
    layout: JobLayout,
    draft: Draft,
    now: float,
    where: str,
    node: str,
    required_bytes: int,
    available_bytes: int,
    *,
    said: bool,
) -> Iterable[c.Command]:
    if draft.job.phase is JobPhase.STOPPING:
        return
    key = key_of(node, where)
    before = draft.job.full_disks.get(key)
    since = before["since"] if before else now
    disk = {
        "where": where,
        "node": node,
        "required_bytes": required_bytes,
        "available_bytes": available_bytes,
        "since": since,
        "said": said,
    }
    draft.set_job(full_disks={**draft.job.full_disks, key: disk})
    draft.moved = True  # the job's reason follows
    if before is None:
        yield c.SetTimer(f"{DISK_TIMER}{since!r}/{key}", now + layout.spec.failover.wait_for_room_s)
