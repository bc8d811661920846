"""Where a gang's state came from stands in the incident that made it necessary; a lost optimizer is one of its own."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.failover import Scope
from gyre.failover import events as e
from tests.failover.histories import History


@pytest.fixture
def restarted(history: History) -> History:
    """A rank of the gang of two died, and both are back."""
    history.start_all()
    history.lose("actor-1")
    return history.start_all()


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_the_incident_says_where_the_state_came_from(restarted: History, source: str) -> None:
    restarted.report(e.GangRestored, role="actor", source=source, step=7, checkpoint_step=4, seconds=0.25)
    (incident,) = restarted.state.incidents.values()
    assert incident.evidence["restored"] == {
        "source": source,
        "step": 7,
        "checkpoint_step": 4,
        "seconds": 0.25,
    }


def test_a_later_restore_does_not_rewrite_an_incident_that_has_its_own(restarted: History) -> None:
    for step in (7, 9):
        restarted.report(e.GangRestored, role="actor", source="memory", step=step, checkpoint_step=4)
    (incident,) = restarted.state.incidents.values()
    assert incident.evidence["restored"]["step"] == 7


def test_weights_without_an_optimizer_are_an_incident(restarted: History) -> None:
    restarted.report(e.GangRestored, role="actor", source="instance", step=7, checkpoint_step=4)
    first, second = restarted.state.incidents.values()
    assert first.evidence["restored"]["source"] == "instance"
    assert (second.cause, second.scope, second.outcome) == ("checkpoint_lost", Scope.REGION, "recovered")
    assert "what its optimizer had learnt is lost" in second.decision


def test_a_damaged_checkpoint_is_an_incident_of_the_trainer(restarted: History) -> None:
    restarted.report(
        e.CheckpointDamaged, step=4, path="/checkpoints/4", problem="/checkpoints/4/part is missing", older=2
    )
    incident = list(restarted.state.incidents.values())[-1]
    assert (incident.cause, incident.outcome, incident.vertex) == (
        "checkpoint_damaged",
        "recovered",
        "trainer-0",
    )
    assert "go on from that of step 2" in incident.decision
    assert incident.evidence["error"] == "/checkpoints/4/part is missing"


def test_a_replay_that_gave_other_weights_is_an_incident_of_the_first_rank(restarted: History) -> None:
    error = "replaying step 5 gave weights bb, the ledger has aa"
    restarted.report(e.StepDiverged, role="actor", step=5, expected="aa", found="bb", error=error)
    incident = list(restarted.state.incidents.values())[-1]
    assert (incident.cause, incident.outcome, incident.vertex) == ("step_diverged", "recovered", "actor-0")
    assert incident.evidence["error"] == error


def numbered(history: History, number: int, *, gang: int, role: str = "actor") -> None:
    history.report(
        e.GangRestored,
        role=role,
        source="instance",
        step=7,
        checkpoint_step=4,
        seconds=None,
        gang=gang,
        number=number,
    )


def test_what_the_trainers_successor_tells_again_is_taken_once(restarted: History) -> None:
    numbered(restarted, 1, gang=2)
    restarted.lose("trainer-0")
    restarted.start_all()
    before = restarted.state
    numbered(restarted, 1, gang=2)
    assert restarted.state is before
    numbered(restarted, 1, gang=2, role="rollout")
    assert restarted.state.job.restored == {"actor": 1, "rollout": 1}, "each role by itself"


def test_passes_that_are_told_again_are_halved_once(restarted: History) -> None:
    def halved(number: int, role: str = "actor") -> None:
        restarted.report(e.PassesHalved, role=role, pass_tokens=2048, error="no memory left", number=number)

    halved(1)
    restarted.lose("trainer-0")
    restarted.start_all()
    before = restarted.state
    halved(1)
    assert restarted.state is before
    halved(2)
    assert restarted.state.job.halved == {"actor": 2}
    told = [one.evidence for one in restarted.state.incidents.values() if one.cause == "out_of_memory"]
    assert len(told) == 2


def test_activations_that_are_computed_again_are_told_with_the_size_of_passes(restarted: History) -> None:
    restarted.report(
        e.PassesHalved, role="actor", pass_tokens=2048, error="no memory left", number=1, recompute=True
    )
    (told,) = [one for one in restarted.state.incidents.values() if one.cause == "out_of_memory"]
    assert told.evidence == {"error": "no memory left", "pass_tokens": 2048, "recompute": True}
    assert told.decision == (
        "actor trains in passes of at most 2048 tokens whose activations are computed again from now on"
    )


def test_what_is_told_late_stands_in_the_incident_of_its_own_gang(restarted: History) -> None:
    """The ranks died again, and the trainer with them, before the first restore was heard of."""
    restarted.lose("actor-0")
    restarted.lose("trainer-0")
    restarted.start_all()
    numbered(restarted, 1, gang=2)
    numbered(restarted, 2, gang=3)
    of_actor = [one for one in restarted.state.incidents.values() if one.region == ("actor-0", "actor-1")]
    assert [(one.incarnation, "restored" in one.evidence) for one in of_actor] == [(1, True), (2, True)]
    lost = [one for one in restarted.state.incidents.values() if one.cause == "checkpoint_lost"]
    assert len(lost) == 2


def test_a_role_that_is_no_more_is_left_alone(restarted: History) -> None:
    before = restarted.state
    restarted.report(e.GangRestored, role="gone", source="instance", step=7, checkpoint_step=4)
    assert restarted.state.incidents == before.incidents


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(e.StepCompleted, {"version": 4}), (e.CheckpointCommitted, {"path": "/checkpoints/4"})],
    ids=["step", "checkpoint"],
)
def test_what_a_trainer_tells_again_is_taken_where_its_predecessor_was_not_heard(
    restarted: History, kind: type[e.StepCompleted | e.CheckpointCommitted], fields: dict[str, Any]
) -> None:
    restarted.report(kind, step=4, **fields)
    restarted.lose("trainer-0")
    restarted.start_all()
    before = restarted.state
    restarted.report(kind, step=4, again=True, **fields)
    assert restarted.state is before, "the journal has it"
    restarted.report(kind, step=5, again=True, **fields)
    job = restarted.state.job
    assert 5 in (job.step, job.checkpoint_step)
    assert restarted["trainer-0"].reported == 1
