"""`samples`: what a job was asked, what it answered and what that earned, from the files in its directory."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark, stdout_is_terminal, write_json, write_table
from gyre.api.terminal.formats import number, one_line
from gyre.api.terminal.text_tables import Column

if TYPE_CHECKING:
    from gyre.observe.samples.query import SampleFilter, SampleReader

COLUMNS = (
    Column("SAMPLE"),
    Column("REWARD"),
    Column("OUTCOME", dispensable=2),
    Column("TOKENS", dispensable=3),
    Column("VERSION", dispensable=5),
    Column("INSTANCES", dispensable=4),
    Column("PROMPT", least=20, dispensable=1),
    Column("ANSWER", least=20),
)
FURTHER = {
    "right_answer": Column("RIGHT ANSWER", least=8, dispensable=1),
    "rollout": Column("ROLLOUT", dispensable=2),
    "turns": Column("TURNS", dispensable=2),
    "ended": Column("ENDED", least=8, dispensable=2),
}
"""Where any of the samples has one; an older master has none."""
DRAWN = Column("DRAWN")
"""Of one with tokens that nobody drew: a tool's result, a template's frame."""
TURN_COLUMNS = (
    Column("TURN"),
    Column("BY"),
    Column("TOKENS"),
    Column("VERSION"),
    Column("INSTANCE", dispensable=1),
    Column("WAITED", dispensable=2),
    Column("TEXT", least=20, wraps=True),
)
TOKEN_COLUMNS = (
    Column("TOKEN"),
    Column("ID"),
    Column("TEXT", least=8),
    Column("LOG-PROB"),
    Column("TRAINER", dispensable=3),
    Column("DIFFERENCE", dispensable=4),
    Column("REFERENCE", dispensable=5),
    Column("VALUE", dispensable=6),
    Column("VERSION", dispensable=1),
    Column("INSTANCE", dispensable=2),
)
SHOWN = 20
_TEXT = 200
"""Characters of a prompt or an answer in a line; of a prompt the last ones, which say what is asked."""


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only of this step.")
@click.option("--group", type=int, metavar="N", help="Only of this group.")
@click.option("--worst", is_flag=True, help="The lowest rewards first.")
@click.option("--best", is_flag=True, help="The highest rewards first.")
@click.option("--reward", metavar="CONDITION", help="Only of such a reward: '<0.2', '=1', '>=0.2,<0.4'.")
@click.option("--length", metavar="CONDITION", help="Only of so many tokens: '>=1000', '>=100,<200'.")
@click.option(
    "--outcome", metavar="WORD", help="Only of this outcome or end: trained, stale, length, policy_fault, …"
)
@click.option("--instance", metavar="NAME", help="Only what this instance generated some of.")
@click.option("--version", type=click.IntRange(min=0), metavar="N", help="Only what this version generated.")
@click.option("--quarantined", is_flag=True, help="Only what is quarantined.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=SHOWN, show_default=True, metavar="N", help="Samples."
)
@click.option("--steps", "only_steps", is_flag=True, help="Print which steps are kept.")
@click.option("--held-out", metavar="SET", help="Answers to a held-out set, of --version or the newest.")
@click.option(
    "--against", type=click.IntRange(min=0), metavar="N", help="With --held-out: beside this version's."
)
@click.option("--tokens", metavar="GROUP/SAMPLE", help="Print one sample of --step token by token.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as REST has it.")
def samples(
    session: CliContext,
    job: str | None,
    step: int | None,
    group: int | None,
    worst: bool,
    best: bool,
    reward: str | None,
    length: str | None,
    outcome: str | None,
    instance: str | None,
    version: int | None,
    quarantined: bool,
    limit: int,
    only_steps: bool,
    held_out: str | None,
    against: int | None,
    tokens: str | None,
    as_json: bool,
) -> None:
    """Print prompts and answers of a job's steps, the newest step first.

    They are Parquet files in the job's directory, which pandas and DuckDB read as they are: docs/samples.md. A sample's
    name is step/group/sample.
    """
    from gyre.observe.samples.query import SampleFilter, conditions_in

    if worst and best:
        raise click.UsageError("--worst and --best exclude each other.")
    if against is not None and held_out is None:
        raise click.UsageError("--against is for --held-out.")
    wanted = SampleFilter(
        step=step,
        group=group,
        reward=conditions_in(reward) if reward else (),
        tokens=conditions_in(length, "--length") if length else (),
        outcome=outcome,
        instance=instance,
        version=version,
        quarantined=True if quarantined else None,
    )
    with session.reader() as reader:
        found = reader.find(job)
        kept = reader.samples(found.job_id)
        if only_steps:
            _print_steps(kept, as_json)
        elif held_out is not None:
            answers = kept.held_out(held_out, version=version, against=against, limit=min(limit, 1000))
            if as_json:
                write_json(answers)
            else:
                _print_held_out(answers)
        elif tokens is not None:
            _print_tokens(kept.sample(*_named(kept, wanted, tokens)), as_json)
        else:
            order = "worst" if worst else "best" if best else "step"
            page = _pages(kept, wanted, order, limit)
            if as_json:
                write_json(page)
            else:
                _print_page(page)
        for problem in getattr(kept, "problems", {}).values():
            remark(problem)


def _pages(kept: SampleReader, wanted: SampleFilter, order: Any, limit: int) -> dict[str, Any]:
    """As many as asked for: what answers gives at most a thousand at a time."""
    page = kept.find(wanted, order=order, limit=min(limit, 1000))
    while len(page["samples"]) < min(limit, page["total"]):
        offset = len(page["samples"])
        more = kept.find(wanted, order=order, limit=min(limit - offset, 1000), offset=offset)["samples"]
        if not more:
            break
        page["samples"] += more
    return page


def _named(kept: SampleReader, wanted: SampleFilter, text: str) -> tuple[int, int, int]:
    """Step, group and sample of `STEP/GROUP/SAMPLE`, or of `GROUP/SAMPLE` in the step that is wanted, or in the newest
    that has it. Raises ConfigError and NotFound."""
    from dataclasses import replace

    from gyre.errors import ConfigError, NotFound

    parts = text.split("/")
    if len(parts) not in (2, 3) or not all(part.lstrip("-").isdecimal() for part in parts):
        raise ConfigError(f"--tokens {text!r}: expected GROUP/SAMPLE or STEP/GROUP/SAMPLE, such as 4/0.")
    *steps, group, sample = map(int, parts)
    if steps or wanted.step is not None:
        return steps[0] if steps else int(wanted.step or 0), group, sample
    found = kept.find(replace(wanted, group=group), limit=1)["samples"]
    if not found:
        raise NotFound(f"No sample of group {group} is kept.", hint="`gyre samples` lists those that are.")
    return found[0]["step"], group, sample


def _print_steps(kept: SampleReader, as_json: bool) -> None:
    found = kept.steps()
    if as_json:
        write_json(found)
        return
    write_table(
        [Column("STEP"), Column("SAMPLES"), Column("GROUPS"), Column("BYTES")],
        [(row["step"], row["samples"], row["groups"], row["bytes"]) for row in found["steps"]],
    )
    if found["quarantined"]:
        remark(f"{found['quarantined']} groups are quarantined: gyre samples --quarantined")
    for one in kept.held_out_sets()["sets"]:
        versions = ", ".join(map(str, one["versions"]))
        remark(f"held out, gyre samples --held-out {one['set']}: versions {versions}")


def _print_held_out(page: dict[str, Any]) -> None:
    short, against = stdout_is_terminal(), page["against"]
    columns = [Column("PROMPT", least=20, dispensable=1), Column("RIGHT ANSWER", least=8, dispensable=2)]
    of_sides = ([("before", against)] if against is not None else []) + [("now", page["version"])]
    for _, version in of_sides:
        columns += [Column(f"V{version}"), Column(f"ANSWER OF V{version}", least=20)]
    rows = []
    for one in page["prompts"]:
        cells = [_text_of(one["prompt"], short, end=True), _text_of(one["right_answer"], short)]
        for side, _ in of_sides:
            cells += _side(one[side], short)
        rows.append(("* " if one["changed"] else "  ", *cells) if against is not None else tuple(cells))
    write_table([Column(""), *columns] if against is not None else columns, rows)
    said = f"{len(rows)} of {page['total']} prompts of {page['set']}"
    if against is not None:
        worse = page["changed"] - page["better"]
        said += (
            f"; * {page['changed']} changed since version {against}: {page['better']} better, {worse} worse"
        )
        if page["unmatched"]:
            said += f"; {page['unmatched']} have no answer of version {against}"
    remark(f"{said}.")


def _side(side: dict[str, Any] | None, short: bool) -> tuple[str, str]:
    """What the samples of a prompt earned, and the first of them."""
    if side is None:
        return "", ""
    if side["right"] is None:
        verdict = "" if side["reward"] is None else number(side["reward"])
    elif side["count"] == 1:
        verdict = "right" if side["right"] else "wrong"
    else:
        verdict = f"{side['right']}/{side['count']} right"
    return verdict, _text_of(side["samples"][0]["answer"], short)


def _text_of(text: str | None, short: bool, *, end: bool = False) -> str:
    """In one line, and on a terminal its beginning or its `end`."""
    line = _printable(text)
    if not short or len(line) <= _TEXT:
        return line
    return f"…{line[-_TEXT:]}" if end else f"{line[:_TEXT]}…"


def _print_page(page: dict[str, Any]) -> None:
    rows = page["samples"]
    if not rows:
        remark("No sample is like that.")
        return
    short = stdout_is_terminal()
    rows = [{**row, **_of_session(row)} for row in rows]
    further = [one for one in FURTHER if any(row.get(one) is not None for row in rows)]
    write_table(
        [*COLUMNS, *(FURTHER[one] for one in further)],
        [(*_row(row, short), *(_further(row.get(one), short) for one in further)) for row in rows],
    )
    if len(rows) < page["total"]:
        remark(f"{len(rows)} of {page['total']} samples; --limit shows more.")


def _row(row: dict[str, Any], short: bool) -> tuple[Any, ...]:
    ended = row["finish_reason"]
    outcome = row["outcome"] if ended in ("", "stop") else f"{row['outcome']}, {ended}"
    return (
        f"{row['step']}/{row['group']}/{row['sample']}",
        "" if row["reward"] is None else number(row["reward"]),
        outcome,
        row["tokens"],
        _span(row["versions"]),
        " → ".join(_printable(name) for name, _ in groupby(name for name, _, _ in row["instances"])),
        _text_of(row["prompt"], short, end=True),
        _text_of(row["answer"], short),
    )


def _of_session(row: dict[str, Any]) -> dict[str, Any]:
    """The turns in a row of a session, and how the session ended; nothing of another sample."""
    session = row.get("session")
    if session is None:
        return {}
    return {"turns": session["turns_here"], "ended": _ended(session)}


def _ended(session: dict[str, Any]) -> str:
    return ": ".join(filter(None, (session["outcome"].replace("_", " "), session["reason"])))


def _print_session(sample: dict[str, Any]) -> None:
    """How the session of a row went, and its conversation; nothing of another sample."""
    session = sample.get("session")
    if session is None:
        return
    remark(_printable(session["sentence"]))
    if not sample["conversation"]:
        return
    ids = sample["token_ids"]
    rows = [
        (
            part["turn"],
            _by(part),
            part["end"] - part["start"],
            ", ".join(map(str, part["versions"])),
            ", ".join(map(_printable, part["instances"])),
            "" if part["waited_s"] is None else f"{part['waited_s']:.2f} s",
            _printable(part["text"])
            if part["text"] is not None
            else " ".join(map(str, ids[part["start"] : part["end"]])),
        )
        for part in sample["conversation"]
    ]
    write_table(TURN_COLUMNS, rows)
    click.echo()


def _by(part: dict[str, Any]) -> str:
    """Who put a part of a conversation there."""
    if not part["drawn"]:
        return "agent"
    return "policy" if part["trained"] else "policy, for an earlier row"


def _further(value: str | int | None, short: bool) -> str | int:
    return value if isinstance(value, int) else _text_of(value, short)


def _printable(text: str | None) -> str:
    """In one line, control characters escaped: a policy may answer what would move a terminal's cursor."""
    line = one_line(text or "")
    return (
        line if line.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in line)
    )


def _span(versions: list[Any]) -> str:
    numbers = sorted({version for version, _, _ in versions})
    if not numbers:
        return ""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _print_tokens(sample: dict[str, Any], as_json: bool) -> None:
    if as_json:
        write_json(sample)
        return
    remark(
        f"step {sample['step']}, group {sample['group']}, sample {sample['sample']}: {sample['outcome']}, "
        f"reward {'none' if sample['reward'] is None else number(sample['reward'])}"
    )
    if sample.get("right_answer") is not None:
        remark(f"right answer: {_printable(sample['right_answer'])}")
    _print_session(sample)
    ours, theirs = sample["logprobs"], sample["trainer_logprobs"]
    rows, mask = [], sample.get("mask")
    for at, token in enumerate(sample["token_ids"]):
        pieces = sample["pieces"]
        difference = ""
        if ours and theirs and None not in (ours[at], theirs[at]):
            difference = f"{theirs[at] - ours[at]:+.4f}"
        rows.append(
            (
                at,
                token,
                repr(pieces[at])[1:-1] if pieces else "",
                _at(ours, at),
                _at(theirs, at),
                difference,
                _at(sample["ref_logprobs"], at),
                _at(sample["values"], at),
                _of(sample["versions"], at),
                _of(sample["instances"], at),
                *([] if mask is None else ["yes" if mask[at] else "no"]),
            )
        )
    write_table(TOKEN_COLUMNS if mask is None else (*TOKEN_COLUMNS, DRAWN), rows)


def _at(values: list[float | None] | None, at: int) -> str:
    value = values[at] if values else None
    return "" if value is None else f"{value:.4f}"


def _of(runs: list[Any], at: int) -> str:
    return next((_printable(str(which)) for which, start, end in runs if start <= at < end), "")
