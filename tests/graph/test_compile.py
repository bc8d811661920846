"""Compilation: what a job becomes, and that it is the same every time."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.config import parse_job
from gyre.graph import Dispatch, Edge, EdgeKind, as_dict, compile_job
from tests.examples import examples
from tests.graph.jobs import grpo_job, role, script_job


def test_recipe_gets_its_trainer_and_classes() -> None:
    compiled = compile_job(grpo_job())
    assert list(compiled.spec.roles) == ["trainer", "actor", "rollout", "reward", "rollout_manager"]
    assert {str(found.entrypoint) for found in compiled.spec.roles.values()} == {
        "gyre.workloads.trainer.loop:GraphTrainer",
        "gyre.workloads.torch.actor:TorchActor",
        "gyre.workloads.rollout_vertices:RolloutInstance",
        "gyre.workloads.rollout_vertices:RolloutManagerVertex",
        "gyre.workloads.rewards:ExactMatchReward",
    }
    generate = next(op for op in compiled.dcg.operators if op.ref == "rollout.generate")
    assert generate.dispatch is Dispatch.PLANE


def test_a_rollout_class_of_the_users_is_called_itself_and_needs_no_manager() -> None:
    compiled = compile_job(grpo_job({"rollout": {"entrypoint": "mine:Rollout"}}))
    assert "rollout_manager" not in compiled.spec.roles
    generate = next(op for op in compiled.dcg.operators if op.ref == "rollout.generate")
    assert generate.dispatch is Dispatch.ONE


def test_users_class_goes_over_the_recipes() -> None:
    compiled = compile_job(grpo_job({"reward": {"entrypoint": "mine:Reward"}}))
    assert str(compiled.spec.roles["reward"].entrypoint) == "mine:Reward"


def test_gang_operators_make_their_role_a_gang() -> None:
    compiled = compile_job(grpo_job({"actor": {"total": 2}}))
    assert {name for name, found in compiled.spec.roles.items() if found.gang} == {"actor"}


def test_collective_edges_make_both_roles_gangs() -> None:
    spec = script_job(
        {"actor": role(2), "critic": role(2), "rollout": role(2)},
        edges=[{"source": "actor", "target": "critic", "kind": "collective"}],
    )
    compiled = compile_job(spec)
    assert {name for name, found in compiled.spec.roles.items() if found.gang} == {"actor", "critic"}
    assert compiled.graph.region("actor-0") == {"actor-0", "actor-1", "critic-0", "critic-1"}


def test_trainer_calls_every_role_of_a_script_job() -> None:
    compiled = compile_job(script_job({"actor": role(), "rollout": role()}))
    assert compiled.dcg.role_edges == (
        Edge("trainer", "actor", EdgeKind.CONTROL),
        Edge("trainer", "rollout", EdgeKind.CONTROL),
    )


def test_trainers_call_is_not_doubled_by_an_edge_that_says_so() -> None:
    edge = {"source": "trainer", "target": "actor", "kind": "control"}
    compiled = compile_job(script_job({"actor": role()}, edges=[edge]))
    assert len(compiled.dcg.role_edges) == 1


def test_answering_the_trainer_is_no_deadlock() -> None:
    spec = script_job({"actor": role()}, edges=[{"source": "actor", "target": "trainer"}])
    assert len(compile_job(spec).dcg.role_edges) == 2


def test_operators_of_script_jobs_come_from_their_edges() -> None:
    spec = script_job(
        {"actor": role(2, gang=True), "rollout": role()},
        edges=[{"source": "rollout.generate", "target": "actor.update"}],
    )
    found = {operator.ref: operator.dispatch for operator in compile_job(spec).dcg.operators}
    assert found == {"rollout.generate": Dispatch.ONE, "actor.update": Dispatch.GANG}


def test_users_operator_joins_the_recipe_with_balanced_rates() -> None:
    spec = grpo_job(
        {"critic": role()},
        run={"prompts_per_step": 64, "groups_per_firing": 4, "groups_per_micro_batch": 16},
        edges=[
            {"source": "rollout.generate", "target": "critic.values"},
            {"source": "critic.values", "target": "actor.accumulate"},
        ],
    )
    edges = {(edge.source, edge.target): edge for edge in compile_job(spec).dcg.edges}
    to_critic, to_actor = (
        edges["rollout.generate", "critic.values"],
        edges["critic.values", "actor.accumulate"],
    )
    assert (to_critic.produce, to_critic.consume) == (4, 4)
    assert (to_actor.produce, to_actor.consume) == (4, 16)


def test_spec_that_was_given_is_not_changed() -> None:
    spec = grpo_job({"actor": {"total": 2}})
    before = spec.model_dump()
    compile_job(spec)
    assert spec.model_dump() == before


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    actor=st.integers(1, 4),
    rollout=st.integers(1, 5),
    reference=st.booleans(),
    collocate=st.booleans(),
    staleness=st.integers(0, 3),
    firing=st.sampled_from([1, 2, 4, 8]),
    micro=st.sampled_from([1, 2, 4, 8]),
)
def test_compiling_is_deterministic_and_settles_at_once(
    actor: int, rollout: int, reference: bool, collocate: bool, staleness: int, firing: int, micro: int
) -> None:
    roles: dict[str, dict[str, object]] = {"actor": {"total": actor}, "rollout": {"total": rollout}}
    if reference:
        roles["reference"] = {"total": actor}
    if reference and collocate:
        keys: dict[str, object] = {"affinity": {"collocate": [["actor", "reference"]]}}
    else:
        keys = {}
    spec = grpo_job(
        roles,
        node_num=2,
        max_staleness=staleness,
        run={"prompts_per_step": 8, "groups_per_firing": firing, "groups_per_micro_batch": micro},
        **keys,
    )
    once, again = compile_job(spec), compile_job(spec.model_copy(deep=True))
    assert as_dict(once) == as_dict(again)
    assert once.dcg == again.dcg
    assert once.plan == again.plan
    settled = compile_job(parse_job(once.spec.model_dump(mode="json")))
    assert as_dict(settled) == as_dict(once)


@pytest.mark.parametrize("module", ["gyre.graph", "gyre.config"])
def test_import_pulls_in_nothing_heavy(module: str) -> None:
    heavy = "{'ray', 'torch', 'sqlalchemy', 'fastapi', 'rich', 'networkx', 'numpy'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_graph_reads_no_clock_and_no_random_source() -> None:
    from pathlib import Path

    import gyre.graph

    for file in Path(gyre.graph.__file__).parent.glob("*.py"):
        for line in file.read_text().splitlines():
            assert not line.startswith(
                ("import time", "import random", "from time", "from random", "from datetime")
            )
