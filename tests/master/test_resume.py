"""The real master takes up a job that had ended, and the whole history folds over the specs that were in force."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gyre.api.job_replay import coordinator_of
from gyre.api.resume import write_continuation
from gyre.config import JobSpec, parse_job
from gyre.config.changes import changes_between
from gyre.failover import JobPhase
from gyre.graph import compile_job
from tests.master.lives import JOB_ID, Job


def go_on(job: Job, change: Callable[[JobSpec], None]) -> None:
    """What `resume_job` writes."""
    before = compile_job(parse_job(job.store.job(JOB_ID).spec)).spec
    spec = before.model_copy(deep=True)
    change(spec)
    spec = compile_job(spec).spec
    plain = spec.model_dump(mode="json")
    job.store.update_job(JOB_ID, spec=plain, ended_at=None, phase="starting", url=None)
    changes = changes_between(before.model_dump(mode="json"), plain)
    write_continuation(job.store, JOB_ID, coordinator_of(spec), spec, changes)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_job_that_has_ended_goes_on_with_more_steps_and_another_layout(
    make_job: Callable[..., Job], stopped: bool
) -> None:
    job = make_job(steps=6)
    life = job.life()
    if stopped:
        life.at(3.0, lambda life: life.command("stop"))
    life.run()
    assert job.phase is (JobPhase.STOPPED if stopped else JobPhase.SUCCEEDED)
    done = len(job.world.steps)

    def change(spec: JobSpec) -> None:
        spec.run.steps = 12
        spec.roles["actor"].total = 3
        spec.roles["rollout"].total = 1
        spec.failover.vertex.max = 4

    go_on(job, change)
    job.world.trainer.steps = 12
    job.world.ended = False
    job.world.at(job.clock.monotonic() + 5.0, job.world.kill, "actor-2")
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert len(job.world.steps) == 12
    assert done < 12
    assert {one.vertex for one in job.world.spawned if one.incarnation == 1} >= {"actor-2"}
    assert [one.outcome for one in job.incidents] == ["recovered"]
    job.check()


def test_a_job_may_go_on_more_than_once(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=2)
    job.run()
    for steps in (4, 6):
        go_on(job, lambda spec, steps=steps: setattr(spec.run, "steps", steps))  # type: ignore[misc]
        job.world.trainer.steps = steps
        job.run()
        assert len(job.world.steps) == steps
        job.check()
    assert job.kinds.count("JobContinued") == 2
