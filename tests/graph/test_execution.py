"""Regions, and names that are not the graph's."""

from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import NotFound
from gyre.graph import Dcg, Edge, EdgeKind, ExecutionGraph, compile_job
from tests.examples import examples
from tests.graph.jobs import grpo_job

ROLES = ("trainer", "actor", "rollout", "critic")


@st.composite
def graphs(draw: st.DrawFn) -> ExecutionGraph:
    edges = tuple(
        Edge(
            draw(st.sampled_from(ROLES)), draw(st.sampled_from(ROLES)), draw(st.sampled_from(list(EdgeKind)))
        )
        for _ in range(draw(st.integers(0, 5)))
    )
    ranks = {role: range(draw(st.integers(0 if role == "rollout" else 1, 3))) for role in ROLES}
    gangs = draw(st.sets(st.sampled_from(ROLES)))
    return ExecutionGraph(Dcg(ROLES, role_edges=edges), ranks, gangs)


@settings(max_examples=examples(150), deadline=None)
@given(graphs())
def test_regions_are_an_equivalence_relation(graph: ExecutionGraph) -> None:
    ids = [vertex.id for vertex in graph.vertices]
    for one in ids:
        assert one in graph.region(one)
        for other in graph.region(one):
            assert graph.region(other) == graph.region(one)
    assert sorted(vertex for region in graph.regions() for vertex in region) == sorted(ids)
    assert set(graph.regions()) == {graph.region(one) for one in ids}


@settings(max_examples=examples(150), deadline=None)
@given(graphs())
def test_regions_are_what_non_durable_edges_join(graph: ExecutionGraph) -> None:
    """Against the graph drawn out edge by edge."""
    import networkx

    drawn = networkx.Graph()
    drawn.add_nodes_from(vertex.id for vertex in graph.vertices)
    of_role = {role: [vertex.id for vertex in graph.vertices if vertex.role == role] for role in ROLES}
    for edge in graph.role_pairs():
        if edge.kind is EdgeKind.COLLECTIVE and edge.source != edge.target:
            for source in of_role[edge.source]:
                drawn.add_edges_from((source, target) for target in of_role[edge.target])
    shared = {
        r
        for e in graph.role_pairs()
        if e.kind is EdgeKind.COLLECTIVE and e.source != e.target
        for r in (e.source, e.target)
    }
    for role in graph.gangs | shared:
        drawn.add_edges_from(itertools.pairwise(of_role[role]))
    # A role without vertices still joins the roles on both sides of it.
    if all(of_role.values()):
        assert {frozenset(found) for found in networkx.connected_components(drawn)} == set(graph.regions())


def test_a_rollout_is_its_own_region_and_a_gang_is_one() -> None:
    graph = compile_job(grpo_job({"actor": {"total": 2}, "rollout": {"total": 2}})).graph
    assert graph.region("rollout-1") == {"rollout-1"}
    assert graph.region("actor-1") == {"actor-0", "actor-1"}


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        ("rollout-9", "rollout has rollout-0 to rollout-1"),
        ("rolout-1", "did you mean 'rollout-1'?"),
        ("rolout-9", "did you mean 'rollout-0'?"),
        ("x", "known: trainer-0, actor-0, rollout-0, reward-0"),
    ],
)
def test_unknown_vertex_names_the_nearest(name: str, likely: str) -> None:
    graph = compile_job(grpo_job({"rollout": {"total": 2}})).graph
    with pytest.raises(NotFound, match=likely.replace("?", r"\?")):
        graph.vertex(name)


def test_compiled_job_pickles() -> None:
    compiled = compile_job(grpo_job())
    copy = pickle.loads(pickle.dumps(compiled))
    assert copy.plan == compiled.plan
    assert copy.graph.vertices == compiled.graph.vertices
