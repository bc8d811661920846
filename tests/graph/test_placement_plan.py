"""Placement: everything once, nothing over-subscribed, affinities kept."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gyre.errors import GraphError
from gyre.graph import (
    CompiledJob,
    NodeCapacity,
    PlacementPlan,
    can_come_later,
    compile_job,
    fit_to_cluster,
)
from tests.examples import examples
from tests.graph.jobs import grpo_job, role, script_job

ROLES = ("actor", "rollout", "reference", "reward")


@st.composite
def jobs(draw: st.DrawFn) -> CompiledJob:
    roles: dict[str, dict[str, Any]] = {}
    for name in ROLES[: draw(st.integers(1, 4))]:
        per_node = draw(st.sampled_from([None, 1, 2]))
        total = draw(st.integers(1, 4)) * (per_node or 1)
        keys: dict[str, Any] = {
            "resources": {"accelerator": draw(st.sampled_from([0, 0.25, 0.5, 0.7, 1, 1, 2]))}
        }
        if per_node:
            keys["per_node"] = per_node
        if draw(st.booleans()):
            keys["elastic"] = {"min": 0, "max": 99}
        elif draw(st.booleans()):
            keys["gang"] = True
        roles[name] = role(total, **keys)
    names = list(roles)
    affinity: dict[str, Any] = {}
    if len(names) > 1 and draw(st.booleans()):
        chosen = draw(st.lists(st.sampled_from(names), min_size=2, unique=True))
        for name in chosen:
            roles[name] = {**roles[chosen[0]], "resources": roles[name]["resources"]}
        affinity["collocate"] = [chosen]
    if len(names) > 1 and draw(st.booleans()):
        chosen = draw(st.lists(st.sampled_from(names), min_size=2, unique=True))
        for name in chosen[1:]:
            times = draw(st.integers(1, 2))
            per_node = roles[chosen[0]].get("per_node")
            roles[name]["total"] = roles[chosen[0]]["total"] * times
            roles[name].pop("per_node", None)
            if per_node and draw(st.booleans()):
                roles[name]["per_node"] = per_node * times
        affinity["collocate_hosts"] = [chosen]
    if len(names) > 1 and draw(st.booleans()):
        affinity["separate"] = [draw(st.lists(st.sampled_from(names), min_size=2, max_size=2, unique=True))]
    free = [name for name in names if "per_node" not in roles[name]]
    if free and draw(st.booleans()):
        affinity[draw(st.sampled_from(["spread", "pack"]))] = [draw(st.sampled_from(free))]
    spec = script_job(
        roles,
        node_num=draw(st.integers(1, 5)),
        device_per_node=draw(st.integers(1, 8)),
        device_type=draw(st.sampled_from(["CPU", "GPU"])),
        affinity=affinity,
    )
    try:
        return compile_job(spec)
    except GraphError:
        assume(False)
        raise


@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(jobs())
def test_every_vertex_is_placed_once_and_no_device_is_over_subscribed(compiled: CompiledJob) -> None:
    plan = compiled.plan
    ids = [vertex.id for vertex in compiled.graph.vertices]
    assert sorted(vertex for sub_graph in plan.sub_graphs for vertex in sub_graph.vertices) == sorted(ids)
    assert sorted(plan.placements) == sorted(ids)
    assert len({sub_graph.id for sub_graph in plan.sub_graphs}) == len(plan.sub_graphs)
    for sub_graph in plan.sub_graphs:
        assert [bundle.index for bundle in sub_graph.bundles] == list(range(len(sub_graph.bundles)))
        for bundle in sub_graph.bundles:
            for vertex in bundle.vertices:
                place = plan.placements[vertex]
                assert (place.sub_graph, place.bundle, place.node) == (
                    sub_graph.id,
                    bundle.index,
                    bundle.node,
                )
    used: dict[tuple[int, int], int] = defaultdict(int)
    for place in plan.placements.values():
        assert 0 <= place.node < plan.node_num
        assert bool(place.devices) == bool(place.accelerator)
        for device in place.devices:
            assert 0 <= device < plan.device_per_node
            used[place.node, device] += round(place.accelerator * 10_000) // len(place.devices)
    assert all(share <= 10_000 for share in used.values())
    reserved: dict[int, float] = defaultdict(float)
    for sub_graph in plan.sub_graphs:
        for bundle in sub_graph.bundles:
            reserved[bundle.node] += bundle.accelerator
    assert all(amount <= plan.device_per_node + 1e-9 for amount in reserved.values())


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(jobs())
def test_affinities_are_kept(compiled: CompiledJob) -> None:
    spec, plan = compiled.spec, compiled.plan
    nodes: dict[str, list[int]] = {
        name: [plan.placements[f"{name}-{rank}"].node for rank in range(found.total)]
        for name, found in spec.roles.items()
    }
    for name, found in spec.roles.items():
        if found.per_node is not None:
            assert all(nodes[name].count(node) == found.per_node for node in nodes[name])
        local: dict[int, list[int]] = defaultdict(list)
        for rank in range(found.total):
            place = plan.placements[f"{name}-{rank}"]
            local[place.node].append(place.local_rank)
        assert all(ranks == list(range(len(ranks))) for ranks in local.values())
    for names in spec.affinity.separate:
        assert not set(nodes[names[0]]) & set(nodes[names[1]])
    for names in (*spec.affinity.collocate, *spec.affinity.collocate_hosts):
        ranks = min(spec.roles[name].total for name in names)
        first = nodes[names[0]][:: len(nodes[names[0]]) // ranks]
        for name in names:
            assert nodes[name] == [node for node in first for _ in range(len(nodes[name]) // ranks)]


@pytest.mark.parametrize("count", range(1, 31))
def test_any_number_of_roles_shares_one_device(count: int) -> None:
    names = [f"role{index}" for index in range(count)]
    affinity = {"collocate": [names]} if count > 1 else {}
    plan = compile_job(
        script_job({name: role(2) for name in names}, device_per_node=2, device_type="GPU", affinity=affinity)
    ).plan
    shares = [round(plan.placements[f"{name}-0"].accelerator * 10_000) for name in names]
    assert len(set(shares)) == 1
    assert sum(shares) <= 10_000
    assert sum(shares) > 10_000 - count
    assert {plan.placements[f"{name}-1"].devices for name in names} == {(1,)}


def test_collocated_ranks_may_divide() -> None:
    plan = compile_job(
        script_job(
            {"actor": role(4), "rollout": role(2, resources={"accelerator": 2})},
            device_per_node=4,
            device_type="GPU",
            affinity={"collocate": [["actor", "rollout"]]},
        )
    ).plan
    assert plan.sub_graphs[2].bundles[0].vertices == ("actor-2", "actor-3", "rollout-1")
    assert plan.sub_graphs[2].bundles[0].accelerator == 2
    assert plan.placements["rollout-1"].devices == (2, 3)
    assert [plan.placements[f"actor-{rank}"].devices for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    assert plan.placements["actor-3"].accelerator == 0.5
    assert plan.placements["rollout-1"].accelerator == 1.0


def test_shares_that_fit_stay_as_they_were_asked_for() -> None:
    plan = compile_job(
        script_job(
            {"actor": role(resources={"accelerator": 0.7}), "rollout": role(resources={"accelerator": 0.3})},
            affinity={"collocate": [["actor", "rollout"]]},
        )
    ).plan
    assert plan.placements["actor-0"].accelerator == 0.7
    assert plan.placements["rollout-0"].accelerator == 0.3


def test_sub_graphs_are_the_units_of_scheduling_and_scaling() -> None:
    plan = compile_job(
        grpo_job({"actor": {"total": 2}, "rollout": {"total": 2, "elastic": {"min": 1, "max": 4}}})
    ).plan
    assert [sub_graph.id for sub_graph in plan.sub_graphs] == [
        "trainer-0",
        "actor",
        "rollout-0",
        "rollout-1",
        "reward-0",
        "rollout_manager-0",
    ]


def test_scaling_up_leaves_the_others_where_they_are() -> None:
    def plan(total: int) -> PlacementPlan:
        return compile_job(
            grpo_job({"reward": {}, "rollout": {"total": total, "elastic": {"min": 1, "max": 8}}}, node_num=2)
        ).plan

    assert [plan(3).placements[f"rollout-{rank}"] for rank in range(2)] == [
        plan(2).placements[f"rollout-{rank}"] for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("affinity", "per_node", "nodes", "strategy"),
    [
        ({}, None, [0, 0, 0, 0], "STRICT_PACK"),
        ({"pack": ["actor"]}, None, [0, 0, 0, 0], "STRICT_PACK"),
        ({"spread": ["actor"]}, None, [0, 1, 2, 3], "STRICT_SPREAD"),
        ({}, 1, [0, 1, 2, 3], "STRICT_SPREAD"),
        ({}, 2, [0, 0, 1, 1], "PACK"),
    ],
)
def test_strategies(affinity: dict[str, Any], per_node: int | None, nodes: list[int], strategy: str) -> None:
    plan = compile_job(
        script_job({"actor": role(4, per_node=per_node, gang=True)}, node_num=4, affinity=affinity)
    ).plan
    assert [plan.placements[f"actor-{rank}"].node for rank in range(4)] == nodes
    assert plan.sub_graphs[1].strategy == strategy


def test_constrained_roles_go_first_where_the_order_leaves_no_room() -> None:
    plan = compile_job(
        script_job({"actor": role(2), "rollout": role(3, per_node=1)}, node_num=3, device_per_node=2)
    ).plan
    assert [plan.placements[f"rollout-{rank}"].node for rank in range(3)] == [0, 1, 2]


def test_cpu_devices_are_not_reserved_with_ray() -> None:
    plan = compile_job(script_job({"actor": role(2)}, device_type="CPU")).plan
    assert plan.placements["actor-1"].devices == (1,)
    assert all(bundle.accelerator == 0 for sub_graph in plan.sub_graphs for bundle in sub_graph.bundles)


def test_note_says_where_scaling_will_not_fit() -> None:
    plan = compile_job(
        script_job({"rollout": role(2, elastic={"min": 1, "max": 6})}, node_num=1, device_per_node=4)
    ).plan
    assert plan.notes == (
        "rollout may scale to 6, which requires 4 devices more; 2 of the job's 4 are free.",
    )


# -- on a cluster -----------------------------------------------------------------------------------


def machine(name: str, cpu: float = 8, gpu: float = 0) -> NodeCapacity:
    return NodeCapacity(name, f"10.0.0.{name[1:]}", cpu, 2**34, gpu)


def actors(plan: PlacementPlan) -> list[str]:
    """The machines of the actor's ranks."""
    return sorted(where for vertex, where in plan.machines().items() if vertex.startswith("actor"))


def spread_plan(device_type: str = "CPU", **resources: Any) -> PlacementPlan:
    return compile_job(
        script_job(
            {"actor": role(3, per_node=1, gang=True, resources=resources)},
            node_num=3,
            device_per_node=2,
            device_type=device_type,
        )
    ).plan


def test_each_logical_node_gets_a_machine() -> None:
    fitted = fit_to_cluster(spread_plan(), [machine("n1"), machine("n2"), machine("n3")])
    assert actors(fitted) == ["n1", "n2", "n3"]
    assert fitted.sub_graphs[1].strategy == "STRICT_SPREAD"
    assert fitted.notes == ()


def test_cpu_nodes_share_what_machines_there_are_and_a_note_says_so() -> None:
    fitted = fit_to_cluster(spread_plan(), [machine("n1")])
    assert set(actors(fitted)) == {"n1"}
    assert fitted.sub_graphs[1].strategy == "SPREAD"
    assert fitted.notes == (
        "The job asks for 3 nodes and the cluster has 1, so logical nodes share machines: 10.0.0.1 holds 0, 1, 2.",
    )


def test_gpu_nodes_need_machines_of_their_own() -> None:
    with pytest.raises(GraphError, match="required 3 machines with GPUs, available 2"):
        fit_to_cluster(spread_plan("GPU"), [machine("n1", gpu=8), machine("n2", gpu=8), machine("n3")])
    fitted = fit_to_cluster(spread_plan("GPU"), [machine(f"n{i}", gpu=i) for i in range(1, 5)])
    assert actors(fitted) == ["n1", "n2", "n3"]


def test_cores_that_are_not_there_say_required_and_available() -> None:
    with pytest.raises(GraphError, match=r"actor required 3 CPU.*available: 10.0.0.1: 2 CPU"):
        fit_to_cluster(spread_plan(cpu=3), [machine("n1")])


def test_no_machine_at_all() -> None:
    with pytest.raises(GraphError, match="available 0"):
        fit_to_cluster(spread_plan(), [])


def special_plan(**resources: Any) -> PlacementPlan:
    elastic = {"min": 1, "max": 4}
    return compile_job(
        script_job({"actor": role(1), "rollout": role(2, elastic=elastic, resources=resources)})
    ).plan


def where(plan: PlacementPlan, name: str) -> set[str]:
    return {node for vertex, node in plan.machines().items() if vertex.startswith(name)}


def test_a_label_and_a_resource_of_the_user_s_own_say_where_a_vertex_stands() -> None:
    plain = machine("n1")
    spot = replace(machine("n2"), labels={"market": "spot"}, custom={"net": 1.0})
    assert where(fit_to_cluster(special_plan(labels={"market": "spot"}), [plain, spot]), "rollout") == {"n2"}
    assert where(fit_to_cluster(special_plan(custom={"net": 0.5}), [plain, spot]), "rollout") == {"n2"}
    with pytest.raises(GraphError, match=r"the label market=other on one machine.*not so labelled"):
        fit_to_cluster(special_plan(labels={"market": "other"}), [plain, spot])
    with pytest.raises(GraphError, match=r"required .*0.7 net on one machine"):
        fit_to_cluster(special_plan(custom={"net": 0.7}), [plain, spot])


def test_what_an_elastic_role_has_beyond_its_minimum_may_come_later() -> None:
    compiled = compile_job(
        script_job({"rollout": role(3, elastic={"min": 1, "max": 4}, resources={"cpu": 6}), "actor": role(1)})
    )
    later = can_come_later(compiled.spec)
    assert later == {"rollout-1", "rollout-2"}
    fitted = fit_to_cluster(compiled.plan, [machine("n1")], later)
    assert set(fitted.machines()) >= {"rollout-0", "actor-0"}
    assert fitted.notes[-1].startswith("rollout-1, rollout-2 will wait for room: ")
    with pytest.raises(GraphError, match="rollout-1 required 6 CPU"):
        fit_to_cluster(compiled.plan, [machine("n1")])
