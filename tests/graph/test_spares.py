"""`rollouts.spares`: a role of instances that stand by, planned and placed beside the others."""

from __future__ import annotations

import pytest

from gyre.config import SPARE_ROLLOUT, parse_job
from gyre.config.changes import changes_between, check_changes
from gyre.errors import GraphError
from gyre.graph import can_come_later, compile_job, is_instance, pools_of, rollouts_of, with_numbers
from gyre.graph.render import as_dict
from tests.graph.jobs import grpo_job, role

GPUS = {"node_num": 2, "device_per_node": 4, "device_type": "GPU"}


def test_spares_are_instances_with_devices_of_their_own() -> None:
    rollout = {
        "total": 2,
        "resources": {"accelerator": 1},
        "pool": {"price_per_hour": 4.0, "max_running": 64},
    }
    compiled = compile_job(grpo_job({"rollout": rollout}, rollouts={"spares": 2}, **GPUS))
    spec, plan = compiled.spec, compiled.plan
    assert is_instance(spec, SPARE_ROLLOUT)
    assert rollouts_of(spec, SPARE_ROLLOUT).max_running == 64
    placed = [plan.placements[f"{name}-{rank}"] for name in ("rollout", SPARE_ROLLOUT) for rank in range(2)]
    assert len({(one.node, one.devices) for one in placed}) == 4, "two of them share a device"
    pools = pools_of(spec, {"rollout": 5, SPARE_ROLLOUT: 1})
    assert (pools["rollout"]["count"], pools[SPARE_ROLLOUT]["count"]) == (5, 1)
    assert pools[SPARE_ROLLOUT]["price_per_hour"] == 4.0, "it is paid for while it waits"
    shown = as_dict(compiled)
    assert [(one["name"], one["total"]) for one in shown["roles"] if one["name"] == SPARE_ROLLOUT] == [
        (SPARE_ROLLOUT, 2)
    ]
    assert {f"{SPARE_ROLLOUT}-0", f"{SPARE_ROLLOUT}-1"} <= {one["vertex"] for one in shown["placement"]}


def test_a_job_begins_without_the_spares_for_which_there_is_no_room() -> None:
    spec = compile_job(grpo_job({"rollout": {"total": 2}}, rollouts={"spares": 1})).spec
    assert can_come_later(spec) == {f"{SPARE_ROLLOUT}-0"}


def test_what_is_compiled_again_has_the_same_spares() -> None:
    once = compile_job(grpo_job(rollouts={"spares": 1}))
    again = compile_job(once.spec)
    assert (again.spec, again.plan) == (once.spec, once.plan)
    none = with_numbers(once.plan, once.spec, dict.fromkeys(once.spec.roles, 1) | {SPARE_ROLLOUT: 0})
    assert f"{SPARE_ROLLOUT}-0" not in none.placements, "people may give their devices back"


def test_without_spares_there_is_no_such_role() -> None:
    assert SPARE_ROLLOUT not in compile_job(grpo_job()).spec.roles


def test_spares_stand_apart_from_whom_rollouts_stand_apart() -> None:
    affinity = {"separate": [["actor", "rollout"]], "spread": ["rollout"]}
    compiled = compile_job(grpo_job(affinity=affinity, rollouts={"spares": 1}))
    places = compiled.plan.placements
    assert places[f"{SPARE_ROLLOUT}-0"].node != places["actor-0"].node
    assert compiled.spec.affinity.spread == ["rollout", SPARE_ROLLOUT]


def test_spares_of_rollouts_that_the_trainer_calls_itself_are_refused() -> None:
    with pytest.raises(GraphError, match=r"rollouts\.spares: 1 given, but the job's rollouts are not"):
        compile_job(grpo_job({"rollout": role()}, rollouts={"spares": 1}))


def test_spares_of_instances_on_the_actors_devices_are_refused() -> None:
    with pytest.raises(GraphError, match=r"rollouts\.spares: 1 given, but all instances are on the actor's"):
        compile_job(grpo_job(affinity={"collocate": [["actor", "rollout"]]}, rollouts={"spares": 1}))


def test_spares_that_do_not_fit_are_named_with_what_is_required() -> None:
    with pytest.raises(GraphError, match=rf"{SPARE_ROLLOUT} 1"):
        compile_job(
            grpo_job({"rollout": {"total": 2}}, rollouts={"spares": 1}, node_num=1, device_per_node=4)
        )


def test_a_fleet_has_spares_too() -> None:
    spec = compile_job(
        parse_job({"recipe": "fleet", "roles": {"rollout": {"total": 2}}, "rollouts": {"spares": 1}})
    ).spec
    assert pools_of(spec)[SPARE_ROLLOUT]["count"] == 1


def test_a_job_that_goes_on_may_have_more_of_them() -> None:
    one, two = (compile_job(grpo_job(rollouts={"spares": count})).spec for count in (1, 2))
    check_changes(changes_between(one.model_dump(mode="json"), two.model_dump(mode="json")))
