"""`scale`, `pause`, `resume`, `stop`: what one may ask of a job that runs.

Each returns when the request is in the journal, not when it is carried out; `gyre show` tells the rest.
"""

from __future__ import annotations

from typing import Any

import click

from gyre.api.cli.context import Session, verb
from gyre.api.cli.output import remark, write_json


def _command(session: Session, job: str | None, name: str, body: dict[str, Any], as_json: bool) -> None:
    with session.reader() as reader:
        found = reader.find(job, live_first=True)
        seq = reader.command(found.job_id, name, body)
    if as_json:
        write_json({"job_id": found.job_id, "seq": seq})
    else:
        remark(f"{found.name}: {name} is event {seq}")


_JSON = click.option("--json", "as_json", is_flag=True, help="The job's id and the event's number.")


@verb()
@click.argument("words", nargs=-1, required=True, metavar="[JOB] ROLE=N")
@_JSON
def scale(session: Session, words: tuple[str, ...], as_json: bool) -> None:
    """Change how many vertices a role has: gyre scale grpo rollout=4"""
    *jobs, wanted = words
    role, separator, count = wanted.partition("=")
    if not separator or not role or not count.isdecimal() or len(jobs) > 1:
        raise click.UsageError(f"{' '.join(words)!r}: expected [JOB] ROLE=N, such as rollout=4.")
    _command(session, jobs[0] if jobs else None, "scale", {"role": role, "count": int(count)}, as_json)


@verb()
@click.argument("job", required=False)
@_JSON
def pause(session: Session, job: str | None, as_json: bool) -> None:
    """Hold a job's trainer at the next step's end."""
    _command(session, job, "pause", {}, as_json)


@verb()
@click.argument("job", required=False)
@_JSON
def resume(session: Session, job: str | None, as_json: bool) -> None:
    """Let a paused job go on."""
    _command(session, job, "resume", {}, as_json)


@verb()
@click.argument("job", required=False)
@click.option("--reason", default="", help="Recorded with the stop.")
@_JSON
def stop(session: Session, job: str | None, reason: str, as_json: bool) -> None:
    """End a job in order: at the next step's end, or after its drain timeout."""
    _command(session, job, "stop", {"reason": reason}, as_json)
