"""`compare`: two to twenty jobs side by side."""

from __future__ import annotations

import time

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark, write_json, write_table
from gyre.api.terminal.text_tables import Column


@verb()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB JOB...", shell_complete=job_names)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.option("--csv", "as_csv", is_flag=True, help="Print every metric of every step of the jobs as CSV.")
def compare(session: CliContext, jobs: tuple[str, ...], as_json: bool, as_csv: bool) -> None:
    """Compare two to twenty jobs: what came of them, metrics at the same step, and settings in which they differ.

    The metrics are means of the 10 steps up to the last step that all of them have made. A setting that a job does not
    give has its default.
    """
    from gyre.api.comparison import MOST_JOBS, RECENT
    from gyre.api.comparison import compare as compared
    from gyre.api.definition.whole_spec import whole_of
    from gyre.api.runs import csv_of_curves
    from gyre.workloads.trainer.learning.step_line import short

    if not 2 <= len(jobs) <= MOST_JOBS:
        raise click.UsageError(f"{len(jobs)} jobs: expected two to {MOST_JOBS}.")
    if as_json and as_csv:
        raise click.UsageError("--json and --csv are two forms of one answer: give one of them.")
    with session.reader() as reader:
        ids = [reader.find(job).job_id for job in jobs]
        if as_csv:
            curves = {job: reader.steps(job_id) for job, job_id in zip(jobs, ids, strict=True)}
            click.echo(csv_of_curves(curves), nl=False)
            return
        found = compared(
            [reader.view(job_id) for job_id in ids],
            [whole_of(reader.spec(job_id)) for job_id in ids],
            [reader.steps(job_id) for job_id in ids],
            now=time.time(),
        )
    if as_json:
        write_json(found.as_dict())
        return
    columns = [Column("", least=12), *(Column(name, least=8) for name in found.jobs)]
    write_table(columns, [(name, *values) for name, values in found.outcomes.items()])
    if found.metrics:
        click.echo()
        remark(
            f"means of the {min(RECENT, found.step)} steps up to step {found.step}, the last that all have made:"
        )
        write_table(
            columns,
            [
                (name, *("" if value is None else short(value) for value in values))
                for name, values in found.metrics.items()
            ],
        )
    click.echo()
    if found.differences:
        write_table(columns, [(key, *values) for key, values in found.differences.items()])
    else:
        remark("Their configurations are the same.")
