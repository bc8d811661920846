"""What a job needs of a cluster to begin: the rest comes later, or the job waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.config import JobSpec, parse_job
from gyre.config.yaml_text import load_yaml
from gyre.errors import GraphError
from gyre.graph import NodeCapacity, can_come_later, compile_job, fit_to_cluster, fit_what_has_room

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_openr1_qwen3.yaml"


def gpus(name: str, count: int) -> NodeCapacity:
    return NodeCapacity(name, f"10.0.0.{name[1:]}", 64.0, 1 << 40, float(count))


def test_the_example_with_spot_instances_begins_on_the_trainers_machine() -> None:
    """Of `node_num: 2` it needs one: its rollouts are elastic from 0 on."""
    compiled = compile_job(parse_job(load_yaml(EXAMPLE)))
    fitted = fit_to_cluster(compiled.plan, [gpus("n1", 8)], can_come_later(compiled.spec))
    placed = fitted.machines()
    assert {placed[f"actor-{rank}"] for rank in range(8)} == {"n1"}
    assert not any(vertex.startswith("rollout-") and machine for vertex, machine in placed.items())
    assert any("rollout-0, rollout-1, rollout-2 will wait for room" in note for note in fitted.notes)
    whole = fit_to_cluster(compiled.plan, [gpus("n1", 8), gpus("n2", 8)], can_come_later(compiled.spec))
    assert whole.machines()["rollout-2"] == "n2"


def needs_two_machines() -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "j",
            "recipe": "grpo",
            "node_num": 2,
            "device_per_node": 4,
            "device_type": "GPU",
            "config": {"task": {"name": "arithmetic"}},
            "roles": {
                "actor": {"total": 4, "per_node": 4},
                "rollout": {"total": 3, "elastic": {"min": 1, "max": 4}},
                "reward": {"resources": {"accelerator": 0}},
            },
        }
    )


@pytest.mark.parametrize(("node_num", "helps"), [(1, False), (2, True)])
def test_a_machine_beyond_the_bound_of_node_num_is_not_asked_for(node_num: int, helps: bool) -> None:
    """The job's small vertices have taken the one machine that there is."""
    spec = {
        "name": "j",
        "recipe": "grpo",
        "node_num": node_num,
        "device_type": "CPU",
        "device_per_node": 8,
        "config": {"task": {"name": "arithmetic"}},
        "roles": {"actor": {"total": 1}, "rollout": {"total": 1, "resources": {"cpu": 3}}, "reward": {}},
    }
    small = NodeCapacity("n1", "10.0.0.1", 2.0, 1 << 34)
    plan = compile_job(JobSpec.model_validate(spec)).plan
    _, lacking = fit_what_has_room(plan, [small], standing={"actor-0": "n1"})
    assert lacking["rollout-0"].details["another_would_help"] is helps
    _, lacking = fit_what_has_room(plan, [small])
    assert lacking["rollout-0"].details["another_would_help"], (
        "none has taken it yet: all would go to the other"
    )


def test_what_is_needed_is_said_whether_it_is_refused_or_waited_for() -> None:
    compiled = compile_job(needs_two_machines())
    later = can_come_later(compiled.spec)
    with pytest.raises(GraphError, match="required 2 machines with GPUs, available 1") as refused:
        fit_to_cluster(compiled.plan, [gpus("n1", 4)], later)
    fitted = fit_to_cluster(compiled.plan, [gpus("n1", 4)], later, waits=True)
    [waits, comes] = fitted.notes[-2:]
    assert waits.startswith(
        "The job waits for room, for rollout-0: required 2 machines with GPUs, available 1."
    )
    assert waits.endswith(refused.value.hint)
    assert comes.startswith("rollout-1, rollout-2 will wait for room")
    assert (
        fit_to_cluster(compiled.plan, [gpus("n1", 4), gpus("n2", 1)], later).machines()["rollout-0"] == "n2"
    )


@pytest.mark.parametrize(("actor_gpus", "rollout_gpus"), [(8, 2), (4, 4), (2, 4)])
def test_what_comes_later_takes_no_room_from_what_the_job_needs(actor_gpus: int, rollout_gpus: int) -> None:
    """By size alone the larger rollouts would have the only machine, and the job could not begin."""
    spec = {
        "name": "j",
        "recipe": "grpo",
        "node_num": 2,
        "device_per_node": 8,
        "device_type": "GPU",
        "config": {"task": {"name": "arithmetic"}},
        "roles": {
            "actor": {"total": 1, "resources": {"accelerator": actor_gpus}},
            "rollout": {
                "total": 2,
                "elastic": {"min": 0, "max": 4},
                "resources": {"accelerator": rollout_gpus},
            },
            "reward": {"resources": {"accelerator": 0}},
        },
        "affinity": {"separate": [["actor", "rollout"]]},
    }
    compiled = compile_job(JobSpec.model_validate(spec))
    later = can_come_later(compiled.spec)
    placed, lacking = fit_what_has_room(compiled.plan, [gpus("n1", 8)], can_come_later=later)
    assert placed.machines()["actor-0"] == "n1"
    assert set(lacking) <= later
    assert placed.machines() == fit_to_cluster(compiled.plan, [gpus("n1", 8)], later).machines()


def test_who_comes_later_and_stands_keeps_its_room() -> None:
    compiled = compile_job(needs_two_machines())
    later = can_come_later(compiled.spec)
    standing = {"rollout-1": "n1", "rollout-2": "n1"}
    placed, lacking = fit_what_has_room(compiled.plan, [gpus("n1", 4)], standing, can_come_later=later)
    assert placed.machines()["rollout-1"] == placed.machines()["rollout-2"] == "n1"
    assert any(name.startswith("actor") for name in lacking)
