"""`plan`: a job file's graph and placement. Needs neither Ray nor torch, and starts nothing."""

from __future__ import annotations

import click

from gyre.api.cli.context import Session, verb
from gyre.api.cli.output import console, remark, write_json


@verb()
@click.argument("file", type=click.Path())
@click.option("--json", "form", flag_value="json", help="Print everything as one object.")
@click.option("--dot", "form", flag_value="dot", help="Print the graph for Graphviz.")
@click.option("--mermaid", "form", flag_value="mermaid", help="Print the graph for Mermaid.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a key of the file.")
def plan(session: Session, file: str, form: str | None, overrides: tuple[str, ...]) -> None:
    """Show a job file's roles, edges, cycles, regions, sub-graphs and placement."""
    from gyre.api.checks import check_settings
    from gyre.api.definition.jobfile import load_job_file
    from gyre.graph import as_dict, as_dot, as_mermaid, as_tables

    compiled = load_job_file(file, overrides).plan()
    notes = [*check_settings(compiled.spec), *compiled.plan.notes]
    if form == "json":
        write_json(as_dict(compiled))
    elif form == "dot":
        click.echo(as_dot(compiled))
    elif form == "mermaid":
        click.echo(as_mermaid(compiled))
    else:
        out = console()
        for table in as_tables(compiled):
            out.print(table)
            out.print()
    for note in notes:
        remark(f"note: {note}")
