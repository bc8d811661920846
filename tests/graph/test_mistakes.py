"""Every mistake is one sentence that names the path, what was given and what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.config import JobSpec
from gyre.errors import ConfigError, GraphError
from gyre.graph import Dcg, Edge, EdgeKind, Operator, compile_job
from gyre.graph.validate import check_dcg
from tests.graph.jobs import grpo_job, role, script_job


def two(**keys: Any) -> JobSpec:
    return script_job({"actor": role(2), "rollout": role(2)}, **keys)


def edge(source: str, target: str, kind: str = "samples", delay: int = 0) -> dict[str, Any]:
    return {"source": source, "target": target, "kind": kind, "delay": delay}


MISTAKES: dict[str, tuple[JobSpec, list[str]]] = {
    "unknown role in an edge": (
        two(edges=[edge("rolout", "actor")]),
        ["edges.0.source: 'rolout' is not a role", "did you mean 'rollout'?"],
    ),
    "unknown role in an operator": (
        two(edges=[edge("rollout", "actor"), edge("rollout.go", "acto.go")]),
        ["edges.1.target: 'acto' in 'acto.go'", "did you mean 'actor'?"],
    ),
    "unknown operator of a recipe's role": (
        grpo_job(edges=[edge("rollout.generat", "actor.apply")]),
        ["edges.0.source: 'rollout.generat' is not an operator", "did you mean 'rollout.generate'?"],
    ),
    "no operator's name": (
        two(edges=[edge("rollout.", "actor.go")]),
        ["edges.0.source: 'rollout.' given", '"role.method"'],
    ),
    "half an operator edge": (
        two(edges=[edge("rollout.go", "actor")]),
        ["edges.0: 'rollout.go' → 'actor' joins an operator with a whole role"],
    ),
    "unknown role in an affinity": (
        two(affinity={"collocate": [["actor", "rolout"]]}),
        ["affinity.collocate.0: 'rolout' is not a role", "did you mean 'rollout'?"],
    ),
    "unknown role to spread": (
        two(affinity={"spread": ["x"]}),
        ["affinity.spread: 'x'", "known: actor, rollout, trainer"],
    ),
    "cycle of operators without delay": (
        two(edges=[edge("rollout.go", "actor.go"), edge("actor.go", "rollout.go", "weights")]),
        [
            "rollout.go → actor.go (samples, delay 0) with 0 of the 1 token it needs",
            "actor.go → rollout.go (weights, delay 0) with 0 of the 1 token it needs",
            "for instance actor.go → rollout.go a delay of 1",
        ],
    ),
    "cycle of roles without delay": (
        two(edges=[edge("rollout", "actor"), edge("actor", "rollout", "weights")]),
        ["rollout → actor (samples, delay 0)", "actor → rollout (weights, delay 0)"],
    ),
    "cycle of a role edge and an operator edge": (
        two(edges=[edge("rollout.go", "actor.go"), edge("actor", "rollout", "weights")]),
        ["actor → rollout (weights, delay 0)", "rollout.go → actor.go (samples, delay 0)"],
    ),
    "operator that feeds itself": (
        two(edges=[edge("actor.go", "actor.go")]),
        ["actor.go → actor.go (samples, delay 0)"],
    ),
    "cycle that the user adds to a recipe": (
        grpo_job(edges=[edge("actor.accumulate", "rollout.generate", "control")]),
        ["actor.accumulate → rollout.generate (control, delay 0)"],
    ),
    "operator that nothing feeds": (
        grpo_job({"critic": role()}, edges=[edge("critic.values", "actor.accumulate")]),
        ["operator critic.values: no edge leads to it", 'the target "critic.values"'],
    ),
    "role that nothing uses": (
        grpo_job({"critic": role()}),
        ["roles.critic: nothing feeds or calls it in recipe 'grpo'"],
    ),
    "total not divisible": (
        script_job({"actor": role(6, per_node=4)}),
        ["roles.actor.total: 6 is not divisible by per_node (4)", "1, 2, 3, 6"],
    ),
    "unknown recipe": (
        script_job({}, recipe="grop"),
        ["recipe: 'grop' is neither a known recipe", "did you mean 'grpo'?"],
    ),
    "recipe's role missing": (
        JobSpec.model_validate({"recipe": "grpo", "roles": {"actor": {}, "rollout": {}, "rewards": role()}}),
        ["roles.reward: is missing, and recipe 'grpo' needs it", "did you mean 'rewards'?"],
    ),
    "entrypoint missing": (
        script_job({"actor": {}}),
        ["roles.actor.entrypoint: is missing", '"package.module:Class"'],
    ),
    "entrypoint without a recipe's default": (
        grpo_job({"critic": {}}, edges=[edge("rollout.generate", "critic.values")]),
        ["roles.critic.entrypoint: is missing, and recipe 'grpo' has no default for it"],
    ),
    "trainer missing": (
        JobSpec.model_validate({"roles": {"trainr": role()}}),
        ["roles.trainer: is missing", "did you mean 'trainr'?"],
    ),
    "two trainers": (script_job({"trainer": role(2)}), ["roles.trainer.total: 2 given", "exactly 1"]),
    "elastic trainer": (
        script_job({"trainer": role(elastic={"min": 1, "max": 2})}),
        ["roles.trainer.elastic: exactly 1"],
    ),
    "trainer with devices": (
        script_job({"trainer": role(resources={"accelerator": 2})}),
        ["roles.trainer.resources.accelerator: 2 given, but the trainer takes no device"],
    ),
    "elastic bounds without total": (
        script_job({"rollout": role(5, elastic={"min": 1, "max": 4})}),
        ["roles.rollout.elastic: total 5 is not between min 1 and max 4"],
    ),
    "elastic bounds upside down": (
        script_job({"rollout": role(2, elastic={"min": 3, "max": 2})}),
        ["roles.rollout.elastic: min 3 is above max 2"],
    ),
    "elastic gang": (
        grpo_job({"actor": {"elastic": {"min": 1, "max": 2}}}),
        ["roles.actor.elastic: a gang cannot scale one by one"],
    ),
    "devices in total": (
        script_job({"actor": role(4), "rollout": role(6)}, node_num=2, device_per_node=4),
        ["required 10 devices (actor 4, rollout 6)", "available 8 (node_num 2 × device_per_node 4)"],
    ),
    "devices of a node": (
        script_job({"actor": role(4, per_node=4)}, node_num=4, device_per_node=2),
        ["roles.actor: per_node 4 requires 4 devices on a node, available 2"],
    ),
    "devices of one vertex": (
        script_job({"actor": role(resources={"accelerator": 4})}, node_num=4, device_per_node=2),
        ["roles.actor: one of them requires 4 devices on a node, available 2"],
    ),
    "nodes": (
        script_job({"actor": role(4, per_node=1)}, node_num=3, device_per_node=2),
        ["roles.actor.per_node: 4 with 1 on a node requires 4 nodes, available 3"],
    ),
    "room on nodes": (
        script_job(
            {
                "actor": role(2, resources={"accelerator": 3}),
                "rollout": role(1, resources={"accelerator": 2}),
            },
            node_num=2,
            device_per_node=4,
        ),
        ["roles.rollout: required room for 1 of them, available 0 on 2 nodes"],
    ),
    "odd accelerator": (
        script_job({"actor": role(resources={"accelerator": 1.5})}),
        ["roles.actor.resources.accelerator: 1.5 is above 1 and not a whole number"],
    ),
    "tiny accelerator": (
        script_job({"actor": role(resources={"accelerator": 1e-6})}),
        ["roles.actor.resources.accelerator: 1e-06 is below 0.0001"],
    ),
    "collocated and separated": (
        two(affinity={"collocate": [["actor", "rollout"]], "separate": [["rollout", "actor"]]}),
        ["affinity.separate.0: 'rollout' and 'actor' are collocated too"],
    ),
    "collocated totals": (
        script_job({"actor": role(3), "rollout": role(2)}, affinity={"collocate": [["actor", "rollout"]]}),
        ["totals (actor 3, rollout 2) do not divide", "roles.actor.total 3 is no multiple of 2"],
    ),
    "collocated per_node": (
        script_job(
            {"actor": role(4, per_node=2), "rollout": role(4, per_node=1)},
            affinity={"collocate": [["actor", "rollout"]]},
        ),
        ["actor, rollout share their nodes", "actor on 2, rollout on 4"],
    ),
    "collocated on more nodes than ranks": (
        script_job(
            {"actor": role(4, per_node=1), "rollout": role(2)},
            affinity={"collocate": [["actor", "rollout"]]},
        ),
        ["roles.actor.per_node puts 'actor' on 4 nodes", "is 2, which 4 does not divide"],
    ),
    "collocated and elastic": (
        script_job(
            {"actor": role(2), "rollout": role(2, elastic={"min": 1, "max": 4})},
            affinity={"collocate": [["actor", "rollout"]]},
        ),
        ["roles.rollout.elastic: 'rollout' shares its devices with actor"],
    ),
    "host collocation of one": (
        two(affinity={"collocate_hosts": [["actor"]]}),
        ["affinity.collocate_hosts.0: [actor]", "two or more"],
    ),
    "host collocation of an unknown role": (
        two(affinity={"collocate_hosts": [["actor", "rolout"]]}),
        ["affinity.collocate_hosts.0: 'rolout' is not a role", "did you mean 'rollout'?"],
    ),
    "on one host and on the same devices": (
        two(affinity={"collocate": [["actor", "rollout"]], "collocate_hosts": [["rollout", "actor"]]}),
        [
            "affinity.collocate_hosts.0: 'rollout' and 'actor' share their devices by affinity.collocate",
            "Keep one",
        ],
    ),
    "on one host and separated": (
        two(affinity={"collocate_hosts": [["actor", "rollout"]], "separate": [["rollout", "actor"]]}),
        ["affinity.separate.0: 'rollout' and 'actor' are collocated too"],
    ),
    "on one host through others and separated": (
        script_job(
            {"actor": role(), "rollout": role(), "helper": role()},
            affinity={
                "collocate_hosts": [["actor", "helper"], ["helper", "rollout"]],
                "separate": [["actor", "rollout"]],
            },
        ),
        ["affinity.separate.0: 'actor' and 'rollout' are collocated too"],
    ),
    "totals on one host": (
        script_job(
            {"actor": role(3), "rollout": role(2)}, affinity={"collocate_hosts": [["actor", "rollout"]]}
        ),
        [
            "affinity.collocate_hosts: actor, rollout share their machines rank by rank",
            "totals (actor 3, rollout 2) do not divide",
            "roles.actor.total 3 is no multiple of 2",
        ],
    ),
    "per_node on one host": (
        script_job(
            {"actor": role(4, per_node=2), "rollout": role(4, per_node=1)},
            affinity={"collocate_hosts": [["actor", "rollout"]]},
        ),
        ["affinity.collocate_hosts: actor, rollout share their nodes", "actor on 2, rollout on 4"],
    ),
    "spread and packed on one host": (
        two(affinity={"collocate_hosts": [["actor", "rollout"]], "spread": ["actor"], "pack": ["rollout"]}),
        ["'actor' and 'rollout' stand on the same machines", "affinity.spread has 'actor'", "pack 'rollout'"],
    ),
    "spread beside a per_node": (
        script_job(
            {"actor": role(2, per_node=1), "rollout": role(2)},
            affinity={"collocate_hosts": [["actor", "rollout"]], "spread": ["rollout"]},
        ),
        ["affinity.spread: 'rollout' stands beside 'actor'", "per_node 1 of 'actor' already says"],
    ),
    "on one host under two labels": (
        script_job(
            {
                "actor": role(2, resources={"labels": {"zone": "a"}}),
                "rollout": role(2, resources={"labels": {"zone": "b"}}),
            },
            affinity={"collocate_hosts": [["actor", "rollout"]]},
        ),
        [
            "affinity.collocate_hosts: 'actor' wants a machine with the label zone=a, and 'rollout' one with zone=b"
        ],
    ),
    "beside the trainer": (
        two(affinity={"collocate_hosts": [["actor", "trainer"]]}),
        ["affinity.collocate_hosts: 'trainer' is to stand beside 'actor'", "Leave trainer out"],
    ),
    "collocation of one": (
        two(affinity={"collocate": [["actor"]]}),
        ["affinity.collocate.0: [actor]", "two or more"],
    ),
    "spread and packed": (
        two(affinity={"spread": ["actor"], "pack": ["actor"]}),
        ["affinity: 'actor' is both in spread and in pack"],
    ),
    "spread and per_node": (
        script_job({"actor": role(2, per_node=1)}, node_num=2, affinity={"spread": ["actor"]}),
        ["affinity.spread: 'actor' also has per_node 1"],
    ),
    "separated without nodes": (
        two(node_num=1, affinity={"separate": [["actor", "rollout"]]}),
        ["roles.rollout: required room for 2 of them, available 0", "1 of 1 nodes hold actor"],
    ),
    "collocated under two labels": (
        script_job(
            {
                "actor": role(2, resources={"labels": {"zone": "a"}}),
                "rollout": role(2, resources={"labels": {"zone": "b"}}),
            },
            affinity={"collocate": [["actor", "rollout"]]},
        ),
        ["'actor' wants a machine with the label zone=a, and 'rollout' one with zone=b"],
    ),
    "steps that end inside a firing": (
        grpo_job(run={"prompts_per_step": 64, "groups_per_firing": 10}),
        ["run.groups_per_firing: 10 does not divide run.prompts_per_step (64)"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_a_sentence(mistake: str) -> None:
    spec, parts = MISTAKES[mistake]
    with pytest.raises(GraphError) as raised:
        compile_job(spec)
    for part in parts:
        assert part in str(raised.value)
    assert isinstance(raised.value, ConfigError)
    assert raised.value.exit_code == 2


def test_rates_that_do_not_balance_name_the_edge() -> None:
    a, b = Operator("a", "go"), Operator("b", "go")
    first = Edge(a.ref, b.ref, EdgeKind.SAMPLES, 4, 2)
    second = Edge(a.ref, b.ref, EdgeKind.CONTROL, 3, 1)
    with pytest.raises(GraphError, match=r"edge a.go → b.go \(control, delay 0\): its rates do not balance"):
        check_dcg(Dcg(("a", "b"), (a, b), (first, second)))


@pytest.mark.parametrize(("produce", "consume"), [(4, 4), (4, 1), (1, 4)])
def test_capacity_below_a_firing_is_refused(produce: int, consume: int) -> None:
    a, b = Operator("a", "go"), Operator("b", "go")

    def check(capacity: int) -> None:
        edge = Edge(a.ref, b.ref, EdgeKind.SAMPLES, produce, consume, capacity=capacity)
        check_dcg(Dcg(("a", "b"), (a, b), (edge,)))

    with pytest.raises(GraphError, match=r"capacity of 3 is less than one firing needs \(4\)"):
        check(3)
    check(4)


def test_delay_that_is_too_small_for_the_rates_is_a_deadlock() -> None:
    a, b = Operator("a", "go"), Operator("b", "go")
    there = Edge(a.ref, b.ref, EdgeKind.SAMPLES, 1, 4)
    back = Edge(b.ref, a.ref, EdgeKind.WEIGHTS, 4, 1, delay=0)
    with pytest.raises(GraphError, match="cycle without enough delay"):
        check_dcg(Dcg(("a", "b"), (a, b), (there, back)))
    licensed = Edge(b.ref, a.ref, EdgeKind.WEIGHTS, 4, 1, delay=1)
    check_dcg(Dcg(("a", "b"), (a, b), (there, licensed)))
    short = Edge(a.ref, b.ref, EdgeKind.SAMPLES, 2, 3)
    one_token = Edge(b.ref, a.ref, EdgeKind.WEIGHTS, 3, 2, delay=0)
    with pytest.raises(GraphError) as raised:
        check_dcg(Dcg(("a", "b"), (a, b), (short, one_token)))
    assert [step[:2] for step in raised.value.details["cycle"]] in (
        [["a.go", "b.go"], ["b.go", "a.go"]],
        [["b.go", "a.go"], ["a.go", "b.go"]],
    )
