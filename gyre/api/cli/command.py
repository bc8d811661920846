"""`scale`, `pause`, `stop`: the verbs that change a running job.

Each returns when the request is in the journal, not when it is carried out; `gyre show` shows the progress.
"""

from __future__ import annotations

from typing import Any

import click

from gyre.api.cli.completion import job_then_roles
from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark, write_json


def _command(
    session: CliContext, job: str | None, name: str, body: dict[str, Any], as_json: bool, *, doing: str
) -> None:
    with session.reader() as reader:
        found = reader.find(job, live_first=True)
        seq = reader.command(found.job_id, name, body)
    if as_json:
        write_json({"job_id": found.job_id, "seq": seq})
    else:
        remark(f"{found.name}: {doing} (event {seq})")


def _end_if_lost(session: CliContext, job: str | None, sure: bool, reason: str, as_json: bool) -> bool:
    """Write the end of a job whose cluster is gone, and return whether that was done. With `sure` the user's word is
    enough; otherwise the loss must show from this machine."""
    from gyre.api.orphaned_jobs import end_lost_job, is_lost, master_answers
    from gyre.errors import Conflict

    with session.reader() as reader:
        row = reader.store.job(reader.find(job, live_first=True).job_id)
        if not row.live or not (sure or is_lost(reader.store, row)):
            return False
        if master_answers(row):
            raise Conflict(f"Job {row.name} is not lost: its master answers.", hint="Stop it without --lost.")
        end_lost_job(reader.store, row, reason)
        if as_json:
            write_json({"job_id": row.job_id, "seq": reader.store.journal(row.job_id).last_seq()})
        else:
            remark(f"{row.name}: its cluster is gone; it is recorded as ended")
    return True


_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print the job's id and the event's number as JSON."
)


@verb()
@click.argument("words", nargs=-1, required=True, metavar="[JOB] ROLE=N", shell_complete=job_then_roles)
@_JSON
def scale(session: CliContext, words: tuple[str, ...], as_json: bool) -> None:
    """Set how many vertices a role has: gyre scale grpo rollout=4"""
    *jobs, wanted = words
    role, separator, count = wanted.partition("=")
    if not separator or not role or not count.isdecimal() or len(jobs) > 1:
        raise click.UsageError(f"{' '.join(words)!r}: expected [JOB] ROLE=N, such as rollout=4.")
    _command(
        session,
        jobs[0] if jobs else None,
        "scale",
        {"role": role, "count": int(count)},
        as_json,
        doing=f"scaling {role} to {count}",
    )


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@_JSON
def pause(session: CliContext, job: str | None, as_json: bool) -> None:
    """Pause a job at the end of its step. `gyre resume` resumes it."""
    _command(session, job, "pause", {}, as_json, doing="pausing")


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("--reason", default="", metavar="TEXT", help="Reason to record.")
@click.option(
    "--now",
    is_flag=True,
    help="End every process at once, without waiting for the step, as `gyre kill` does.",
)
@_JSON
@click.option(
    "--lost",
    is_flag=True,
    help="Record a job as ended because its cluster is gone for good. This frees the job's name.",
)
def stop(session: CliContext, job: str | None, reason: str, now: bool, lost: bool, as_json: bool) -> None:
    """Stop a job at the end of its step, or after failover.drain_timeout_s (30 s by default).

    `gyre resume` continues it, from its last checkpoint.
    """
    if session.url is None and _end_if_lost(session, job, lost, reason, as_json):
        return
    body: dict[str, Any] = {"reason": reason or "killed", "at_once": True} if now else {"reason": reason}
    _command(session, job, "stop", body, as_json, doing="ending at once" if now else "stopping")
