"""`ls`, `tag`, `note`: the table of runs, and what users call each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import moment, remark, say, write_json, write_table
from gyre.api.terminal.formats import duration, number, one_line, sparkline
from gyre.api.terminal.text_tables import Column
from gyre.observe.number_text import short

if TYPE_CHECKING:
    from gyre.api.runs import GroupedRuns, RunColumn

MASTER, CURVE = Column("MASTER", dispensable=2), Column("CURVE", dispensable=9)
"""What the reader alone knows, and what is drawn."""

LINE: tuple[str | Column, ...] = (
    *("name", "id", "phase", "reason", MASTER, "step", "reward", CURVE, "held_out", "held_out_last"),
    *("tokens_per_s", "cost", "tags", "version", "started", "took"),
)
"""The columns of `gyre ls`, of those in `gyre.api.runs.columns`."""

CURVE_WIDTH = 12
NOTE_WIDTH = 60
"""Characters of a note in a table: `gyre note JOB` has all of it."""

Item = Mapping[str, Any]


@verb()
@click.option("-a", "--all", "show_all", is_flag=True, help="List jobs that have ended, too.")
@click.option(
    "--filter",
    "wanted",
    default="",
    metavar="FILTER",
    help="Only these, as in 'reward>0.5, model~qwen, tag=ablation'; docs/dashboard.md has the grammar.",
)
@click.option(
    "--sort",
    default="",
    metavar="COLUMNS",
    help="By these columns, with - from the greatest down: -reward,name.",
)
@click.option(
    "--columns", default="", metavar="COLUMNS", help="Show these columns instead: name,reward,tags."
)
@click.option(
    "--group",
    default="",
    metavar="BY",
    help="Mean and spread of groups: experiment (over seeds), tag, seed, recipe, model, phase, name.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
def ls(
    session: CliContext,
    show_all: bool,
    wanted: str,
    sort: str,
    columns: str,
    group: str,
    as_json: bool,
    as_csv: bool,
) -> None:
    """List the running jobs, the newest first.

    The table of runs: filtered, sorted and grouped by any column, as on the page of gyre ui.
    """
    from gyre.api.quick_list import ended_jobs
    from gyre.api.runs import column_named, cost_words, csv_of_runs, select_runs
    from gyre.observe.run_lines import LISTED

    if as_json and as_csv:
        raise click.UsageError("--json and --csv are two forms of one answer: give one of them.")
    chosen = [column_named(name.strip()) for name in columns.split(",") if name.strip()]
    now = time.time()
    jobs: list[dict[str, Any]] = []
    masters: dict[str, str] = {}
    past = False
    ended = ended_jobs(session.store_url, LISTED) if session.url is None else None
    if ended is not None:
        jobs = ended if show_all else []
        found = select_runs(jobs, filter=wanted, sort=sort, now=now)
        past = bool(ended) and not show_all
    elif session.url is not None or session.has_store():
        with session.reader() as reader:
            jobs = reader.jobs(live=None if show_all else True)
            if not show_all:  # the cluster of one may be gone, which nobody has noted yet
                jobs = [job for job in jobs if job["phase"] not in ENDED]
            found = select_runs(jobs, filter=wanted, sort=sort, now=now)
            if not (as_json or as_csv or group or chosen):
                masters = {job["job_id"]: reader.master_state(job) for job in found}
            past = not show_all and not found and session.url is None
            past = past and bool(reader.store.jobs(live=False, limit=1))
    else:
        found = select_runs(jobs, filter=wanted, sort=sort, now=now)
    groups = _groups(session, found, group, sort, now) if group else None
    if as_csv:
        click.echo(csv_of_runs(found, [one.name for one in chosen], now=now), nl=False)
    elif as_json:
        write_json([one.as_dict() for one in groups] if groups is not None else found)
    elif not found:
        remark(_nothing(bool(jobs), bool(wanted), past))
    elif groups is not None:
        _write_groups(group, groups)
    elif chosen:
        heads = [Column(one.name.upper().replace("_", " ")) for one in chosen]
        write_table(heads, [[_cell(one, job, now) for one in chosen] for job in found])
    else:
        _write_line_by_line(found, masters, now)
    if found and not (as_csv or as_json) and (cost := cost_words(found)):
        remark(f"They cost {cost}." if len(found) > 1 else f"It cost {cost.removesuffix(' in all')}.")


def _groups(session: CliContext, found: Sequence[Item], by: str, sort: str, now: float) -> list[GroupedRuns]:
    """The groups; those that differ in settings are named by them, for which a job of each is looked up."""
    from gyre.api.definition.whole_spec import whole_of
    from gyre.api.runs import NAMED, grouped, named

    groups = grouped(found, by, sort=sort, now=now)
    if by != "experiment" or not groups:
        return groups
    with session.reader() as reader:
        specs = {one.jobs[0]: whole_of(reader.spec(one.jobs[0])) for one in groups[:NAMED]}
    return named(groups, specs)


def _nothing(there: bool, wanted: bool, past: bool) -> str:
    if wanted:
        return (
            "No running job is like that; --all looks at those that have ended, too."
            if past
            else ("No job is like that." if there else "There is no job yet.")
        )
    return "No job is running; --all lists those that have ended." if past else "There is no job yet."


ENDED = ("succeeded", "stopped", "failed")


def _write_line_by_line(found: Sequence[Item], masters: Mapping[str, str], now: float) -> None:
    from gyre.api.runs import column_named

    shown = [one if isinstance(one, Column) else column_named(one) for one in LINE]

    def cell(column: Column | RunColumn, job: Item) -> str:
        if column is MASTER:
            return masters.get(job["job_id"], "")
        if isinstance(column, Column):
            return sparkline([one for one in job.get("rewards") or () if one is not None], CURVE_WIDTH)
        return column.text(job) if column.text else _written(column, job, now, _short)

    heads = [one if isinstance(one, Column) else _head(one) for one in shown]
    write_table(heads, [[cell(one, job) for one in shown] for job in found])


def _head(column: RunColumn) -> Column:
    least = 8 if column.kind == "texts" else None
    return Column(column.head or column.title.upper(), least=least, dispensable=column.dispensable)


def _cell(column: RunColumn, job: Item, now: float) -> str:
    text = _written(column, job, now, number)
    return text if len(text) <= NOTE_WIDTH or column.kind != "text" else f"{text[: NOTE_WIDTH - 1]}…"


def _written(column: RunColumn, job: Item, now: float, form: Callable[[Any], str]) -> str:
    """The column's value of a job; `form` writes a number."""
    value = column.value(job, now)
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ", ".join(value)
    if column.kind == "time" and isinstance(value, int | float):
        return moment(value, now)
    if column.kind == "seconds" and isinstance(value, int | float):
        return duration(value)
    return form(value) if column.kind == "number" else one_line(value)


def _write_groups(by: str, groups: Sequence[GroupedRuns]) -> None:
    """A line for each group: `0.71 ±0.02` is the mean of its members and their standard deviation."""
    from gyre.api.runs.table import SUMMARISED

    told = [name for name in SUMMARISED if any(name in one.values for one in groups)]
    differs = [one.settings if one.settings != one.title else "" for one in groups]
    heads = [
        Column(by.upper(), least=8),
        Column("RUNS"),
        Column("FAILED", dispensable=2),
        *([Column("DIFFERS IN", least=12, dispensable=3)] if any(differs) else []),
        Column("NAMES", least=16, dispensable=4),
        *(
            Column(name.upper().replace("_", " "), dispensable=_GROUP_DISPENSABLE.get(name, 0))
            for name in told
        ),
    ]
    write_table(
        heads,
        [
            (
                one.title or "–",
                len(one.jobs),
                one.failed or "",
                *([settings] if any(differs) else []),
                ", ".join(dict.fromkeys(one.names)),
                *(one.words.get(name, "") for name in told),
            )
            for one, settings in zip(groups, differs, strict=True)
        ],
    )


_GROUP_DISPENSABLE = {"step": 6, "tokens_per_s": 5, "took": 1}


def _short(value: float | None) -> str:
    return "" if value is None else short(value)


@verb()
@click.argument("job", shell_complete=job_names)
@click.argument("tags", nargs=-1, metavar="[TAG...]")
@click.option("--remove", is_flag=True, help="Remove these tags instead of adding them.")
@click.option("--json", "as_json", is_flag=True, help="Print the job's tags and note as JSON.")
def tag(session: CliContext, job: str, tags: tuple[str, ...], remove: bool, as_json: bool) -> None:
    """Tag a job, whether it runs or has ended, or show its tags: gyre tag grpo ablation lr-sweep

    gyre ls --filter tag=ablation lists those that have it, gyre ls --group tag what they come to.
    """
    if remove and not tags:
        raise click.UsageError("--remove: which tags?")
    with session.reader() as reader:
        found = reader.find(job)
        labels = reader.label(found.job_id, add=() if remove else tags, remove=tags if remove else ())
    if as_json:
        write_json(labels)
    elif tags:
        remark(f"{found.name}: {', '.join(labels['tags']) or 'no tags'}")
    elif labels["tags"]:
        say("\n".join(labels["tags"]))
    else:
        remark(f"{found.name} has no tags.")


@verb()
@click.argument("job", shell_complete=job_names)
@click.argument("text", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the job's tags and note as JSON.")
def note(session: CliContext, job: str, text: str | None, as_json: bool) -> None:
    """Write a note about a job, whether it runs or has ended, or show it: gyre note grpo "lr halved at 200"

    A new note takes the place of the one before; "" removes it.
    """
    with session.reader() as reader:
        found = reader.find(job)
        labels = reader.label(found.job_id, notes=text)
    if as_json:
        write_json(labels)
    elif text is not None:
        remark(f"{found.name}: {'its note is written' if labels['notes'] else 'its note is removed'}")
    elif labels["notes"]:
        say(labels["notes"])
    else:
        remark(f"{found.name} has no note.")
