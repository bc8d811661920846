"""`reward`: a reward function tried on the rows of a data set. Needs neither Ray nor torch, and starts no job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from gyre.api.cli.output import remark, say, write_json, write_table

_MOST_COLUMNS = 6
"""Numbers beside the reward that have columns of their own; more of them stand in one."""


@click.command()
@click.argument("functions", metavar="FUNCTION[=WEIGHT]...", nargs=-1, required=True)
@click.argument("data", type=click.Path(path_type=Path))
@click.option(
    "--answer",
    "--completion",
    "completion",
    metavar="TEXT",
    help="Completion to score. By default each row's own answer is scored, and an empty completion.",
)
@click.option(
    "--rows",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    metavar="N",
    help="Number of rows to score; 0 scores all.",
)
@click.option(
    "--signature",
    type=click.Choice(["auto", "sample", "batch", "verl", "trl", "openrlhf"]),
    default="auto",
    show_default=True,
    metavar="FORM",
    help="Form of the function: sample, batch, verl, trl or openrlhf; auto decides by its parameters.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for one sample.",
)
@click.option("--json", "as_json", is_flag=True, help="Print rows and summary as one JSON object.")
@click.pass_context
def reward(
    ctx: click.Context,
    functions: tuple[str, ...],
    data: Path,
    completion: str | None,
    rows: int,
    signature: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Score rows of DATA with FUNCTION, as a job with `config.reward.function` would.

    FUNCTION is path/to/file.py:function, package.module:function, exact_match or math_verify. Of several the reward is
    the weighted sum, as with `config.reward.functions`. DATA is a folder that `gyre data prepare` made, or a file of
    rows.
    """
    from gyre.api.reward_trial import try_reward
    from gyre.config.plugins import on_path
    from gyre.config.sections import RewardSettings, read_section

    section = {**_functions(functions, signature), "timeout_s": timeout_s, "attempts": 1}
    with on_path([os.getcwd()]):
        found = try_reward(
            read_section(RewardSettings, {"reward": section}, "reward"), data, completion, rows
        )
    if as_json:
        write_json(found.as_dict())
    else:
        _show(found)
        say(found.summary())
    for warning in found.warnings():
        remark(f"warning: {warning}")
    if found.failed:
        ctx.exit(1)


def _functions(given: tuple[str, ...], signature: str) -> dict[str, Any]:
    """One function, or several with their weights, as `config.reward` has them."""
    parts = []
    for text in given:
        function, _, weight = text.rpartition("=")
        try:
            parts.append({"function": function, "weight": float(weight), "signature": signature})
        except ValueError:  # no weight, or a path with "="
            parts.append({"function": text, "signature": signature})
    if len(parts) == 1 and "weight" not in parts[0]:
        return parts[0]
    return {"functions": parts}


def _show(found: Any) -> None:
    from gyre.api.terminal.text_tables import Column

    columns = [Column(name) for name in ("row", "prompt", "completion", "answer")]
    columns += [Column(name) for name in (("reward",) if found.own_text else ("reward", "empty"))]
    names = list(dict.fromkeys(name for row in found.rows for name in row.more))
    more = len(names) > _MOST_COLUMNS
    columns += [Column("more")] if more else [Column(name) for name in names]
    write_table(
        columns,
        [
            [
                str(row.row),
                _tail(row.prompt),
                _tail(row.completion),
                _tail("" if row.answer is None else str(row.answer)),
                _number(row.reward),
                *([] if found.own_text else [_number(row.empty)]),
                *([_all_of(row.more)] if more else [_given(row.more.get(name)) for name in names]),
            ]
            for row in found.rows
        ],
    )
    for row in found.rows:
        if row.error:
            remark(f"row {row.row}: {row.error}")


def _all_of(more: dict[str, float]) -> str:
    return " ".join(f"{name}={value:g}" for name, value in more.items())


def _given(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _number(value: float | None) -> str:
    return "failed" if value is None else f"{value:g}"


def _tail(text: str, most: int = 40) -> str:
    """The end of a text, on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most else f"…{flat[1 - most :]}"
