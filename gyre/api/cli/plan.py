"""`plan`: whether a job can run, as far as that can be known before anything is started; its graph and placement. Needs
neither Ray nor torch, and starts nothing but, where the job names code of the user's own, a process that imports it."""

from __future__ import annotations

import click

from gyre.api.cli.context import Session, verb
from gyre.api.cli.output import console, remark, write_json


@verb()
@click.argument("file", type=click.Path())
@click.option("--json", "form", flag_value="json", help="Print everything as one JSON object.")
@click.option("--dot", "form", flag_value="dot", help="Print the graph for Graphviz.")
@click.option("--mermaid", "form", flag_value="mermaid", help="Print the graph for Mermaid.")
@click.option(
    "--set", "overrides", multiple=True, metavar="A.B=C", help="Override a key of the file. May be repeated."
)
@click.option("--strict", is_flag=True, help="Exit with 2 if there is a warning.")
@click.option(
    "--ray-address",
    envvar="RAY_ADDRESS",
    metavar="ADDRESS",
    help="Cluster that the job will run on. Files may exist only there; it is not contacted [RAY_ADDRESS].",
)
def plan(
    session: Session,
    file: str,
    form: str | None,
    overrides: tuple[str, ...],
    strict: bool,
    ray_address: str | None,
) -> None:
    """Check whether a job file can run, and show its roles, graph and placement. Starts nothing."""
    from gyre.api.checks import judge, line_of
    from gyre.api.definition.jobfile import load_job_file
    from gyre.errors import ConfigError
    from gyre.graph import as_dict, as_dot, as_mermaid, as_tables

    job = load_job_file(file, overrides)
    assert job.source is not None
    with job.source.named(always=True):
        judged = judge(job.spec, ray_address)
    compiled = judged.compiled
    if form == "json":
        write_json(as_dict(compiled) | {"warnings": judged.warnings, "notes": judged.notes})
    elif form == "dot":
        click.echo(as_dot(compiled))
    elif form == "mermaid":
        click.echo(as_mermaid(compiled))
    else:
        out = console()
        for table in as_tables(compiled):
            out.print(table)
            out.print()
    for finding in judged.findings:
        remark(line_of(finding))
    if strict and judged.warnings:
        count = len(judged.warnings)
        raise ConfigError(
            f"{file}: {count} warning{'s' if count > 1 else ''}, which --strict does not permit.",
            hint="Mend what they name, or leave --strict out.",
        )
