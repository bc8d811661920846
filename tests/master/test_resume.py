"""The real master takes up a job that had ended, and the whole history folds over the specs that were in force."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.api.orphaned_jobs import end_lost_job
from gyre.api.resume import age_of_copy, claim, give_back, write_continuation
from gyre.config import JobSpec, parse_job
from gyre.config.changes import changes_between
from gyre.errors import Conflict, Fenced
from gyre.failover import JobPhase
from gyre.graph import compile_job
from gyre.master.store_notes import forget_mark, read_mark, write_mark
from gyre.store import StoreMark
from tests.master.lives import JOB_ID, Job


def go_on(job: Job, change: Callable[[JobSpec], None]) -> None:
    """What `resume_job` writes."""
    before = compile_job(parse_job(job.store.job(JOB_ID).spec)).spec
    spec = before.model_copy(deep=True)
    change(spec)
    spec = compile_job(spec).spec
    changes = changes_between(before.model_dump(mode="json"), spec.model_dump(mode="json"))
    epoch = claim(job.store, job.store.job(JOB_ID), spec, "127.0.0.1:1")
    write_continuation(job.store, JOB_ID, epoch, spec, changes)


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


def test_of_two_who_have_it_go_on_one_is_refused(make_job: Callable[..., Job]) -> None:
    """The second one cancelled the starts of the first."""
    job = make_job(steps=2)
    job.run()
    spec = compile_job(parse_job(job.store.job(JOB_ID).spec)).spec
    row = job.store.job(JOB_ID)
    first = claim(job.store, row, spec, "")
    second = claim(job.store, row, spec, "")  # at the same moment
    with pytest.raises(Fenced):
        write_continuation(job.store, JOB_ID, first, spec, {})
    write_continuation(job.store, JOB_ID, second, spec, {})
    pending = job.journal.pending_commands()
    assert pending
    with pytest.raises(Conflict, match="goes on already"):
        claim(job.store, row, spec, "")
    assert job.journal.pending_commands() == pending


def test_who_could_not_go_on_is_as_it_was(make_job: Callable[..., Job]) -> None:
    job = make_job(steps=2)
    job.run()
    row = job.store.job(JOB_ID)
    spec = compile_job(parse_job(row.spec)).spec.model_copy(deep=True)
    spec.failover.vertex.max = 1
    claim(job.store, row, spec, "")
    assert job.store.job(JOB_ID).live
    give_back(job.store, row)
    end_lost_job(job.store, job.store.job(JOB_ID))
    after = job.store.job(JOB_ID)
    assert (after.spec, after.phase, after.live) == (row.spec, row.phase, False)
    job.check()


def test_resume_says_how_old_a_copy_of_the_store_is(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", steps=2)
    job.run()
    mark = read_mark(job.folder)
    assert mark is not None
    assert age_of_copy(job.store, job.folder) == [], "it is the job's own"
    write_mark(job.folder, StoreMark(mark.store_id, 1_000_000))
    (said,) = age_of_copy(job.store, job.folder)
    assert "is an older copy: it holds" in said
    assert "1000000 were seen" in said
    forget_mark(job.folder)
    assert age_of_copy(job.store, job.folder) == []
    job.store.close()
