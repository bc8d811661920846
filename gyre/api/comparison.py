"""Two to twenty jobs side by side: what their configurations differ in, and what came of it.

Steps are compared at the same step: the last that all of them have made. Pure: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from gyre.api.terminal.formats import duration, price
from gyre.api.terminal.run_end import held_out, ran_for
from gyre.failover.costs import cost_of, has_prices

MOST_JOBS = 20
"""As many as a chart can tell apart."""
RECENT = 10
"""Steps before the common one whose means are compared: one step is noise."""

COMPARED = (
    "reward_mean",
    "completion_tokens_mean",
    "cut_off_ratio",
    "entropy",
    "kl",
    "old_kl",
    "rollout_kl",
    "grad_norm",
    "flat_groups_ratio",
    "staleness_mean",
    "tokens_per_s",
    "seconds",
)
"""Names of `gyre.workloads.trainer.learning.metric_names.METRICS`."""

ABSENT = "–"
_NOT_COMPARED = ("name",)


@dataclass(frozen=True, slots=True)
class Compared:
    """`differences`: by the key of the configuration, each job's value (as text), where not all are equal. `metrics`:
    by name, each job's mean of the `RECENT` steps up to `step`; None where it has none. `outcomes`: by what is told,
    each job's text."""

    jobs: list[str]
    step: int
    differences: dict[str, list[str]]
    metrics: dict[str, list[float | None]]
    outcomes: dict[str, list[str]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    views: Sequence[Mapping[str, Any]],
    specs: Sequence[Mapping[str, Any]],
    steps: Sequence[Sequence[Mapping[str, Any]]],
    *,
    now: float,
) -> Compared:
    """Of each job its view, its configuration with every default, and the metrics of its steps, in the same order;
    `now` in seconds since 1970."""
    common = min((int(rows[-1]["step"]) if rows else 0 for rows in steps), default=0)
    metrics: dict[str, list[float | None]] = {}
    for name in COMPARED:
        means = [_mean(rows, name, common) for rows in steps]
        if any(mean is not None for mean in means):
            metrics[name] = means
    return Compared(
        jobs=[str(view["job"]["name"]) for view in views],
        step=common,
        differences=differences_of(specs),
        metrics=metrics,
        outcomes=_outcomes(views, now),
    )


def differences_of(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """By dotted key, the values of each configuration that are not the same in all."""
    flat = [_flat(spec) for spec in specs]
    keys = dict.fromkeys(key for one in flat for key in one)
    found = {}
    for key in keys:
        values = [one.get(key, ABSENT) for one in flat]
        if key not in _NOT_COMPARED and len(set(values)) > 1:
            found[key] = values
    return found


def _flat(value: Any, at: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        found: dict[str, str] = {}
        for key, inner in value.items():
            found |= _flat(inner, f"{at}.{key}" if at else str(key))
        return found
    return {at: str(value)}


def _mean(rows: Sequence[Mapping[str, Any]], name: str, until: int) -> float | None:
    values = [
        float(row[name])
        for row in rows
        if until - RECENT < int(row["step"]) <= until and isinstance(row.get(name), int | float)
    ]
    return fmean(values) if values else None


def _outcomes(views: Sequence[Mapping[str, Any]], now: float) -> dict[str, list[str]]:
    return {
        "phase": [str(view["job"]["phase"]) for view in views],
        "steps": [str(view["job"]["step"]) for view in views],
        "held-out": [", ".join(held_out(view)) or ABSENT for view in views],
        "tokens": [f"{view['training']['tokens']:,}" for view in views],
        "ran for": [duration(ran_for(view, now)) or ABSENT for view in views],
        "cost": [price(cost_of(view["job"], now)) if has_prices(view["job"]) else ABSENT for view in views],
        "incidents": [str(len(view["incidents"])) for view in views],
        "warnings": [", ".join(one["code"] for one in view["warnings"]) or ABSENT for view in views],
    }
