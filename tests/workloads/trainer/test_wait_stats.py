"""Who waits for whom, and how long the trainer starves: counted from what was seen at the look before, by a given
time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.config import parse_job
from gyre.graph.flow import Firing, Flow
from gyre.testing.clock import VirtualClock
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.retries import RETRY_FIRST_S, RETRY_MAX_S, Retries, pause_s
from gyre.workloads.trainer.wait_causes import ABSENT, DRAWING, IDLE, SCORING, activities, plane_shares
from gyre.workloads.trainer.wait_stats import (
    HALF_LIFE_S,
    LOOK_S,
    STATUS_EACH_S,
    WAITS,
    Starvation,
    WaitStats,
    waits_in,
)
from tests.workloads.toy_policy import toy_spec

PLANE_ROLLOUT = "gyre.workloads.rollout_vertices:RolloutInstance"


def graph_of(rollout: str = "tests.workloads.toy_policy:ToyRollout", **run: int) -> tuple[JobGraph, Flow]:
    spec = toy_spec(roles={"rollout": {"entrypoint": rollout}}, run={"evaluate_every": 0} | run)
    graph = JobGraph(parse_job(spec))
    flow = graph.flow()
    flow.mark_done("trainer.prompts", range(4))
    return graph, flow


def fire(flow: Flow, ref: str, *indices: int) -> None:
    for index in indices:
        flow.start(flow.firing(ref, index))
        flow.complete(flow.firing(ref, index))


def test_a_wait_is_put_down_to_who_is_busy_through_the_operators_between() -> None:
    """The reward and the reference have nothing to do; before, the actor waited for them."""
    graph, flow = graph_of()
    for index in (0, 1):
        flow.start(flow.firing("rollout.generate", index))
    found = activities(flow, graph.operators)
    assert found["rollout"] == {"generating": 1.0}
    for idle in ("actor", "reward", "reference"):
        assert found[idle] == {"waits for rollout (generating)": 1.0}
    assert "trainer" not in found


def test_a_wait_is_divided_by_where_the_missing_groups_are() -> None:
    graph, flow = graph_of(groups_per_micro_batch=8)
    fire(flow, "rollout.generate", 0, 1)
    fire(flow, "reference.logprobs", 0, 1)
    flow.start(flow.firing("reward.score", 0))
    for index in (2, 3):
        flow.start(flow.firing("rollout.generate", index))
    found = activities(flow, graph.operators)
    assert found["actor"] == {
        "waits for reward (scoring)": pytest.approx(1 / 6),
        "waits for reward (queued)": pytest.approx(1 / 6),
        "waits for rollout (generating)": pytest.approx(4 / 6),  # for the reward and for the reference
    }
    assert found["reference"] == {"waits for rollout (generating)": 1.0}


def test_what_the_plane_does_is_the_rollouts_time_and_the_wait_of_others() -> None:
    graph, flow = graph_of(PLANE_ROLLOUT)
    for index in (0, 1):
        flow.start(flow.firing("rollout.generate", index))
    shares = plane_shares({"generating": 3, "loading weights": 1, "queued at an engine": 0})
    found = activities(flow, graph.operators, generating=shares)
    assert found["rollout"] == {"generating": 0.75, "loading weights": 0.25}
    assert found["actor"] == {
        "waits for rollout (generating)": 0.75,
        "waits for rollout (loading weights)": 0.25,
    }
    assert plane_shares({"generating": 0}) == {"delivering": 1.0}


def test_rollouts_that_are_as_far_ahead_as_they_may_wait_for_the_training() -> None:
    graph, flow = graph_of()
    for ref in ("rollout.generate", "reward.score", "reference.logprobs"):
        fire(flow, ref, 0, 1, 2, 3)
    fire(flow, "trainer.prompts", 4)
    flow.start(flow.firing("actor.accumulate", 0))
    found = activities(flow, graph.operators)
    assert found["rollout"] == found["reward"] == {"waits for actor (training)": 1.0}
    fire(flow, "actor.accumulate", 1)
    flow.complete(flow.firing("actor.accumulate", 0))
    assert activities(flow, graph.operators)["rollout"] == {"waits for actor (nobody there)": 1.0}
    flow.start(flow.firing("actor.apply", 0))
    found = activities(flow, graph.operators, publishing=["actor.apply"])
    assert found["actor"] == {"publishing": 1.0}
    assert found["rollout"] == {"waits for actor (publishing)": 1.0}
    assert activities(flow, graph.operators)["rollout"] == {"waits for actor (stepping the optimizer)": 1.0}


def test_a_role_whose_vertices_are_away_and_a_trainer_that_is_paused() -> None:
    graph, flow = graph_of()
    assert activities(flow, graph.operators)["rollout"] == {"waits for itself (nobody there)": 1.0}
    assert activities(flow, graph.operators, beside={"reward": SCORING})["reward"] == {SCORING: 1.0}
    assert activities(flow, graph.operators, held="paused")["actor"] == {"waits for rollout (paused)": 1.0}


@given(st.data())
def test_whatever_happens_the_shares_of_a_role_are_whole_and_waits_are_for_who_works(
    data: st.DataObject,
) -> None:
    graph = JobGraph(parse_job(toy_spec(run={"steps": 2, "evaluate_every": 1})))
    flow, clock = graph.flow(), VirtualClock()
    stats = WaitStats("actor", clock=clock)
    running: list[Firing] = []
    for _ in range(data.draw(st.integers(1, 60))):
        could = [*flow.enabled(), *running]
        if not could:
            break
        firing = data.draw(st.sampled_from(could))
        if firing in running:
            running.remove(firing)
            flow.complete(firing)
        else:
            assert flow.blockers(firing.operator, firing.index) == []
            flow.start(firing)
            running.append(firing)
        clock.advance(data.draw(st.floats(0.0, 30.0)))
        if data.draw(st.integers(0, 9)) == 0:
            with stats.doing("actor", "publishing"):
                clock.advance(data.draw(st.floats(0.0, 3.0)))
        found = activities(flow, graph.operators)
        at_work = {graph.operators[one.operator].role for one in running}
        for role, shares in found.items():
            assert sum(shares.values()) == pytest.approx(1.0)
            assert (role in at_work) == (not any(what.startswith(WAITS) or what == IDLE for what in shares))
            for what in shares:
                other = what.removeprefix(WAITS).partition(" ")[0]
                if what.startswith(WAITS) and not what.endswith((f"({ABSENT})", f"({DRAWING})")):
                    assert other in at_work
        stats.observe(lambda found=found: found)
        for shares in stats.times().values():
            assert sum(shares.values()) == pytest.approx(1.0, abs=1e-9)
    if flow.finished:
        assert all(shares == {IDLE: 1.0} for shares in activities(flow, graph.operators).values())


def test_time_is_put_down_to_what_the_look_before_found_and_half_of_it_is_forgotten_in_a_half_life() -> None:
    clock = VirtualClock()
    stats = WaitStats("actor", clock=clock)
    assert stats.times() == {}
    stats.observe(lambda: {"reward": {"scoring": 1.0}, "actor": {"waits for reward (scoring)": 1.0}})
    clock.advance(LOOK_S / 2)
    stats.observe(lambda: pytest.fail("a moment ago"))
    clock.advance(HALF_LIFE_S - LOOK_S / 2)
    stats.observe(lambda: {"reward": {IDLE: 1.0}, "actor": {"training": 1.0}})
    clock.advance(HALF_LIFE_S)
    stats.observe(dict)
    times = stats.times()
    assert list(times) == ["actor", "reward"]
    assert times["actor"] == {"training": 0.667, "waits for reward (scoring)": 0.333}
    assert waits_in(times) == {"actor waits for reward (scoring)": 0.333}


def test_while_the_trainer_stands_still_who_is_idle_waits_for_what_it_does() -> None:
    clock = VirtualClock()
    stats = WaitStats("actor", clock=clock)
    stats.observe(
        lambda: {
            "rollout": {"generating": 1.0},
            "reward": {"waits for rollout (generating)": 1.0},
            "actor": {},
        }
    )
    with stats.doing("actor", "publishing"):
        clock.advance(1.0)
    stats.observe(lambda: {"rollout": {}, "reward": {}, "actor": {"training": 1.0}})
    times = stats.times()
    assert times["actor"] == {"publishing": 1.0}
    assert times["reward"] == {"waits for actor (publishing)": 1.0}
    assert times["rollout"] == {"generating": 1.0}


def test_the_trainer_starves_while_only_the_rollout_plane_works() -> None:
    graph, flow = graph_of(PLANE_ROLLOUT)
    starvation = Starvation()

    def look(now: float) -> float | None:
        pulse = starvation.observe(flow, graph.operators, wanted={"rollout": 3}, now=now)
        return None if pulse is None else pulse.waited_s

    assert look(10.0) == 0.0, "nothing is known of the time before"
    flow.start(flow.firing("rollout.generate", 0))
    assert look(10.0 + STATUS_EACH_S / 2) is None, "it is not time"
    assert look(11.0) == pytest.approx(1.0 - STATUS_EACH_S / 2), "since the plane was seen to work alone"
    flow.mark_done("rollout.generate", [1])
    flow.start(flow.firing("reward.score", 1))
    assert look(12.0) == pytest.approx(2.0 - STATUS_EACH_S / 2)
    assert look(13.0) == pytest.approx(2.0 - STATUS_EACH_S / 2), "a reward works, too"


def test_pauses_double_up_to_a_limit_and_begin_again_after_a_success() -> None:
    assert [pause_s(1), pause_s(2), pause_s(100)] == [RETRY_FIRST_S, 2 * RETRY_FIRST_S, RETRY_MAX_S]
    retries = Retries()
    for _ in range(2):
        retries.failed("a", 10.0)
    assert not retries.may("a", 10.0 + RETRY_FIRST_S)
    assert retries.may("a", 10.0 + 2 * RETRY_FIRST_S)
    assert retries.may("b", 10.0)
    retries.succeeded("a")
    assert retries.may("a", 10.0)
    retries.failed("a", 20.0)
    assert retries.may("a", 20.0 + RETRY_FIRST_S)
