"""An ended job goes on: everybody is new, and what was is not forgotten."""

from __future__ import annotations

import pytest

from gyre.failover import JobPhase, VertexPhase, state_from
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.state import Reason, rows_of
from tests.failover.histories import History, coordinator_of, spec_with

ROLES = {"trainer": 1, "actor": 2, "rollout": 2, "reward": 1}


@pytest.fixture
def ended() -> History:
    history = History(coordinator_of(spec_with())).submit().start_all()
    history.report(e.StepCompleted, step=1, version=1, metrics={})
    history.report(e.WeightsPublished, version=1, step=1, checksum="x", size_bytes=1)
    history.lose("rollout-1")
    history.start("rollout-1")
    history.decide(e.StopRequested("enough"))
    history.report(e.TrainerFinished, result={"steps": 1}, stopped=True)
    history.stop_all()
    assert history.state.job.phase is JobPhase.STOPPED
    return history


def test_everybody_starts_as_a_later_incarnation(ended: History) -> None:
    before = {one.id: one.incarnation for one in ended.state.vertices.values()}
    decision = ended.decide(e.JobContinued({**ROLES, "rollout": 3}))
    starts = {
        v: n for one in decision.commands if isinstance(one, c.StartRegion) for v, n in one.vertices.items()
    }
    assert starts == {**{name: number + 1 for name, number in before.items()}, "rollout-2": 1}
    job = ended.state.job
    assert (job.phase, job.reason, job.outcome, job.ended_at) == (
        JobPhase.STARTING,
        Reason.CONTINUED,
        None,
        None,
    )
    assert (job.step, job.version) == (1, 1), "it goes on from where it was"
    assert not any(ended.state.uses.values())
    assert ended.state.incidents, "what was is not forgotten"
    assert state_from(rows_of(ended.state)) == ended.state


def test_its_first_master_repairs_nothing_and_a_second_one_takes_over(ended: History) -> None:
    ended.decide(e.JobContinued(ROLES))
    known = len(ended.state.incidents)
    ended.decide(e.MasterStarted(2, pid=11, node="n0"))
    assert len(ended.state.incidents) == known
    ended.start_all()
    assert ended.state.job.phase is JobPhase.RUNNING
    ended.decide(e.MasterStarted(3, pid=12, node="n0"))
    assert len(ended.state.incidents) == known + 1


def test_news_of_before_is_no_news(ended: History) -> None:
    ended.decide(e.JobContinued(ROLES))
    state = ended.state
    ended.decide(e.VertexLost("actor-0", 1, "process_died", {}))
    ended.decide(e.VertexStopped("rollout-0", 1))
    assert ended.state.vertices == state.vertices


def test_fewer_may_go_on_and_the_others_stay_away(ended: History) -> None:
    ended.decide(e.JobContinued({**ROLES, "rollout": 1}))
    ended.decide(e.MasterStarted(2, pid=11, node="n0"))
    ended.start_all()
    assert ended["rollout-1"].phase is VertexPhase.STOPPED
    assert ended.state.job.phase is JobPhase.RUNNING


def test_a_job_that_runs_cannot_be_continued() -> None:
    history = History(coordinator_of(spec_with())).submit().start_all()
    state = history.state
    assert not history.decide(e.JobContinued(ROLES)).commands
    assert history.state == state
