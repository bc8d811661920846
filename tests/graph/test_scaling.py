"""Scaling: new vertices find room, the others stay where they are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import GraphError, NotFound
from gyre.graph import CompiledJob, compile_job, with_vertices, without_vertices
from tests.examples import examples
from tests.graph.jobs import grpo_job, role, script_job

ELASTIC = {"min": 0, "max": 99}


def job(affinity: dict[str, Any] | None = None, **keys: Any) -> CompiledJob:
    return compile_job(
        script_job(
            {"rollout": role(2, elastic=ELASTIC, **keys), "actor": role(2)},
            node_num=3,
            device_per_node=2,
            device_type="GPU",
            affinity=affinity or {},
        )
    )


@settings(max_examples=examples(60), deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=12),
    share=st.sampled_from([0, 0.3, 0.5, 1]),
)
def test_others_stay_and_no_device_is_over_subscribed(steps: list[tuple[bool, int]], share: float) -> None:
    compiled = job(resources={"accelerator": share})
    plan = compiled.plan
    for add, rank in steps:
        before = plan
        vertex = f"rollout-{rank}"
        try:
            plan = (
                with_vertices(plan, compiled.spec, "rollout", [rank])
                if add
                else without_vertices(plan, [vertex])
            )
        except GraphError:
            assert add
            continue
        assert (vertex in plan.placements) == add
        assert all(plan.placements[v] == place for v, place in before.placements.items() if v != vertex)
        used = Counter[tuple[int, int]]()
        for place in plan.placements.values():
            for device in place.devices:
                used[place.node, device] += round(place.accelerator * 10_000)
        assert all(amount <= 10_000 for amount in used.values())
        assert sorted(v for s in plan.sub_graphs for v in s.vertices) == sorted(plan.placements)


def test_growing_and_shrinking_gives_the_same_plan_again() -> None:
    compiled = job()
    grown = with_vertices(compiled.plan, compiled.spec, "rollout", [2, 3])
    assert [grown.placements[f"rollout-{rank}"].sub_graph for rank in (2, 3)] == ["rollout-2", "rollout-3"]
    assert without_vertices(grown, ["rollout-2", "rollout-3"]) == compiled.plan


def test_full_nodes_say_required_and_available() -> None:
    compiled = job()
    with pytest.raises(GraphError, match="one more required 1 devices on a node; available on none of 3"):
        with_vertices(compiled.plan, compiled.spec, "rollout", range(9))


def test_per_node_holds_for_new_ones() -> None:
    compiled = job(per_node=1)
    grown = with_vertices(compiled.plan, compiled.spec, "rollout", [2])
    assert sorted(grown.placements[f"rollout-{rank}"].node for rank in range(3)) == [0, 1, 2]
    with pytest.raises(GraphError, match="at most 1 on a node"):
        with_vertices(grown, compiled.spec, "rollout", [3])


def test_separation_holds_for_new_ones() -> None:
    compiled = job({"separate": [["actor", "rollout"]]})
    grown = with_vertices(compiled.plan, compiled.spec, "rollout", [2, 3])
    nodes = {
        name: {p.node for v, p in grown.placements.items() if v.startswith(name)}
        for name in ("actor", "rollout")
    }
    assert not nodes["actor"] & nodes["rollout"]


def test_only_elastic_roles_scale() -> None:
    compiled = compile_job(grpo_job({"actor": {"total": 2}}))
    with pytest.raises(GraphError, match=r"roles\.actor: cannot scale"):
        with_vertices(compiled.plan, compiled.spec, "actor", [2])
    with pytest.raises(GraphError, match="actor-1 cannot leave it without actor-0"):
        without_vertices(compiled.plan, ["actor-1"])
    with pytest.raises(NotFound, match="did you mean 'actor'"):
        with_vertices(compiled.plan, compiled.spec, "actr", [2])
