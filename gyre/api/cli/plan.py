"""`plan`: whether a job can run, as far as that can be known before anything is started; its graph and placement. Needs
neither Ray nor torch, and starts nothing but, where the job names code of the user's own, a process that imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gyre.api.cli.context import Session, verb
from gyre.api.cli.output import console, remark, write_json, write_table
from gyre.api.terminal.text_tables import Column

if TYPE_CHECKING:
    from gyre.api.checks.memory import Foreseen


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
        found = {"warnings": judged.warnings, "notes": judged.notes, "memory": judged.memory.as_dict()}
        write_json(as_dict(compiled) | found)
    elif form == "dot":
        click.echo(as_dot(compiled))
    elif form == "mermaid":
        click.echo(as_mermaid(compiled))
    else:
        out = console()
        for table in as_tables(compiled):
            out.print(table)
            out.print()
        if judged.memory.lines:
            _write_memory(judged.memory)
    for finding in judged.findings:
        remark(line_of(finding))
    if strict and judged.warnings:
        count = len(judged.warnings)
        raise ConfigError(
            f"{file}: {count} warning{'s' if count > 1 else ''}, which --strict does not permit.",
            hint="Mend what they name, or leave --strict out.",
        )


def _write_memory(found: Foreseen) -> None:
    """What each role takes, and whether it fits; "not known" where that is so."""
    columns = [Column("Memory"), Column("of"), Column("GiB"), Column("for", least=20, wraps=True), Column("")]
    write_table(
        columns,
        [
            (
                line.role,
                line.where,
                "" if line.needs is None else f"{line.needs / 2**30:.1f}",
                line.of,
                line.verdict,
            )
            for line in found.lines
        ],
    )
    click.echo()
