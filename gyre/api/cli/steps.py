"""`metrics`: what each step of a job measured, from the ledger, also when the cluster is gone."""

from __future__ import annotations

from typing import Any

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark, stdout_is_terminal, write_json, write_table
from gyre.api.terminal.text_tables import Column

SHOWN_STEPS = 20
"""Steps that are shown on a terminal without --last."""

COLUMNS = {
    "step": 0,
    "reward_mean": 0,
    "reward_std": 4,
    "loss": 2,
    "kl": 3,
    "old_kl": 8,
    "rollout_kl": 7,
    "entropy": 3,
    "grad_norm": 3,
    "lr": 9,
    "prompt_tokens_mean": 9,
    "completion_tokens_mean": 4,
    "completion_tokens_max": 8,
    "cut_off_ratio": 4,
    "flat_groups_ratio": 4,
    "staleness_max": 6,
    "tokens": 7,
    "tokens_per_s": 5,
    "seconds": 5,
}
"""Metrics, and how dispensable their columns are on a narrow terminal."""
_REWARDS = 3
"""Columns before those of the reward's components."""
_MOST_COMPONENTS = 8
"""Components that have a column; `--json` has all."""


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Print only the last N steps.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array with every metric of each step.")
def metrics(session: CliContext, job: str | None, last: int | None, as_json: bool) -> None:
    """Print the metrics of a job's steps: reward, loss, KL, entropy, lengths, speed.

    On a terminal the last 20 steps are shown, in a pipe all of them. docs/training.md explains the metrics; their names
    are the same in metrics.jsonl, REST and Prometheus.
    """
    if last is None and not as_json and stdout_is_terminal():
        last = SHOWN_STEPS
    with session.reader() as reader:
        found = reader.find(job)
        rows = reader.steps(found.job_id, last=last)
    if as_json:
        write_json(rows)
    elif not rows:
        remark(f"{found.name} has no optimizer step in its ledger.")
    else:
        from gyre.workloads.trainer.learning.metric_names import METRICS

        own = [
            (METRICS[name].head or name.upper().replace("_", " "), name, rank)
            for name, rank in COLUMNS.items()
        ]
        columns = [*own[:_REWARDS], *_components(rows), *own[_REWARDS:]]
        write_table(
            [Column(heading, dispensable=rank) for heading, _, rank in columns],
            [[_cell(row, name) for _, name, _ in columns] for row in rows],
        )


def _components(rows: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    """A column for each number that the reward functions returned beside the reward: the first so many."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("reward."))
    shown = [name for name in names if not name.endswith(".count")][:_MOST_COMPONENTS]
    return [(name.removeprefix("reward.").upper(), name, 1) for name in shown]


def _cell(row: dict[str, Any], name: str) -> str:
    from gyre.workloads.trainer.learning.metric_names import METRICS
    from gyre.workloads.trainer.learning.step_line import short

    value = row.get(name)
    if not isinstance(value, int | float):
        return ""
    if name in METRICS and METRICS[name].unit == "ratio":
        return f"{value:.0%}"
    return str(value) if isinstance(value, int) else short(value)
