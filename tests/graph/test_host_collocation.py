"""Collocation on a host: partners stand beside each other, each on devices of its own, or wait together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.errors import GraphError
from gyre.graph import (
    CompiledJob,
    NodeCapacity,
    PlacementPlan,
    as_dict,
    as_tables,
    can_come_later,
    compile_job,
    fit_to_cluster,
    fit_what_has_room,
    with_numbers,
    with_vertices,
    without_vertices,
)
from tests.examples import examples
from tests.graph.jobs import role, script_job

PAIR = {"collocate_hosts": [["actor", "rollout"]]}
ELASTIC = {"min": 0, "max": 99}


def job(
    actors: int = 2, rollouts: int = 2, affinity: dict[str, Any] | None = None, **roles: dict[str, Any]
) -> CompiledJob:
    """Roles that take a device and a CPU each; `roles` go over them."""
    cpu = {"resources": {"cpu": 1}}
    made = {"actor": role(actors, **cpu), "rollout": role(rollouts, **cpu)}
    made |= {name: role(**{"total": 1, **cpu, **made.get(name, {}), **keys}) for name, keys in roles.items()}
    for keys in made.values():
        keys["entrypoint"] = "my.module:Worker"
    return compile_job(script_job(made, device_type="GPU", affinity=affinity or PAIR))


def machine(name: str, gpu: float = 8, cpu: float = 64, **keys: Any) -> NodeCapacity:
    return NodeCapacity(name, f"10.0.0.{name[1:]}", cpu, 2**34, gpu, **keys)


def nodes_of(plan: PlacementPlan, name: str) -> list[int]:
    found = {
        int(v.rpartition("-")[2]): p.node for v, p in plan.placements.items() if v.startswith(f"{name}-")
    }
    return [found[rank] for rank in sorted(found)]


def where(plan: PlacementPlan, *vertices: str) -> list[str]:
    machines = plan.machines()
    return [machines.get(vertex, "") for vertex in vertices]


# -- the plan ---------------------------------------------------------------------------------------


def test_each_rank_is_on_one_node_with_devices_and_sub_graphs_of_its_own() -> None:
    plan = compile_job(
        script_job(
            {"actor": role(4), "reference": role(2), "rollout": role(4)},
            device_type="GPU",
            device_per_node=4,
            affinity=PAIR,
        )
    ).plan
    assert nodes_of(plan, "actor") == nodes_of(plan, "rollout") == [0, 0, 1, 1]
    assert nodes_of(plan, "reference") == [2, 2]
    taken = [(place.node, device) for place in plan.placements.values() for device in place.devices]
    assert len(set(taken)) == len(taken) == 10
    by_id = {sub_graph.id: sub_graph for sub_graph in plan.sub_graphs}
    assert by_id["actor-3"].vertices == ("actor-3",)
    assert by_id["actor-3"].bundles[0].beside == by_id["rollout-3"].bundles[0].beside == "actor&rollout-3"


def test_ranks_may_divide_and_a_role_without_devices_stands_beside_one_with() -> None:
    helpers = {"total": 4, "resources": {"accelerator": 0, "cpu": 4}}
    plan = job(2, 2, {"collocate_hosts": [["actor", "helper"]], "spread": ["actor"]}, helper=helpers).plan
    assert plan.node_num == 1, "as few nodes as it takes"
    plan = compile_job(
        script_job(
            {"actor": role(2, per_node=1), "helper": role(4, resources={"accelerator": 0})},
            node_num=2,
            affinity={"collocate_hosts": [["helper", "actor"]]},
        )
    ).plan
    assert (nodes_of(plan, "actor"), nodes_of(plan, "helper")) == ([0, 1], [0, 0, 1, 1])


def test_the_shares_of_a_rank_fill_devices() -> None:
    spec = script_job(
        {
            "actor": role(2, resources={"accelerator": 0.4}),
            "rollout": role(2, resources={"accelerator": 0.6}),
            "helper": role(1, resources={"accelerator": 0}),
        },
        node_num=1,
        device_per_node=2,
        affinity={"collocate_hosts": [["actor", "rollout", "helper"]]},
    )
    places = compile_job(spec).plan.placements
    assert places["actor-0"].devices == places["rollout-0"].devices == (0,)


@pytest.mark.parametrize(
    ("affinity", "expected"),
    [({"spread": ["rollout"]}, [0, 1, 2, 3]), ({"pack": ["rollout"]}, [0, 0, 0, 0]), ({}, [0, 0, 0, 0])],
)
def test_a_role_spreads_and_packs_its_partners_with_it(affinity: dict[str, Any], expected: list[int]) -> None:
    spec = script_job(
        {"actor": role(4, gang=True), "rollout": role(4)},
        node_num=4,
        device_per_node=8,
        affinity=PAIR | affinity,
    )
    plan = compile_job(spec).plan
    assert nodes_of(plan, "actor") == nodes_of(plan, "rollout") == expected


def test_roles_that_share_devices_are_one_party() -> None:
    affinity = {"collocate": [["actor", "reference"]], "collocate_hosts": [["reference", "rollout"]]}
    compiled = job(2, 4, affinity, reference={"total": 2})
    fitted = fit_to_cluster(compiled.plan, [machine("n1", 3), machine("n2", 3)])
    for rank in (0, 1):
        names = [f"actor-{rank}", f"reference-{rank}", f"rollout-{2 * rank}", f"rollout-{2 * rank + 1}"]
        assert len(set(where(fitted, *names))) == 1
    assert set(fitted.machines().values()) == {"n1", "n2"}


def test_who_is_separated_from_a_role_is_separated_from_its_partners() -> None:
    roles = {"actor": role(1), "rollout": role(1, elastic=ELASTIC), "judge": role(1), "reader": role(1)}
    affinity = {
        "collocate_hosts": [["actor", "rollout"], ["judge", "reader"]],
        "separate": [["rollout", "judge"]],
    }
    compiled = compile_job(script_job(roles, node_num=2, device_per_node=4, affinity=affinity))
    apart = {sub_graph.id: sub_graph.apart for sub_graph in compiled.plan.sub_graphs}
    assert apart["actor-0"] == apart["rollout-0"] == {"judge", "reader"}
    assert apart["judge-0"] == apart["reader-0"] == {"actor", "rollout"}
    assert nodes_of(compiled.plan, "actor") != nodes_of(compiled.plan, "reader")


def test_a_plan_shows_who_stands_beside_whom() -> None:
    compiled = job(2, 4)
    [note] = compiled.plan.notes
    assert note == (
        "actor, rollout stand on one machine rank by rank, each with devices of its own; a rank has: actor 1, "
        "rollout 2."
    )
    bundles = {sub["id"]: sub["bundles"][0]["beside"] for sub in as_dict(compiled)["sub_graphs"]}
    assert bundles["rollout-3"] == bundles["actor-1"] == "actor&rollout-1"
    assert bundles["trainer-0"] == ""
    [table] = [one for one in as_tables(compiled) if one.title == "Sub-graphs"]
    shown = {
        name: beside for name, *_, beside in zip(*(column.cells for column in table.columns), strict=True)
    }
    assert shown["rollout-3"] == shown["actor-1"] == "actor&rollout-1"
    assert shown["trainer-0"] == "-"


def test_a_rank_that_is_wider_than_a_node_says_required_and_available() -> None:
    wide = {"resources": {"accelerator": 3}}
    with pytest.raises(GraphError, match=r"actor&rollout: one rank of them.*requires 5 devices.*available 4"):
        compile_job(
            script_job(
                {"actor": role(1, **wide), "rollout": role(2)}, node_num=2, device_per_node=4, affinity=PAIR
            )
        )


# -- on a cluster -----------------------------------------------------------------------------------


def test_a_pair_takes_a_machine_that_holds_both_or_waits() -> None:
    compiled = job()
    small = [machine(f"n{number}", 1) for number in range(1, 5)]
    fitted = fit_to_cluster(compiled.plan, [*small, machine("n8", 2), machine("n9", 2)])
    assert where(fitted, "actor-0") == where(fitted, "rollout-0")
    assert {*where(fitted, "actor-0", "actor-1")} == {"n8", "n9"}
    plan, lacking = fit_what_has_room(compiled.plan, [*small, machine("n9", 2)])
    assert where(plan, "actor-0", "rollout-0") == ["n9", "n9"]
    assert sorted(lacking) == ["actor-1", "rollout-1"]
    assert str(lacking["actor-1"]).startswith(
        "cluster: actor-1 and rollout-1, beside each other, required 2 CPU"
    )
    assert lacking["rollout-1"].details["required"] == (
        "2 CPU, 0 bytes of memory, 2 GPUs on one machine for actor-1 and rollout-1, beside each other"
    )
    assert lacking["rollout-1"].details["another_would_help"]


def test_a_pair_waits_as_a_whole_also_if_one_of_it_could_come_later() -> None:
    compiled = job(rollout={"elastic": {"min": 1, "max": 4}})
    assert can_come_later(compiled.spec) == {"rollout-1"}
    with pytest.raises(GraphError, match="actor-1 and rollout-1, beside each other, required"):
        fit_to_cluster(compiled.plan, [machine("n1", 3)], can_come_later(compiled.spec))


def test_a_gang_is_divided_beside_its_partners_if_no_machine_holds_it_whole() -> None:
    compiled = job(actor={"gang": True})
    fitted = fit_to_cluster(compiled.plan, [machine("n1", 2), machine("n2", 2)])
    assert where(fitted, "actor-0", "actor-1") == where(fitted, "rollout-0", "rollout-1")
    assert {*fitted.machines().values()} == {"n1", "n2"}
    assert next(sub for sub in fitted.sub_graphs if sub.id == "actor").strategy == "PACK"
    whole = fit_to_cluster(compiled.plan, [machine("n1", 2), machine("n2", 2), machine("n3", 4)])
    assert {*where(whole, "actor-0", "actor-1", "rollout-0", "rollout-1")} == {"n3"}


def test_a_gang_whose_per_node_says_otherwise_is_not_divided() -> None:
    compiled = job(actor={"gang": True, "per_node": 2})
    _, lacking = fit_what_has_room(compiled.plan, [machine("n1", 2), machine("n2", 2)])
    assert sorted(lacking) == ["actor", "rollout-0", "rollout-1"]


def test_partners_of_a_gang_that_waits_wait_with_it() -> None:
    compiled = job(actor={"gang": True})
    plan, lacking = fit_what_has_room(compiled.plan, [machine("n1", 2)])
    assert sorted(lacking) == ["actor", "rollout-0", "rollout-1"]
    assert where(plan, "trainer-0") == ["n1"]


STANDING = {"actor-0": "n1", "actor-1": "n2", "rollout-0": "n1", "rollout-1": "n2"}


def without(*vertices: str) -> dict[str, str]:
    return {vertex: node for vertex, node in STANDING.items() if vertex not in vertices}


def test_who_is_started_anew_goes_to_its_partner() -> None:
    plan = job().plan
    nodes = [machine("n1", 2), machine("n2", 2), machine("n3", 8)]
    for gone in STANDING:
        fitted, lacking = fit_what_has_room(plan, nodes, without(gone))
        assert not lacking
        assert where(fitted, gone) == [STANDING[gone]]
    # The others are not touched, and both of a pair find a new machine if neither stands.
    fitted, lacking = fit_what_has_room(plan, nodes[1:], without("actor-0", "rollout-0"))
    assert (where(fitted, "actor-0", "rollout-0"), lacking) == (["n3", "n3"], {})
    assert where(fitted, "actor-1", "rollout-1") == ["n2", "n2"]


def test_ranks_of_a_gang_that_starts_anew_go_each_to_its_partner() -> None:
    plan = job(actor={"gang": True}).plan
    fitted, lacking = fit_what_has_room(
        plan, [machine("n1", 2), machine("n2", 2), machine("n3", 8)], without("actor-0", "actor-1")
    )
    assert (where(fitted, "actor-0", "actor-1"), lacking) == (["n1", "n2"], {})


@pytest.mark.parametrize(
    ("first", "keys", "said"),
    [
        (machine("n1", 1), {}, "10.0.0.1: 63 CPU, 17179869184 bytes, 0 GPUs on the machine of actor-0"),
        (machine("n1", 2), {"closed": ["n1"]}, "(10.0.0.1: left alone or drained) on the machine of actor-0"),
        (
            machine("n1", 2),
            {"avoids": {"rollout-0": "n1"}},
            "(10.0.0.1: left alone or drained) on the machine",
        ),
    ],
    ids=["full", "closed", "the vertex is drained"],
)
def test_who_has_no_room_beside_its_partner_waits_for_it(
    first: NodeCapacity, keys: dict[str, Any], said: str
) -> None:
    nodes = [first, machine("n2", 2), machine("n3", 8)]
    fitted, lacking = fit_what_has_room(job().plan, nodes, without("rollout-0"), **keys)
    assert list(lacking) == ["rollout-0"]
    assert lacking["rollout-0"].details["required"].endswith("1 GPUs for rollout-0 beside actor-0")
    assert said in lacking["rollout-0"].details["available"]
    assert not lacking["rollout-0"].details["another_would_help"]
    # The partner has left as well.
    fitted, lacking = fit_what_has_room(job().plan, nodes, without("rollout-0", "actor-0"), **keys)
    assert (where(fitted, "actor-0", "rollout-0"), lacking) == (["n3", "n3"], {})


# -- scaling ----------------------------------------------------------------------------------------


def scalable() -> CompiledJob:
    return job(2, 2, rollout={"elastic": ELASTIC}, actor={"elastic": ELASTIC})


def test_who_is_scaled_up_stands_beside_its_partner_where_there_is_one() -> None:
    compiled = scalable()
    plan = with_numbers(compiled.plan, compiled.spec, {"actor": 3, "rollout": 2, "trainer": 1})
    nodes = [machine("n1", 2), machine("n2", 2), machine("n3", 2), machine("n4", 8)]
    plan = with_vertices(plan, compiled.spec, "rollout", [2, 3])
    fitted, lacking = fit_what_has_room(plan, nodes, {**STANDING, "actor-2": "n3"})
    assert (where(fitted, "rollout-2", "rollout-3"), lacking) == (["n3", "n4"], {})
    assert nodes_of(plan, "rollout")[2] == nodes_of(plan, "actor")[2]


def test_vertices_of_one_role_beyond_the_others_ranks_bind_nobody() -> None:
    compiled = job(1, 2, rollout={"elastic": ELASTIC})
    plan = with_vertices(compiled.plan, compiled.spec, "rollout", [2, 3])
    nodes = [machine("n1", 3), machine("n2", 1), machine("n3", 1)]
    fitted, lacking = fit_what_has_room(plan, nodes)
    assert not lacking
    assert {*where(fitted, "rollout-2", "rollout-3")} == {"n2", "n3"}


def test_who_comes_to_vertices_on_several_machines_stands_beside_one_of_them() -> None:
    compiled = job(1, 2, rollout={"elastic": ELASTIC}, actor={"elastic": ELASTIC})
    plan = with_vertices(compiled.plan, compiled.spec, "rollout", [2, 3])
    plan = with_vertices(plan, compiled.spec, "actor", [1])
    standing = {"actor-0": "n1", "rollout-0": "n1", "rollout-1": "n1", "rollout-2": "n2", "rollout-3": "n3"}
    nodes = [machine("n1", 3), machine("n2", 1), machine("n3", 2), machine("n4", 8)]
    fitted, lacking = fit_what_has_room(plan, nodes, standing)
    assert (where(fitted, "actor-1"), lacking) == (["n3"], {})
    del standing["rollout-2"]
    fitted, lacking = fit_what_has_room(plan, nodes, {**standing, "actor-1": "n4"})
    assert where(fitted, "rollout-2") == ["n4"], "beside the other role, not beside its own"


def test_partners_on_different_logical_nodes_look_for_a_machine_together() -> None:
    compiled = job(4, 4, rollout={"elastic": ELASTIC}, judge={"elastic": ELASTIC, "total": 2})
    assert compiled.plan.node_num == 2
    plan = without_vertices(compiled.plan, ["rollout-3"])
    plan = with_vertices(plan, compiled.spec, "judge", [2])
    assert nodes_of(plan, "judge") == [1, 1, 0], "where rollout-3 was"
    plan = with_vertices(plan, compiled.spec, "rollout", [3])
    assert nodes_of(plan, "rollout")[3] != nodes_of(plan, "actor")[3]
    fitted, lacking = fit_what_has_room(plan, [machine("n1", 8), machine("n2", 4)])
    assert not lacking
    assert where(fitted, "rollout-3") == where(fitted, "actor-3")


def test_scaling_keeps_every_partner() -> None:
    compiled = scalable()
    grown = with_vertices(compiled.plan, compiled.spec, "rollout", range(5))
    beside = {v: b.beside for sub in grown.sub_graphs for b in sub.bundles for v in b.vertices}
    assert [beside[f"rollout-{rank}"] for rank in range(5)] == [f"actor&rollout-{rank}" for rank in range(5)]
    assert without_vertices(grown, ["rollout-2", "rollout-3", "rollout-4"]) == compiled.plan


def test_a_bounded_node_without_room_beside_the_partner_says_so() -> None:
    spec = script_job(
        {
            "actor": role(2, elastic=ELASTIC),
            "rollout": role(2, elastic=ELASTIC),
            "judge": role(1, elastic=ELASTIC),
        },
        node_num=3,
        device_per_node=2,
        affinity=PAIR,
    )
    compiled = compile_job(spec)
    plan = without_vertices(compiled.plan, ["rollout-1"])
    plan = with_vertices(plan, compiled.spec, "judge", [1, 2])
    with pytest.raises(
        GraphError, match=r"roles.rollout: one more required 1 devices on the node of actor-1"
    ):
        with_vertices(plan, compiled.spec, "rollout", [1])


# -- whatever comes ---------------------------------------------------------------------------------


EVENTS = st.one_of(
    st.tuples(st.just("kill"), st.integers(0, 20)),
    st.tuples(st.just("lose"), st.integers(0, 4)),
    st.tuples(st.just("close"), st.integers(0, 4)),
    st.tuples(st.just("open"), st.integers(0, 4)),
    st.tuples(st.just("scale"), st.integers(0, 5)),
)


def gang_killed(compiled: CompiledJob, vertex: str) -> set[str]:
    """The vertex, with the ranks of its gang."""
    name = vertex.rpartition("-")[0]
    if not compiled.spec.roles[name].gang:
        return {vertex}
    return {f"{name}-{rank}" for rank in range(compiled.spec.roles[name].total)}


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ranks=st.integers(1, 3),
    each=st.integers(1, 2),
    gang=st.booleans(),
    gpus=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    events=st.lists(EVENTS, max_size=12),
)
def test_partners_stand_beside_each_other_whatever_comes(
    ranks: int, each: int, gang: bool, gpus: Sequence[int], events: Sequence[tuple[str, int]]
) -> None:
    """Beside each other; others stay; no machine holds more than it has; and where there is room nobody waits."""
    compiled = job(
        ranks,
        ranks,
        {"collocate_hosts": [["actor", "rollout"], ["helper", "actor"]]},
        actor={"gang": gang},
        rollout={"elastic": ELASTIC},
        helper={"total": ranks * each, "resources": {"accelerator": 0, "cpu": 1}},
    )
    numbers = {name: found.total for name, found in compiled.spec.roles.items()}
    plan = compiled.plan
    nodes = {f"n{number}": machine(f"n{number}", gpu, cpu=20) for number, gpu in enumerate(gpus)}
    standing: dict[str, str] = {}
    closed: set[str] = set()
    for event, number in [("", 0), *events]:
        name = f"n{number}"
        if event == "kill" and standing:
            victim = sorted(standing)[number % len(standing)]
            for vertex in gang_killed(compiled, victim):
                standing.pop(vertex, None)
        elif event == "lose" and name in nodes and len(nodes) > 1:
            del nodes[name]
            gone = {v for v, node in standing.items() if node == name}
            for vertex in set().union(*(gang_killed(compiled, v) for v in gone)):
                standing.pop(vertex, None)
        elif event == "close":
            closed.add(name)
        elif event == "open":
            closed.discard(name)
        elif event == "scale":
            numbers["rollout"] = number
            plan = with_numbers(plan, compiled.spec, numbers)
            standing = {v: node for v, node in standing.items() if v in plan.placements}
        fitted, _ = fit_what_has_room(plan, list(nodes.values()), standing, closed=closed)
        machines = fitted.machines()
        assert all(machines[vertex] == node for vertex, node in standing.items())
        assert all(node not in closed for v, node in machines.items() if v not in standing)
        held: dict[str, float] = defaultdict(float)
        beside: dict[str, set[str]] = defaultdict(set)
        for sub_graph in fitted.sub_graphs:
            for bundle in sub_graph.bundles:
                for vertex in bundle.vertices:
                    if vertex in machines:
                        held[machines[vertex]] += bundle.accelerator
                        beside[bundle.beside or vertex].add(machines[vertex])
        assert all(amount <= nodes[node].gpu for node, amount in held.items())
        assert all(len(found) == 1 for found in beside.values()), beside
        roomy = {**nodes, "n9": machine("n9", 99, cpu=999)}
        _, with_room = fit_what_has_room(plan, list(roomy.values()), standing, closed=closed)
        for sub_graph in plan.sub_graphs:
            partners = {v for v in standing if partner_of(plan, v, sub_graph.id)}
            assert sub_graph.id not in with_room or partners, "only room beside a partner may be lacking"
        standing = dict(machines)


def partner_of(plan: PlacementPlan, vertex: str, sub_graph: str) -> bool:
    """Whether the vertex, or another of its sub-graph, is in a rank with one of the sub-graph or of its gang's."""
    ranks: dict[str, set[str]] = defaultdict(set)
    for sub in plan.sub_graphs:
        ranks[sub.id] |= {bundle.beside for bundle in sub.bundles if bundle.beside}
    own = set(ranks[sub_graph])
    for found in list(ranks.values()):  # a gang that waits makes the partners of all its ranks wait
        if found & own:
            own |= found
    return bool(ranks[plan.placements[vertex].sub_graph] & own)
