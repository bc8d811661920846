"""`trace`: a job's course, or that of a step and its samples, as a Chrome trace, from the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import Session, verb
from gyre.api.cli.output import remark, write_json

if TYPE_CHECKING:
    from gyre.api.reader import JobReader
    from gyre.observe.trace import SampleWay

STEPS_BEFORE = 2
"""A step's samples were begun while the steps before it were trained."""

MOST_WAYS = 64
"""Samples of a step whose ways are told without --sample: as many threads as anybody looks through."""


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Only this step, and what led to it.")
@click.option("--sample", metavar="GROUP/SAMPLE", help="With --step: only this sample's way through it.")
def trace(session: Session, job: str | None, step: int | None, sample: str | None) -> None:
    """Print a job's course as a Chrome trace: `gyre trace > trace.json` opens in Perfetto.

    Lanes are roles and their vertices; arrows lead from generation to the step that trained it. It works without the
    cluster.
    """
    from gyre.errors import NotFound
    from gyre.observe.timeline import timeline_from
    from gyre.observe.trace import trace_of

    wanted = parse_sample(sample, step)
    with session.reader() as reader:
        found = reader.find(job)
        steps, since, until = _steps_around(reader, found.job_id, step)
        if step is not None and not any(one["step"] == step for one in steps):
            raise NotFound(
                f"Job {found.name} has not trained step {step}.", hint="`gyre metrics` lists its steps."
            )
        timeline = timeline_from(reader.timeline(found.job_id, since=since, until=until))
        ways = _ways(reader, found.job_id, step, wanted) if step is not None else []
    write_json(trace_of(timeline, steps, ways, name=found.name))
    remark(
        f"{len(timeline.lanes)} lanes, {len(steps)} steps. Open it at ui.perfetto.dev, or in chrome://tracing."
    )


def parse_sample(text: str | None, step: int | None) -> tuple[int, int] | None:
    """`--sample` as group and sample. Raises UsageError for anything else."""
    if text is None:
        return None
    group, _, sample = text.partition("/")
    if not (group.isdecimal() and sample.isdecimal()):
        raise click.UsageError(f"--sample {text}: expected GROUP/SAMPLE, such as 12/0.")
    if step is None:
        raise click.UsageError("--sample needs --step: a sample is trained in a step.")
    return int(group), int(sample)


def _steps_around(
    reader: JobReader, job_id: str, step: int | None
) -> tuple[list[dict[str, Any]], float | None, float | None]:
    """The steps, and from when to when the time line goes."""
    if step is None:
        return reader.steps(job_id), None, None
    near = [one for one in reader.steps(job_id, after=max(0, step - STEPS_BEFORE - 1)) if one["step"] <= step]
    times = [one for one in near if isinstance(one.get("at"), int | float)]
    if not times:
        return near, None, None
    first = times[0]
    return near, first["at"] - float(first.get("seconds") or 0.0), times[-1]["at"]


def _ways(reader: JobReader, job_id: str, step: int, wanted: tuple[int, int] | None) -> Sequence[SampleWay]:
    """The ways of the step's samples, as far as they are kept. Raises NotFound for one sample that is not."""
    from gyre.errors import NotFound
    from gyre.observe.samples.query import SampleFilter
    from gyre.observe.trace import SampleWay

    def way(item: dict[str, Any]) -> SampleWay:
        return SampleWay(
            step,
            item["group"],
            item["sample"],
            [tuple(run) for run in item["instances"]],
            [tuple(run) for run in item["versions"]],
            item["reward"],
        )

    if wanted is not None:
        return [way(reader.samples(job_id).sample(step, *wanted))]
    try:
        page = reader.samples(job_id).find(SampleFilter(step=step), limit=MOST_WAYS)
    except NotFound:
        return []  # none are kept; the step itself is told all the same
    return [way(item) for item in page["samples"]]
