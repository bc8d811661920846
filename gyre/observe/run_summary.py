"""A run in one row: what a list of jobs shows of each, summed up of its spec, its state and a few of its steps.

Invariants:
- *derived*: the store keeps a summary so that a list of a thousand jobs reads no journal; it says nothing that the
  journal, the ledger and the spec do not say, and is made anew where it is missing or behind (`gyre.store.listing`);
- *of one size*: it reads at most `POINTS` steps and one more, however many the job has made;
- *nothing is made up*: what is not known is None, and never 0.

This module must not know who lists the jobs, nor how.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from statistics import median
from typing import Any, Literal

from gyre.config import FLEET
from gyre.config.model_path import model_folder
from gyre.errors import StoreError
from gyre.failover import JobState
from gyre.failover.costs import cost_of, has_prices
from gyre.failover.state import fields_of
from gyre.observe.run_lines import FORM, NOT_THE_EXPERIMENT, POINTS, HeldOut, RunSummary
from gyre.store import Store

DIGITS = 4
"""Significant digits of a kept reward: a curve of 30 pixels' height shows two."""

Summary = dict[str, Any]
"""A `RunSummary` as plain data."""


def summary_of(
    state: JobState, spec: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], *, now: float = 0.0
) -> Summary:
    """The summary of a job in this state, with this spec (as plain data) and these of its steps, in order. `now`, in
    seconds since 1970, is when one that has not ended is looked at."""
    job, last = state.job, state.training.last
    record = fields_of(job)
    found = RunSummary(
        step=job.step,
        version=job.version,
        started_at=job.started_at,
        message=job.message,
        ran_since=state.training.continued_at or job.submitted_at or None,
        steps=_steps_asked(spec),
        recipe=str(spec.get("recipe") or ""),
        model=model_of(spec),
        seed=_seed(spec),
        config=experiment_of(spec),
        reward=_finite(last.get("reward_mean")),
        rewards=[_short(_finite(one.get("reward_mean"))) for one in steps],
        held_out=_best(state),
        tokens_per_s=_median(_warm(steps, state.training.continued_at), "tokens_per_s"),
        cost=round(cost_of(record, max(now, job.ended_at or 0.0)), 6) if has_prices(record) else None,
    )
    return asdict(found)


def summed_up(store: Store, job_id: str, spec: Mapping[str, Any], state: JobState) -> Summary:
    """The summary of a job of the store in this state. Raises StoreError."""
    return summary_of(state, spec, store.ledger(job_id).sparse_metrics(POINTS), now=time.time())


def keep_summary(store: Store, job_id: str, spec: Mapping[str, Any], state: JobState, *, seq: int) -> Summary:
    """Sum up a job that has ended, in this state after event `seq`, and keep it for the lists to come. A store that
    cannot be written keeps nothing: the next list sums it up anew. Raises StoreError where it cannot be read."""
    summary = summed_up(store, job_id, spec, state)
    with contextlib.suppress(StoreError):
        store.listing.keep_summary(job_id, seq=seq, form=FORM, body=summary)
    return summary


def model_of(spec: Mapping[str, Any]) -> str:
    """The model's name: the last part of its folder, or the small decoder's shape as `2 x 64`; "" where none is
    named."""
    config = _mapping(spec.get("config"))
    _, path = model_folder(config)
    if path:
        return PurePosixPath(path).name or path
    shape = _mapping(config.get("model"))
    layers, hidden = shape.get("layers"), shape.get("hidden")
    return f"{layers} x {hidden}" if isinstance(layers, int) and isinstance(hidden, int) else ""


def experiment_of(spec: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits that are equal for specs that differ in their seed alone, or in nothing that is of the
    experiment."""
    kept = {key: value for key, value in spec.items() if key not in NOT_THE_EXPERIMENT}
    config = {key: value for key, value in _mapping(kept.get("config")).items() if key != "seed"}
    text = json.dumps({**kept, "config": config}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _steps_asked(spec: Mapping[str, Any]) -> int | None:
    """A user's own trainer and a fleet's keeper say themselves what a step is."""
    steps = _mapping(spec.get("run")).get("steps")
    counts_own = not spec.get("recipe") or spec.get("recipe") == FLEET
    return steps if isinstance(steps, int) and steps > 0 and not counts_own else None


def _seed(spec: Mapping[str, Any]) -> int | None:
    """Where a recipe's job gives none, it is 0; whether a user's own trainer has one is not known."""
    seed = _mapping(spec.get("config")).get("seed", 0 if spec.get("recipe") else None)
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def _best(state: JobState) -> list[HeldOut]:
    """Accuracies where the last evaluation of a set has one, else mean rewards; of equal ones the first."""
    sets: dict[str, list[Any]] = {}
    for one in sorted(state.evaluations.values(), key=lambda one: (one.set, one.version)):
        sets.setdefault(one.set, []).append(one)
    found: list[HeldOut] = []
    for name, rows in sets.items():
        last = rows[-1]
        unit: Literal["accuracy", "reward"] = "accuracy" if last.accuracy is not None else "reward"
        values = [
            (value, row)
            for row in rows
            if (unit == "reward" or (row.threshold, row.right_by) == (last.threshold, last.right_by))
            and (value := _finite(row.accuracy if unit == "accuracy" else row.reward_mean)) is not None
        ]
        if values:
            value, best = max(values, key=lambda one: (one[0], -one[1].version))
            newest, newest_row = values[-1]
            found.append(
                HeldOut(
                    set=name,
                    unit=unit,
                    value=value,
                    version=best.version,
                    right_by=best.right_by if unit == "accuracy" else "",
                    components=dict(best.components),
                    last=newest,
                    last_version=newest_row.version,
                )
            )
    return found


def _warm(steps: Sequence[Mapping[str, Any]], continued_at: float | None) -> Sequence[Mapping[str, Any]]:
    """The steps without the first of all and the first since the job went on."""
    again = next(
        (at for at, one in enumerate(steps) if continued_at and one.get("at", 0.0) >= continued_at), 0
    )
    return [one for at, one in enumerate(steps) if at not in (0, again)]


def _median(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [value for one in steps if (value := _finite(one.get(name))) is not None]
    return round(median(values), 1) if values else None


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
