"""Balance and deadlock agree with playing the graph token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gyre.graph import Edge, EdgeKind
from gyre.graph.dataflow import Imbalance, StarvedCycle, repetition_vector, starved_cycle
from tests.examples import examples


def brute_force_lives(names: Sequence[str], edges: Sequence[Edge], repetitions: dict[str, int]) -> bool:
    """One iteration, one firing at a time, in whatever order is possible."""
    tokens = [edge.initial_tokens for edge in edges]
    left = dict(repetitions)
    fired = True
    while fired:
        fired = False
        for name in names:
            into = [i for i, edge in enumerate(edges) if edge.target == name]
            if left[name] and all(tokens[i] >= edges[i].consume for i in into):
                for i in into:
                    tokens[i] -= edges[i].consume
                for i, edge in enumerate(edges):
                    if edge.source == name:
                        tokens[i] += edge.produce
                left[name] -= 1
                fired = True
    return not any(left.values())


@st.composite
def balanced_graphs(draw: st.DrawFn) -> tuple[list[str], list[Edge], dict[str, int]]:
    names = [f"r.{letter}" for letter in "abcde"[: draw(st.integers(1, 5))]]
    firings = {name: draw(st.integers(1, 4)) for name in names}
    edges = []
    for _ in range(draw(st.integers(0, 8))):
        source, target = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        scale = draw(st.integers(1, 2))
        edges.append(
            Edge(
                source,
                target,
                draw(st.sampled_from([EdgeKind.SAMPLES, EdgeKind.WEIGHTS, EdgeKind.CONTROL])),
                firings[target] * scale,
                firings[source] * scale,
                draw(st.integers(0, 3)),
            )
        )
    return names, edges, firings


@settings(max_examples=examples(300), deadline=None)
@given(balanced_graphs())
def test_deadlock_is_found_exactly_where_playing_gets_stuck(
    graph: tuple[list[str], list[Edge], dict[str, int]],
) -> None:
    names, edges, _ = graph
    repetitions = repetition_vector(names, edges)
    assert not isinstance(repetitions, Imbalance)
    found = starved_cycle(names, edges, repetitions)
    assert (found is None) == brute_force_lives(names, edges, repetitions)
    if found is not None:
        following = deque(found.edges)
        following.rotate(-1)
        assert all(edge.target == after.source for edge, after in zip(found.edges, following, strict=True))
        assert all(tokens < edge.consume for edge, tokens in zip(found.edges, found.tokens, strict=True))


@settings(max_examples=examples(200), deadline=None)
@given(balanced_graphs())
def test_repetitions_balance_every_edge(graph: tuple[list[str], list[Edge], dict[str, int]]) -> None:
    names, edges, _ = graph
    repetitions = repetition_vector(names, edges)
    assert not isinstance(repetitions, Imbalance)
    assert all(repetitions[e.source] * e.produce == repetitions[e.target] * e.consume for e in edges)


@settings(max_examples=examples(100), deadline=None)
@given(balanced_graphs(), st.data())
def test_imbalance_is_found(graph: tuple[list[str], list[Edge], dict[str, int]], data: st.DataObject) -> None:
    names, edges, _ = graph
    assume(edges)
    edge = data.draw(st.sampled_from(edges))
    spoiled = Edge(edge.source, edge.target, edge.kind, edge.produce + 1, edge.consume, edge.delay)
    assert isinstance(repetition_vector(names, [*edges, spoiled]), Imbalance)


def test_collective_edges_carry_no_tokens() -> None:
    both = [Edge("a.x", "b.x", EdgeKind.COLLECTIVE), Edge("b.x", "a.x", EdgeKind.COLLECTIVE)]
    assert starved_cycle(["a.x", "b.x"], both, {"a.x": 1, "b.x": 1}) is None


def test_long_cycles_need_no_recursion() -> None:
    names = [f"r.n{i}" for i in range(5000)]
    ring = [Edge(a, b, EdgeKind.SAMPLES) for a, b in zip(names, [*names[1:], names[0]], strict=True)]
    repetitions = dict.fromkeys(names, 1)
    found = starved_cycle(names, ring, repetitions)
    assert isinstance(found, StarvedCycle)
    assert len(found.edges) == 5000
    ring[7] = Edge(ring[7].source, ring[7].target, EdgeKind.SAMPLES, delay=1)
    assert starved_cycle(names, ring, repetitions) is None
