"""`trace`: a job's course, or that of a step and its samples, as a Chrome trace or as traces of OpenTelemetry, from the
store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark, write_json

if TYPE_CHECKING:
    from gyre.api.reader import Found, JobReader
    from gyre.observe.timeline import Timeline
    from gyre.observe.trace import SampleWay

STEPS_BEFORE = 2
"""A step's samples were begun while the steps before it were trained."""

MOST_WAYS = 64
"""Samples of a step whose ways are shown without --sample: as many threads as anybody looks through."""


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("--step", type=click.IntRange(min=1), metavar="N", help="Only this step, and what led to it.")
@click.option("--sample", metavar="GROUP/SAMPLE", help="With --step: only this sample's way through it.")
@click.option(
    "--otlp",
    metavar="FILE|URL",
    help="As traces of OpenTelemetry, one for each step: into this file, or to the collector at http://HOST:4318.",
)
def trace(
    session: CliContext, job: str | None, step: int | None, sample: str | None, otlp: str | None
) -> None:
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
    if otlp is not None:
        _write_otlp(found, timeline, [one for one in steps if step in (None, one["step"])], ways, otlp)
        return
    write_json(trace_of(timeline, steps, ways, name=found.name))
    remark(
        f"{len(timeline.lanes)} lanes, {len(steps)} steps. Open it at ui.perfetto.dev, or in chrome://tracing."
    )


def _write_otlp(
    job: Found, timeline: Timeline, steps: Sequence[dict[str, Any]], ways: Sequence[SampleWay], to: str
) -> None:
    from gyre.errors import ConfigError
    from gyre.observe.otlp import otlp_of
    from gyre.observe.otlp_export import is_collector, send

    request = otlp_of(timeline, steps, ways, job_id=job.job_id, name=job.name)
    if is_collector(to):
        remark(f"{send(request, to)} spans of {len(steps)} steps sent.")
        return
    try:
        Path(to).write_text(json.dumps(request, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"--otlp {to}: cannot be written ({error.strerror}).") from None
    remark(f"{len(steps)} steps in {to}, as OTLP's JSON.")


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
        return []  # none are kept; the step itself is shown all the same
    return [way(item) for item in page["samples"]]
