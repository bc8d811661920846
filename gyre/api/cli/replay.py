"""`replay`: fold a job's history again, and compare the fold of the whole history with the snapshot."""

from __future__ import annotations

import json
from datetime import datetime

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.look import show_view
from gyre.api.cli.output import remark, write_json
from gyre.api.terminal.formats import local_time

DIFFERS = 1
"""The exit code where fold and snapshot differ."""


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@click.option(
    "--until",
    metavar="SEQ|TIME",
    help="Stop after this event number, or at this time (ISO 8601; local without an offset).",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the state and the differences as one JSON object."
)
def replay(session: CliContext, job: str | None, until: str | None, as_json: bool) -> int:
    """Rebuild a job's state from its journal, print it, and compare it with the stored state.

    It works without the cluster. The exit code is 1 if the two differ.
    """
    from gyre.api.job_replay import replay_job

    seq, at = parse_until(until)
    with session.reader() as reader:
        found = replay_job(reader.store, reader.find(job).job_id, until=seq, until_time=at)
    data = found.as_dict()
    if as_json:
        write_json(data)
    else:
        show_view(data["state"])
    remark(f"{found.events} events folded, up to number {found.seq}.")
    if found.differences is None:
        return 0
    for difference in found.differences:
        remark(f"differs: {' '.join(difference.key)}")
        remark(f"  fold:     {json.dumps(difference.folded, sort_keys=True)}")
        remark(f"  snapshot: {json.dumps(difference.stored, sort_keys=True)}")
    if found.differences:
        remark(f"Fold and snapshot differ in {len(found.differences)} rows.")
        return DIFFERS
    remark("Fold and snapshot are equal.")
    return 0


def parse_until(text: str | None) -> tuple[int | None, float | None]:
    """`--until` as a sequence number or as seconds since 1970. Raises UsageError for anything else."""
    if text is None:
        return None, None
    if text.isdecimal():
        return int(text), None
    try:
        return None, datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        example = local_time(1_700_000_000.0)
        raise click.UsageError(
            f"--until {text}: expected an event's number, or a time such as {example}."
        ) from None
