"""How long it takes to compile and place a job, from 100 to 100,000 vertices.

    python bench/graph.py [--json] [--sizes 100,1000] [--repeat 3]

The job is GRPO with a gang of actors, elastic rollouts, references and rewards, a quarter of the vertices each, on
nodes of 8 GPUs. The baseline is the same execution graph materialised in networkx, an edge for each pair of
vertices, with its regions as connected components: what an execution graph that stores its edges has to do. It is
left out above 2,000 vertices, where it needs gigabytes. `growth` is the exponent between a size and the one before.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from gyre.config import JobSpec, parse_job
from gyre.graph import CompiledJob, EdgeKind, NodeCapacity, compile_job, fit_to_cluster
from gyre.graph.placement_plan import plan_placement

SIZES = (100, 1_000, 10_000, 100_000)
BASELINE_LIMIT = 2_000


def job(vertices: int) -> JobSpec:
    each = vertices // 4
    return parse_job(
        {
            "recipe": "grpo",
            "device_type": "GPU",
            "node_num": math.ceil(3 * each / 8),
            "device_per_node": 8,
            "roles": {
                "actor": {"total": each},
                "rollout": {"total": each, "elastic": {"min": 1, "max": each}},
                "reference": {"total": each},
                "reward": {"total": vertices - 3 * each - 1, "resources": {"accelerator": 0}},
            },
        }
    )


def materialised(compiled: CompiledJob) -> list[set[str]]:
    """The baseline: every edge between two vertices as an edge of networkx; returns the regions."""
    import networkx

    graph = networkx.MultiDiGraph()
    graph.add_nodes_from(vertex.id for vertex in compiled.graph.vertices)
    peers = networkx.Graph()
    of_role: dict[str, list[str]] = {}
    for vertex in compiled.graph.vertices:
        of_role.setdefault(vertex.role, []).append(vertex.id)
    peers.add_nodes_from(graph)
    for role in compiled.graph.gangs:
        ranks = of_role[role]
        peers.add_edges_from((a, b) for a in ranks for b in ranks if a < b)
    for edge in compiled.graph.role_pairs():
        source, target = edge.source.partition(".")[0], edge.target.partition(".")[0]
        if source == target:
            continue
        pairs = [(a, b) for a in of_role[source] for b in of_role[target]]
        graph.add_edges_from(pairs, kind=edge.kind)
        if edge.kind is EdgeKind.COLLECTIVE:
            peers.add_edges_from(pairs)
    return list(networkx.connected_components(peers))


def seconds(work: Callable[[], Any], repeat: int) -> float:
    """The best of `repeat` runs: the others measure the machine."""
    best = math.inf
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def measure(vertices: int, repeat: int) -> dict[str, Any]:
    spec = job(vertices)
    compiled = compile_job(spec)
    machines = [
        NodeCapacity(f"n{i}", f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}", 64, 2**40, 8)
        for i in range(spec.node_num)
    ]
    some = [compiled.graph.vertices[i * len(compiled.graph) // 100].id for i in range(100)]
    return {
        "vertices": len(compiled.graph),
        "compile_and_plan_s": seconds(lambda: compile_job(spec), repeat),
        "plan_s": seconds(lambda: plan_placement(compiled.spec), repeat),
        "fit_s": seconds(lambda: fit_to_cluster(compiled.plan, machines), repeat),
        "region_s": seconds(lambda: [compiled.graph.region(vertex) for vertex in some], repeat) / len(some),
        "networkx_s": seconds(lambda: materialised(compiled), 1) if vertices <= BASELINE_LIMIT else None,
    }


def growth(rows: list[dict[str, Any]], key: str) -> None:
    """Adds the exponent e of time ~ vertices^e since the row before."""
    for before, row in zip([None, *rows], rows, strict=False):
        known = before is not None and before[key] and row[key]
        row[f"{key.removesuffix('_s')}_growth"] = (
            math.log(row[key] / before[key]) / math.log(row["vertices"] / before["vertices"])
            if before is not None and known
            else None
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument(
        "--sizes", type=lambda text: [int(part) for part in text.split(",")], default=list(SIZES)
    )
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    materialised(compile_job(job(20)))  # imports and first-use costs are not the graph's
    rows = [measure(size, arguments.repeat) for size in arguments.sizes]
    growth(rows, "compile_and_plan_s")
    growth(rows, "networkx_s")
    if arguments.json:
        json.dump(
            {"benchmark": "graph", "python": sys.version.split()[0], "rows": rows}, sys.stdout, indent=2
        )
        print()
        return
    print_table(rows)


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = [
        ("vertices", "vertices"),
        ("compile+plan", "compile_and_plan_s"),
        ("growth", "compile_and_plan_growth"),
        ("plan alone", "plan_s"),
        ("fit", "fit_s"),
        ("region", "region_s"),
        ("networkx", "networkx_s"),
    ]
    print("".join(f"{title:>14}" for title, _ in columns))
    for row in rows:
        print("".join(f"{cell(key, row[key]):>14}" for _, key in columns))


def cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key == "vertices":
        return f"{value:,}"
    if key.endswith("_growth"):
        return f"n^{value:.2f}"
    return (
        f"{value * 1e6:.1f} us"
        if value < 1e-3
        else f"{value * 1e3:.1f} ms"
        if value < 1
        else f"{value:.2f} s"
    )


if __name__ == "__main__":
    main()
