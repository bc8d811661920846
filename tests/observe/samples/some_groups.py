"""Groups to be kept, and a folder that has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gyre.config import SamplesSpec
from gyre.observe.samples.files import SampleFiles
from gyre.observe.samples.writer import SampleWriter
from gyre.rollouts.samples import Group, InstanceRun, Sample, VersionRun
from tests.waits import GENEROUS_S


def sample(
    tokens: Sequence[int] = (5, 6, 7), reward: float | None = 1.0, *, version: int = 0, **more: Any
) -> Sample:
    count = len(tokens)
    return Sample(
        np.array(tokens, np.int32),
        (-np.arange(1, count + 1) / 3).astype(np.float32),
        more.pop("versions", (VersionRun(version, 0, count),)),
        reward=reward,
        instances=more.pop("instances", (InstanceRun("rollout-0", 0, count),)),
        **more,
    )


def group(number: int, *samples: Sample, **meta: Any) -> Group:
    return Group(number, np.array([1, number + 3], np.int32), meta, list(samples) or [sample(), sample()])


def written(folder: Path, write: Callable[[SampleWriter], None], **knobs: Any) -> list[str]:
    """Write into the folder what the function hands over; returns what was said."""
    said: list[str] = []
    settings = knobs.pop("settings", SamplesSpec())
    folder.parent.mkdir(parents=True, exist_ok=True)  # the job's directory
    writer = SampleWriter(folder, settings, say=said.append, **{"spare_bytes": 0, **knobs})
    writer.begin(knobs.pop("earlier", None))
    write(writer)
    assert writer.end(within_s=GENEROUS_S)
    return said


def kept(folder: Path, steps: dict[int, list[Group]], **knobs: Any) -> SampleFiles:
    """A reader of a folder with these groups, trained at these steps."""

    def write(writer: SampleWriter) -> None:
        for step, groups in steps.items():
            writer.step_recorded(step, groups)
            wait_until_idle(writer)

    assert written(folder, write, **knobs) == []
    return SampleFiles(folder)


def wait_until_idle(writer: SampleWriter) -> None:
    """All that was handed over is written or left out; else a step more may find the queue full."""
    writer._queue.join()
