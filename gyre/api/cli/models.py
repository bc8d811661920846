"""`models`: which models Gyre trains and serves, and what a folder is. Needs neither Ray nor torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gyre.api.cli.output import remark, write_json, write_table
from gyre.api.terminal.text_tables import Column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gyre.engines.kind import EngineKind
    from gyre.graph.backends import Backend
    from gyre.models.support import FolderReport, Taker


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def models(folder: Path | None, as_json: bool) -> None:
    """List the models that each back end trains and each engine serves, or say what can train and serve FOLDER."""
    from gyre.models import tried
    from gyre.models.support import SUPPORT, describe

    trainers, servers = _takers()
    takers: list[Taker] = [*trainers, *servers]
    by_transformers = [who.name for who in takers if who.by_transformers]
    if folder is None:
        columns = [who.name for who in takers]
        rows: list[dict[str, Any]] = [
            {"model": row.name, "config": row.config} | {who.name: row.takes(who) for who in takers}
            for row in SUPPORT
        ]
        if as_json:
            kinds = {who: tried.taken(who) for who in by_transformers}
            names = {
                "trains": [who.name for who in trainers],
                "serves": [who.name for who in servers],
            }
            told = {**names, "rows": rows, "tried": kinds}
            write_json(told | {"transformers": tried.table()["transformers"]})
            return
        write_table(
            [Column("model"), Column("config.json"), *(Column(who) for who in columns)],
            [
                [row["model"], row["config"], *("yes" if row[who] else "no" for who in columns)]
                for row in rows
            ],
        )
        taken = " and ".join(f"{who} takes {len(tried.taken(who))}" for who in by_transformers)
        remark(
            f"{', '.join(who.name for who in trainers)} train; {', '.join(who.name for who in servers)} serve. Of the "
            f"{len(tried.table()['kinds'])} causal kinds of transformers {tried.table()['transformers']}, as was "
            f"tried, {taken}: --json lists them."
        )
        return
    report = _tried_too(describe(folder, trainers, servers), folder, by_transformers)
    if as_json:
        write_json(report.as_dict())
        return
    _write(report)


def _takers() -> tuple[list[Backend], list[EngineKind]]:
    from gyre.graph.backends import back_ends
    from gyre.rollouts.engines import engines

    return back_ends(), engines()


def _tried_too(report: FolderReport, folder: Path, by_transformers: Sequence[str]) -> FolderReport:
    """The report with what a trial says of a kind that the table does not have."""
    from dataclasses import replace

    from gyre.api.checks.tiny_trial import problem_with
    from gyre.models import tried
    from gyre.models.architecture import read_config

    if report.architecture is not None or report.problem or tried.knows(report.model_type):
        return report
    config = read_config(folder)
    found = {who: problem_with(folder, config, who) for who in by_transformers if who not in report.refused}
    return replace(report, refused=report.refused | {who: one for who, one in found.items() if one})


def _write(report: FolderReport) -> None:
    told = report.as_dict()
    click.echo(f"{report.path}: model_type {report.model_type}")
    architecture = report.architecture
    if architecture is not None:
        output = "tied to the embedding" if architecture.tied else "of its own"
        click.echo(f"  parameters  {report.parameters:,}")
        click.echo(
            f"  shape       {architecture.layers} layers of {architecture.hidden}, {architecture.heads} heads, "
            f"{architecture.kv_heads} of keys and values, vocabulary {architecture.vocab}"
        )
        click.echo(
            f"  context     {architecture.max_positions} tokens, rotary positions: {architecture.rope.kind}"
        )
        click.echo(f"  output      {output}")
        weights = f"{report.files} file(s), {report.dtype}, {report.size_bytes:,} bytes"
        click.echo(f"  weights     {weights if report.files else 'none: a job draws them from its seed'}")
    elif report.files:
        click.echo(f"  parameters  {report.parameters:,}")
        click.echo(f"  weights     {report.files} file(s), {report.dtype}, {report.size_bytes:,} bytes")
    for title in ("trains", "serves"):
        for name, answer in told[title].items():
            click.echo(f"  {title:<11} {name}: {'yes' if answer['takes'] else 'no: ' + answer['reason']}")
