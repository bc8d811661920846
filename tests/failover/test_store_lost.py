"""A store that was lost and is back: an incident that is over when it is written, and charged to nothing."""

from __future__ import annotations

import pytest

from gyre.failover import Cause, JobPhase, rows_of, state_from
from gyre.failover import events as e
from tests.failover.histories import History

BACK = e.StoreReturned("replaced", "The store /s/gyre.db was replaced.", lost_at=1003.0, away_s=41.5)


@pytest.fixture
def running(history: History) -> History:
    history.start_all().step()
    return history


def test_a_store_that_is_back_is_one_incident_that_is_over(running: History) -> None:
    before = running.state
    decision = running.decide(BACK)
    (lost,) = running.state.incidents.values()
    assert (lost.cause, lost.at, lost.recovered_at) == (Cause.STORE_LOST, 1003.0, running.now)
    assert lost.outcome == "recovered"
    assert lost.evidence == {"error": BACK.sentence, "kind": "replaced", "away_s": 41.5}
    assert decision.commands == ()
    assert running.state.vertices == before.vertices
    assert running.state.job == before.job
    assert not running.state.uses
    assert state_from(rows_of(running.state)) == running.state


def test_each_absence_is_an_incident_of_its_own(running: History) -> None:
    running.decide(BACK)
    running.decide(e.StoreReturned("missing", "The store /s/gyre.db is gone.", lost_at=1050.0, away_s=2.0))
    kinds = [one.evidence["kind"] for one in running.state.incidents.values()]
    assert sorted(kinds) == ["missing", "replaced"]


def test_a_vertex_that_recovers_meanwhile_goes_on_recovering(running: History) -> None:
    running.lose("rollout-0")
    running.decide(BACK)
    outcomes = {one.cause: one.outcome for one in running.state.incidents.values()}
    assert outcomes == {"process_died": "open", "store_lost": "recovered"}
    running.start_all()
    assert running.state.job.phase is JobPhase.RUNNING


def test_an_event_that_does_not_say_when_is_of_now(running: History) -> None:
    running.decide(e.StoreReturned("missing", "gone"))
    (lost,) = running.state.incidents.values()
    assert lost.at == lost.recovered_at == running.now
