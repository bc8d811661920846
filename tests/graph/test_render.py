"""What people and programs see of a compiled job."""

from __future__ import annotations

import io
import json

from gyre.graph import NodeCapacity, as_dict, as_dot, as_mermaid, as_tables, compile_job, fit_to_cluster
from gyre.graph.compile import CompiledJob
from tests.graph.jobs import grpo_job, role, script_job


def job() -> CompiledJob:
    return compile_job(grpo_job({"actor": {"total": 2}, "reference": {}}, max_staleness=1))


def test_dict_is_json_and_complete() -> None:
    data = json.loads(json.dumps(as_dict(job())))
    assert [found["name"] for found in data["roles"]] == [
        "trainer",
        "actor",
        "rollout",
        "reward",
        "reference",
        "rollout_manager",
    ]
    assert [cycle["delay"] for cycle in data["cycles"]] == [2, 2]
    assert data["regions"]["joined"] == [["actor-0", "actor-1"]]
    assert data["regions"]["single"] == 5
    assert {found["vertex"] for found in data["placement"]} >= {"actor-0", "rollout-0"}


def test_tables_say_what_the_dict_says() -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    compiled = job()
    fitted = fit_to_cluster(compiled.plan, [NodeCapacity("node-a", "10.0.0.1", 8, 2**34)])
    for table in as_tables(CompiledJob(compiled.spec, compiled.dcg, compiled.graph, fitted)):
        console.print(table)
    text = console.export_text()
    for part in (
        "rollout.generate",
        "actor-0, actor-1",
        "2 on actor.apply → rollout.generate",
        "node-a",
        "STRICT_PACK",
    ):
        assert part in text


def test_tables_are_capped() -> None:
    compiled = compile_job(script_job({"actor": role(100)}, node_num=20))
    assert as_tables(compiled, rows=10)[-1].row_count == 11


def test_drawings_name_every_operator_and_edge() -> None:
    compiled = job()
    dot, mermaid = as_dot(compiled), as_mermaid(compiled)
    assert dot.count(" -> ") == len(compiled.dcg.edges)
    assert '"actor.apply" -> "rollout.generate" [label="weights 4:1, delay 2", style=bold];' in dot
    assert mermaid.startswith("flowchart LR\n")
    assert 'op_actor__apply ==>|"weights 4:1, delay 2"| op_rollout__generate' in mermaid


def test_calls_of_the_trainer_are_drawn_between_roles() -> None:
    compiled = compile_job(script_job({"actor": role()}, edges=[{"source": "actor", "target": "trainer"}]))
    assert '"trainer" -> "actor" [label="control", style=dashed];' in as_dot(compiled)
    assert as_dict(compiled)["cycles"] == []
