"""Machines: those on which too much dies are left alone, and those that are drained are left in order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre.config import Budget
from gyre.errors import Conflict, NotFound
from gyre.failover import Cause, Scope, VertexPhase, state_from
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.state import Reason, rows_of
from tests.failover.histories import History, coordinator_of, spec_with

A, B = "a" * 56, "b" * 56


@pytest.fixture
def history() -> History:
    """Everybody runs, the second rollout and the reward on machine B, the others on A."""
    spec = spec_with(machine=Budget(max=3, window_s=600), vertex=Budget(max=99, window_s=600))
    history = History(coordinator_of(spec)).submit()
    for vertex in list(history.state.vertices):
        history.decide(
            e.VertexStarted(vertex, 1, pid=7, node=B if vertex in ("rollout-1", "reward-0") else A)
        )
    return history


def die(history: History, vertex: str, node: str = B, cause: str = "process_died") -> None:
    """It dies on the machine, and comes up there again."""
    incarnation = history[vertex].incarnation
    history.decide(e.VertexLost(vertex, incarnation, cause, {"error": "died"}, node=node))
    history.decide(e.VertexStarted(vertex, incarnation + 1, pid=8, node=node))


# -- bad machines -----------------------------------------------------------------------------------


def test_a_machine_where_three_died_is_left_alone_for_a_time_that_doubles(history: History) -> None:
    lengths = []
    for _ in range(3):
        for vertex in ("rollout-1", "reward-0", "rollout-1"):
            die(history, vertex)
        machine = history.state.machines[B]
        told = next(
            one
            for one in history.state.incidents.values()
            if one.cause == Cause.BAD_PLACE and one.at > history.now - 3
        )
        lengths.append(round(machine.left_until - told.at))
        assert told.outcome == "left alone"
        assert told.evidence["machine"] == B
    assert lengths == [60, 120, 240]
    assert machine.is_closed(history.now)
    assert not machine.is_closed(machine.left_until)
    assert state_from(rows_of(history.state)) == history.state


@pytest.mark.parametrize("cause", ["node_lost", "stalled"], ids=["the machine went", "it waited for another"])
def test_deaths_that_are_not_the_machine_s_fault_do_not_count(history: History, cause: str) -> None:
    for _ in range(5):
        die(history, "rollout-1", cause=cause)
    assert not history.state.machines


def test_exceptions_of_the_user_s_code_do_not_count(history: History) -> None:
    for _ in range(3):
        incarnation = history["reward-0"].incarnation
        history.decide(e.VertexLost("reward-0", incarnation, "process_died", {}))
        history.decide(e.VertexStartFailed("reward-0", incarnation + 1, error="no", user_code=True, node=B))
        history.start("reward-0")
    assert not history.state.machines


def test_deaths_long_ago_do_not_count(history: History) -> None:
    for _ in range(5):
        die(history, "rollout-1")
        history.now += 400
    assert history.state.machines[B].left_until == 0.0


def test_an_older_history_does_not_know_machines(history: History) -> None:
    """Its events name none."""
    for _ in range(5):
        die(history, "rollout-1", node="")
    assert not history.state.machines


# -- notices ----------------------------------------------------------------------------------------


def test_who_is_drained_leaves_in_order_and_starts_elsewhere_and_nothing_is_paid(history: History) -> None:
    decision = history.decide(e.DrainRequested(node=B, reason="spot notice", by="ray"))
    stopped = [command for command in decision.commands if isinstance(command, c.StopVertex)]
    assert {command.vertex for command in stopped} == {"rollout-1", "reward-0"}
    assert all(command.grace_s > 0 for command in stopped)
    assert any(isinstance(command, c.UpdateMembership) for command in decision.commands)
    assert history.state.machines[B].draining == "spot notice"
    decision = history.decide(e.VertexStopped("rollout-1", 1))
    [start] = [command for command in decision.commands if isinstance(command, c.StartRegion)]
    assert start.vertices == {"rollout-1": 2}
    assert history["rollout-1"].reason is Reason.DRAINED
    history.decide(e.VertexStarted("rollout-1", 2, pid=9, node=A))
    assert not history.state.uses
    assert not history.state.incidents
    assert history["rollout-1"].restarts == 0


def test_ranks_of_a_gang_are_started_elsewhere_together(history: History) -> None:
    decision = history.decide(e.DrainRequested(node=A, reason="maintenance"))
    starts = [command for command in decision.commands if isinstance(command, c.StartRegion)]
    assert [sorted(start.vertices) for start in starts] == [["actor-0", "actor-1"]]
    [incident] = history.state.incidents.values()
    assert (incident.cause, incident.scope) == (Cause.DRAINED, Scope.REGION)
    assert not history.state.uses
    assert history["trainer-0"].phase is VertexPhase.RUNNING, "with SQLite it stays where its ledger is"


def test_with_another_store_the_trainer_moves_too() -> None:
    spec = spec_with()
    spec.store.url = "postgresql+psycopg://x/y"
    history = History(coordinator_of(spec)).submit()
    for vertex in list(history.state.vertices):
        history.decide(e.VertexStarted(vertex, 1, pid=7, node=A))
    decision = history.decide(e.DrainRequested(node=A))
    starts = [one.region for one in decision.commands if isinstance(one, c.StartRegion)]
    assert sorted(starts) == ["actor-0", "trainer-0"]


def test_who_comes_up_on_a_drained_machine_leaves_too(history: History) -> None:
    coordinator = history.coordinator
    history.lose("rollout-1")
    history.decide(e.DrainRequested(node=B))
    assert coordinator.to_drain_again(history.state) == []
    history.decide(e.VertexStarted("rollout-1", 2, pid=9, node=B))
    assert coordinator.to_drain_again(history.state) == [B]
    history.decide(e.DrainRequested(node=B, by="master"))
    assert history["rollout-1"].phase is VertexPhase.STOPPING
    assert coordinator.to_drain_again(history.state) == []


def test_one_vertex_is_drained_and_goes_elsewhere(history: History) -> None:
    history.decide(e.DrainRequested(vertex="rollout-1"))
    history.decide(e.VertexStopped("rollout-1", 1))
    assert history["rollout-1"].avoids == B
    assert not history.state.machines, "others may be placed there"
    assert state_from(rows_of(history.state)) == history.state
    history.decide(e.VertexStarted("rollout-1", 2, pid=9, node=A))
    assert history["rollout-1"].avoids == ""


def test_what_is_drained_can_be_used_again(history: History) -> None:
    history.decide(e.DrainRequested(vertex="rollout-1"))
    history.decide(e.VertexStopped("rollout-1", 1))
    history.decide(e.UndrainRequested(vertex="rollout-1"))
    assert history["rollout-1"].avoids == ""
    history.decide(e.DrainRequested(node=B))
    history.decide(e.UndrainRequested(node=B))
    assert not history.state.machines[B].is_closed(history.now)


def test_what_cannot_be_drained_says_why(history: History) -> None:
    check = history.coordinator.check_drain
    with pytest.raises(NotFound, match="did you mean 'rollout-1'"):
        check(history.state, "rolout-1")
    with pytest.raises(Conflict, match="with SQLite the file of its ledger is there"):
        check(history.state, "trainer-0")
    history.lose("rollout-1")
    with pytest.raises(Conflict, match="is starting"):
        check(history.state, "rollout-1")
    check(replace(history.state), "rollout-0")
