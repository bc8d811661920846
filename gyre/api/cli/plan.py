"""`plan`: whether a job can run, as far as that can be known before anything is started, and what it comes to; its
graph and placement with `--graph`. Needs neither Ray nor torch, and starts nothing but, where the job names code of the
user's own, a process that imports it.

Invariant *yes or no last*: the last line that is printed begins with one of the two words, whatever the form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import LAST_LINE, console, remark, say, write_json, write_table
from gyre.api.terminal.text_tables import Column

if TYPE_CHECKING:
    from gyre.api.checks import Judged
    from gyre.api.checks.amounts import Amounts
    from gyre.api.checks.memory import Foreseen
    from gyre.config import JobSpec
    from gyre.errors import GyreError


@verb()
@click.argument("file", type=click.Path())
@click.option("--json", "form", flag_value="json", help="Print everything as one JSON object.")
@click.option("--dot", "form", flag_value="dot", help="Print the graph for Graphviz.")
@click.option("--mermaid", "form", flag_value="mermaid", help="Print the graph for Mermaid.")
@click.option("--graph", "form", flag_value="graph", help="Print operators, edges, cycles and placement too.")
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
    session: CliContext,
    file: str,
    form: str | None,
    overrides: tuple[str, ...],
    strict: bool,
    ray_address: str | None,
) -> None:
    """Check whether a job file can run, and show what it takes: roles, prompts, tokens, memory. Starts nothing.

    The last line says yes or no, and why.
    """
    from gyre.api.checks import judge
    from gyre.api.checks.amounts import amounts_of
    from gyre.api.definition.jobfile import load_job_file
    from gyre.errors import ConfigError, GyreError

    try:
        job = load_job_file(file, overrides)
        assert job.source is not None
        with job.source.named(always=True):
            judged = judge(job.spec, ray_address)
        amounts = amounts_of(judged.compiled.spec)
        refused = None
        if strict and judged.warnings:
            count = len(judged.warnings)
            refused = ConfigError(
                f"{file}: {count} warning{'s' if count > 1 else ''}, which --strict does not permit.",
                hint="Mend what they name, or leave --strict out.",
            )
    except GyreError as error:
        _say_no(error, form)
        raise
    _write(judged, amounts, form, refused)
    if refused is not None:
        raise refused


def _say_no(error: GyreError, form: str | None) -> None:
    """The verdict on a job that cannot run. The error's own sentence is printed first."""
    from gyre.api.checks import why_not

    if form == "json":
        write_json({"verdict": {"runs": False, "because": error.message, "hint": error.hint}})
    elif form not in ("dot", "mermaid"):
        error.details[LAST_LINE] = f"No: {why_not(error)}."


def _write(judged: Judged, amounts: Amounts | None, form: str | None, refused: GyreError | None) -> None:
    from gyre.api.checks import line_of
    from gyre.graph import as_dict, as_dot, as_mermaid
    from gyre.graph.devices import rate_per_hour

    compiled = judged.compiled
    if form == "json":
        found: dict[str, Any] = {
            "warnings": judged.warnings,
            "notes": judged.notes,
            "memory": judged.memory.as_dict(),
        }
        found["price_per_hour"] = rate_per_hour(compiled.spec, {})
        found["amounts"] = None if amounts is None else amounts.as_dict()
        because = judged.because if refused is None else refused.message
        found["verdict"] = {"runs": refused is None, "because": because}
        write_json(as_dict(compiled) | found)
    elif form == "dot":
        click.echo(as_dot(compiled))
    elif form == "mermaid":
        click.echo(as_mermaid(compiled))
    else:
        _write_tables(judged, amounts, whole=form == "graph")
    for finding in judged.findings:
        remark(line_of(finding))
    if form not in ("json", "dot", "mermaid"):
        if refused is None:
            say(f"Yes: {judged.because}.")
        else:
            refused.details[LAST_LINE] = "No: --strict does not permit warnings."


def _write_tables(judged: Judged, amounts: Amounts | None, *, whole: bool) -> None:
    from gyre.graph import as_tables

    out = console()
    tables = as_tables(judged.compiled)
    for table in tables if whole else tables[:1]:
        out.print(table)
        out.print()
    _write_amounts(judged.compiled.spec, amounts)
    if judged.memory.lines:
        _write_memory(judged.memory)


def _write_amounts(spec: JobSpec, found: Amounts | None) -> None:
    """What the job draws, generates and trains on, and the price of an hour."""
    from gyre.api.checks.amounts import lines_of, price_line

    rows = list(lines_of(found)) if found is not None else []
    if price := price_line(spec):
        rows.append(("an hour costs", price))
    if rows:
        write_table([Column("Amounts"), Column("", least=20, wraps=True)], rows)
        click.echo()


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
