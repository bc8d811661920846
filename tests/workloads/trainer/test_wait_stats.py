"""Who waits for whom, and how long the trainer starves: counted from what was seen at the look before, by a given
time."""

from __future__ import annotations

import pytest

from gyre.config import parse_job
from gyre.graph.flow import Flow
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.retries import RETRY_FIRST_S, RETRY_MAX_S, Retries, pause_s
from gyre.workloads.trainer.starvation import PULSE_S, Starvation
from gyre.workloads.trainer.wait_stats import HALF_LIFE_S, WaitStats
from tests.workloads.toy_policy import toy_spec

PLANE_ROLLOUT = "gyre.workloads.rollout_vertices:RolloutInstance"


def graph_of(rollout: str = "tests.workloads.toy_policy:ToyRollout") -> tuple[JobGraph, Flow]:
    spec = toy_spec(roles={"rollout": {"entrypoint": rollout}}, run={"evaluate_every": 0})
    graph = JobGraph(parse_job(spec))
    flow = graph.flow()
    flow.mark_done("trainer.prompts", range(4))
    return graph, flow


def test_a_role_with_nothing_to_do_waits_for_the_role_before_it() -> None:
    graph, flow = graph_of()
    flow.start(flow.firing("rollout.generate", 0))
    stats = WaitStats()
    assert stats.shares() == {}
    stats.observe(flow, graph.operators, 0.0)
    stats.observe(flow, graph.operators, 5.0)
    shares = stats.shares()
    assert shares["reward waits for rollout"] == shares["reference waits for rollout"] == 1.0
    assert not any(who.startswith("rollout waits") for who in shares), "it works"


def test_half_of_a_wait_is_forgotten_in_a_half_life() -> None:
    graph, flow = graph_of()
    firing = flow.firing("rollout.generate", 0)
    flow.start(firing)
    stats = WaitStats()
    stats.observe(flow, graph.operators, 0.0)
    stats.observe(flow, graph.operators, HALF_LIFE_S)
    flow.complete(firing)
    flow.start(flow.firing("reward.score", 0))
    stats.observe(flow, graph.operators, 2 * HALF_LIFE_S)
    assert stats.shares()["reward waits for rollout"] == pytest.approx(1 / 3, abs=1e-3)


def test_the_trainer_starves_while_only_the_rollout_plane_works() -> None:
    graph, flow = graph_of(PLANE_ROLLOUT)
    starvation = Starvation()

    def look(now: float) -> float | None:
        pulse = starvation.observe(flow, graph.operators, wanted=3, now=now)
        return None if pulse is None else pulse.waited_s

    assert look(10.0) == 0.0, "nothing is known of the time before"
    flow.start(flow.firing("rollout.generate", 0))
    assert look(10.0 + PULSE_S / 2) is None, "it is not time"
    assert look(11.0) == pytest.approx(1.0 - PULSE_S / 2), "since the plane was seen to work alone"
    flow.mark_done("rollout.generate", [1])
    flow.start(flow.firing("reward.score", 1))
    assert look(12.0) == pytest.approx(2.0 - PULSE_S / 2)
    assert look(13.0) == pytest.approx(2.0 - PULSE_S / 2), "a reward works, too"


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
