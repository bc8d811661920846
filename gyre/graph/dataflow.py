"""Synchronous dataflow analysis: do the rates balance, and can every cycle fire (Lee and Messerschmitt, 1987).

Invariants:
- *balance*: a repetition vector `q` exists iff `q[source] * produce == q[target] * consume` on every edge;
- *liveness*: the graph runs forever iff one iteration (each operator fired `q` times) can be completed from the
  initial tokens, and it is enough to look at each strongly connected component by itself;
- collective edges carry no tokens and are ignored.

This module knows operators only as names. It must not know roles, vertices or placement.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from gyre.graph.elements import Edge, EdgeKind


@dataclass(frozen=True, slots=True)
class Imbalance:
    """One iteration puts `produced` tokens on the edge and takes `consumed` off it."""

    edge: Edge
    produced: int
    consumed: int


@dataclass(frozen=True, slots=True)
class StarvedCycle:
    """Edges in the direction of flow; `tokens[i]` is what lay on `edges[i]` when nothing could fire any more."""

    edges: tuple[Edge, ...]
    tokens: tuple[int, ...]


def carries_tokens(edge: Edge) -> bool:
    return edge.kind is not EdgeKind.COLLECTIVE


def repetition_vector(operators: Iterable[str], edges: Sequence[Edge]) -> dict[str, int] | Imbalance:
    """Firings of each operator in one iteration: the smallest whole numbers in each connected component."""
    neighbours: dict[str, list[Edge]] = defaultdict(list)
    for edge in edges:
        if carries_tokens(edge):
            neighbours[edge.source].append(edge)
            neighbours[edge.target].append(edge)
    found: dict[str, Fraction] = {}
    result: dict[str, int] = {}
    for start in operators:
        if start in found:
            continue
        found[start] = Fraction(1)
        component, at = [start], 0
        while at < len(component):
            here = component[at]
            at += 1
            for edge in neighbours[here]:
                ratio = Fraction(edge.produce, edge.consume)
                if edge.source == here:
                    other, rate = edge.target, found[here] * ratio
                else:
                    other, rate = edge.source, found[here] / ratio
                if other not in found:
                    found[other] = rate
                    component.append(other)
                elif found[other] != rate:
                    return _imbalance(edge, found)
        scale = lcm(*(found[name].denominator for name in component))
        whole = {name: int(found[name] * scale) for name in component}
        divisor = gcd(*whole.values())
        result.update({name: count // divisor for name, count in whole.items()})
    return result


def _imbalance(edge: Edge, found: dict[str, Fraction]) -> Imbalance:
    produced, consumed = found[edge.source] * edge.produce, found[edge.target] * edge.consume
    scale = lcm(produced.denominator, consumed.denominator)
    return Imbalance(edge, int(produced * scale), int(consumed * scale))


def starved_cycle(
    operators: Iterable[str], edges: Sequence[Edge], repetitions: dict[str, int]
) -> StarvedCycle | None:
    """A cycle that stops for want of tokens, or None where the graph is live. `repetitions` must balance."""
    flowing = [edge for edge in edges if carries_tokens(edge)]
    for edge in flowing:
        if edge.source == edge.target and edge.initial_tokens < edge.consume:
            return StarvedCycle((edge,), (edge.initial_tokens,))
    between = [edge for edge in flowing if edge.source != edge.target]
    component_of = _components(operators, between)
    inner: dict[int, list[Edge]] = defaultdict(list)
    for edge in between:
        if component_of[edge.source] == component_of[edge.target]:
            inner[component_of[edge.source]].append(edge)
    for number in sorted(inner):
        found = _one_iteration(inner[number], repetitions)
        if found is not None:
            return found
    return None


def _one_iteration(edges: Sequence[Edge], repetitions: dict[str, int]) -> StarvedCycle | None:
    """Fire a strongly connected component for one iteration, each operator as often at once as it can."""
    members = list(dict.fromkeys(edge.source for edge in edges))
    divisor = gcd(*(repetitions[name] for name in members))
    left = {name: repetitions[name] // divisor for name in members}
    into: dict[str, list[int]] = defaultdict(list)
    out_of: dict[str, list[int]] = defaultdict(list)
    tokens = []
    for index, edge in enumerate(edges):
        into[edge.target].append(index)
        out_of[edge.source].append(index)
        tokens.append(edge.initial_tokens)
    queue = deque(members)
    waiting = set(members)
    while queue:
        name = queue.popleft()
        waiting.discard(name)
        times = min(left[name], min(tokens[index] // edges[index].consume for index in into[name]))
        if times <= 0:
            continue
        left[name] -= times
        for index in into[name]:
            tokens[index] -= times * edges[index].consume
        for index in out_of[name]:
            tokens[index] += times * edges[index].produce
            target = edges[index].target
            if target not in waiting and left[target]:
                waiting.add(target)
                queue.append(target)
    blocked = next((name for name in members if left[name]), None)
    if blocked is None:
        return None
    return _trace_back(blocked, edges, into, tokens)


def _trace_back(
    blocked: str, edges: Sequence[Edge], into: dict[str, list[int]], tokens: list[int]
) -> StarvedCycle:
    """Walk from a blocked operator against the flow. A starving edge's source has firings left, so it is
    blocked too, and the walk closes on itself."""
    walked: list[int] = []
    seen: dict[str, int] = {}
    here = blocked
    while here not in seen:
        seen[here] = len(walked)
        index = next(index for index in into[here] if tokens[index] < edges[index].consume)
        walked.append(index)
        here = edges[index].source
    cycle = walked[seen[here] :][::-1]
    return StarvedCycle(tuple(edges[index] for index in cycle), tuple(tokens[index] for index in cycle))


def _components(operators: Iterable[str], edges: Sequence[Edge]) -> dict[str, int]:
    """The number of each name's strongly connected component (Kosaraju, without recursion)."""
    forward: dict[str, list[str]] = defaultdict(list)
    backward: dict[str, list[str]] = defaultdict(list)
    for edge in edges:
        forward[edge.source].append(edge.target)
        backward[edge.target].append(edge.source)
    order: list[str] = []
    seen: set[str] = set()
    for root in operators:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(forward[root]))]
        while stack:
            name, targets = stack[-1]
            following = next((target for target in targets if target not in seen), None)
            if following is None:
                order.append(name)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(forward[following])))
    component: dict[str, int] = {}
    for number, root in enumerate(reversed(order)):
        if root in component:
            continue
        component[root] = number
        pending = [root]
        while pending:
            for source in backward[pending.pop()]:
                if source not in component:
                    component[source] = number
                    pending.append(source)
    return component
