"""Silence and stalls, at moments of a clock that is only a number here."""

from __future__ import annotations

import pytest

from gyre.config import JobSpec
from gyre.failover import (
    Cause,
    Observation,
    diagnose,
    forgiven,
    is_left_alone,
    silent_together,
)
from gyre.process_activity import ProcessLife
from tests.doubles.standing_job import small_spec


@pytest.fixture
def spec() -> JobSpec:
    spec = small_spec()
    spec.failover.silence_timeout_s = 10.0
    spec.roles["rollout"].stall_timeout_s = 30.0
    spec.roles["actor"].stall_timeout_s = 5.0
    return spec


def seen(vertex: str, *, heard_at: float = 0.0, busy: str = "", progressed_at: float = 0.0) -> Observation:
    return Observation(vertex, vertex.rpartition("-")[0], 3, heard_at, busy, 7, progressed_at)


@pytest.mark.parametrize(
    ("observation", "now", "cause"),
    [
        (seen("rollout-0"), 0.0, None),
        (seen("rollout-0"), 10.0, None),
        (seen("rollout-0"), 10.001, Cause.SILENT),
        (seen("rollout-0", heard_at=95.0), 100.0, None),
        (seen("rollout-0", heard_at=100.0, busy="generate", progressed_at=70.0), 100.0, None),
        (seen("rollout-0", heard_at=100.0, busy="generate", progressed_at=69.9), 100.0, Cause.STALLED),
        (seen("rollout-0", heard_at=100.0, busy="", progressed_at=0.0), 100.0, None),
        (seen("actor-0", heard_at=100.0, busy="update", progressed_at=94.0), 100.0, Cause.STALLED),
        (seen("actor-0", heard_at=89.0, busy="update", progressed_at=0.0), 100.0, Cause.SILENT),
    ],
    ids=[
        "just heard",
        "at the limit",
        "past the limit",
        "heard lately",
        "at the stall limit",
        "past the stall limit",
        "idle is no stall",
        "each role its own limit",
        "silence comes first",
    ],
)
def test_what_is_wrong_with_a_vertex(
    spec: JobSpec, observation: Observation, now: float, cause: Cause | None
) -> None:
    found = diagnose({observation.vertex: observation}, spec, now)
    assert [suspicion.cause for suspicion in found] == ([] if cause is None else [cause])


def test_a_suspicion_says_what_was_seen(spec: JobSpec) -> None:
    [silent] = diagnose({"rollout-0": seen("rollout-0")}, spec, 12.0)
    assert (silent.vertex, silent.incarnation, silent.after_s) == ("rollout-0", 3, 12.0)
    assert silent.detail == "no report for 12.0 s (limit 10 s)"
    [stalled] = diagnose({"actor-0": seen("actor-0", heard_at=9.0, busy="update")}, spec, 9.0)
    assert stalled.detail == "update made no progress for 9.0 s (limit 5 s)"


def test_the_worst_comes_first(spec: JobSpec) -> None:
    observations = {name: seen(name, heard_at=at) for name, at in (("rollout-0", 50.0), ("rollout-1", 20.0))}
    assert [found.vertex for found in diagnose(observations, spec, 100.0)] == ["rollout-1", "rollout-0"]


@pytest.mark.parametrize(
    ("life", "left"),
    [
        (ProcessLife.BUSY, True),
        (ProcessLife.HUNG, True),
        (ProcessLife.STOPPED, False),
        (ProcessLife.DEAD, False),
    ],
)
def test_a_silent_process_that_is_neither_stopped_nor_dead_is_left_alone_until_its_stall_timeout(
    spec: JobSpec, life: ProcessLife, left: bool
) -> None:
    for now, over in ((29.0, False), (31.0, True)):
        [found] = diagnose({"rollout-0": seen("rollout-0")}, spec, now)
        assert is_left_alone(found, life, spec) is (left and not over)


def test_an_observer_that_stood_still_heard_nobody(spec: JobSpec) -> None:
    late = forgiven(seen("rollout-0", heard_at=1.0, progressed_at=1.0), late_s=30.0, now=32.0)
    assert (late.heard_at, late.progressed_at) == (31.0, 31.0)
    assert diagnose({"rollout-0": late}, spec, 40.0) == []
    assert forgiven(late, late_s=30.0, now=33.0).heard_at == 33.0, "nobody is heard in the future"


def test_several_silent_vertices_of_a_machine_say_that_it_is_the_machine() -> None:
    assert silent_together(1, 5, "n0") == ""
    assert silent_together(3, 5, "n0") == (
        "3 of 5 vertices on n0 are silent at once: the machine is busy or cut off"
    )
