"""What the trainer reads from a graph: which step and which version a firing is for, and when a group is scored."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.config import parse_job
from gyre.graph.flow import Firing
from gyre.workloads.trainer.job_graph import JobGraph
from tests.workloads.toy_policy import toy_spec


def graph_of(**changes: Any) -> JobGraph:
    return JobGraph(parse_job(toy_spec(**changes)))


def test_the_leader_and_what_a_group_passes_before_training() -> None:
    graph = graph_of()
    assert (graph.accumulate_op.ref, graph.apply_op.ref) == ("actor.accumulate", "actor.apply")
    assert graph.auxiliary == ()
    assert sorted(graph.refs_before_training) == ["reference.logprobs", "reward.score", "rollout.generate"]
    assert [operator.ref for operator in graph.evaluations] == ["rollout.evaluate"]
    assert graph.takes_weights(graph.operators["rollout.generate"])
    assert not graph.takes_weights(graph.operators["reward.score"])


@pytest.mark.parametrize(("every", "versions"), [(1, [0, 1, 2, 3]), (2, [0, 2, 4]), (5, [0, 5])])
def test_an_evaluation_is_of_the_version_that_enabled_it(every: int, versions: list[int]) -> None:
    graph = graph_of(run={"evaluate_every": every})
    found = [graph.version_of(Firing("rollout.evaluate", index)) for index in range(len(versions))]
    assert found == versions


def test_in_order_a_step_has_the_groups_in_its_slots_and_otherwise_it_is_the_next() -> None:
    first_slots = [Firing("rollout.generate", at, (8 * at,)) for at in range(3)]
    in_order = graph_of()
    assert [in_order.step_of(firing, 1) for firing in first_slots] == [1, 2, 3]
    by_arrival = graph_of(run={"micro_batches": "streamed"}, staleness={"policy": "drop"}, max_staleness=2)
    assert [by_arrival.step_of(firing, 1) for firing in first_slots] == [2, 2, 2]
    assert in_order.step_of(Firing("rollout.evaluate", 3), 1) == 1


def test_evaluations_are_most_urgent_then_the_first_groups() -> None:
    graph = graph_of()
    firings = [
        Firing("reward.score", 2, (4, 5)),
        Firing("rollout.evaluate", 7),
        Firing("actor.apply", 1),
        Firing("rollout.generate", 0, (0, 1)),
    ]
    assert [firing.operator for firing in sorted(firings, key=graph.urgency)] == [
        "rollout.evaluate",
        "rollout.generate",
        "actor.apply",
        "reward.score",
    ]


def test_a_group_is_scored_when_every_operator_before_the_training_is_done() -> None:
    graph = graph_of()
    flow = graph.flow()
    assert graph.ends_scoring("reward.score")
    assert graph.ends_scoring("reference.logprobs")
    assert not graph.ends_scoring("rollout.generate")
    flow.mark_done("reward.score", [1])  # slots 2 and 3
    assert not graph.is_scored(flow, 2)
    flow.mark_done("reference.logprobs", [1])
    assert [graph.is_scored(flow, slot) for slot in range(5)] == [False, False, True, True, False]


def test_after_a_restart_only_firings_with_an_unscored_group_are_open() -> None:
    graph = graph_of()
    flow = graph.flow()
    graph.mark_scored(flow, 16, [3, 8])
    for ref in ("rollout.generate", "reward.score", "reference.logprobs"):
        open_firings = [index for index in range(8) if not flow.is_done(ref, index)]
        assert open_firings == [1, 4], ref
        assert not flow.is_done(ref, 8), "nothing is drawn for it"
    assert not flow.is_done("rollout.evaluate", 0)
    assert not flow.is_done("actor.accumulate", 0)
