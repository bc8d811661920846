"""`debug`: everything about a job in one archive, without secrets."""

from __future__ import annotations

from pathlib import Path

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark, write_json


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the archive goes.  [default: gyre-debug-JOB.tar.gz here]",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON object.")
def debug(session: CliContext, job: str | None, output: Path | None, as_json: bool) -> None:
    """Write an archive for a report: a job's view, configuration, events, steps, logs and versions, without secrets."""
    from gyre.api.debug_bundle import write_bundle

    with session.reader() as reader:
        found = reader.find(job)
        file = output or Path(f"gyre-debug-{found.name}.tar.gz")
        written = write_bundle(
            reader,
            found.job_id,
            file,
            secrets=[session.token] if session.token else [],
            logs=session.home.find_logs(found.job_id),
        )
    if as_json:
        write_json(written)
        return
    for name, why in written["missing"].items():
        remark(f"not there: {name}: {why}")
    remark(
        "Values of environment variables, passwords and tokens are blackened. Logs may quote prompts and answers."
    )
    click.echo(written["file"])
