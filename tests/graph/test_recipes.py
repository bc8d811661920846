"""The recipes: their graphs compile, and each brings the loss that it is named after."""

from __future__ import annotations

import pytest

from gyre.config import FLEET, parse_job
from gyre.config.sections import WorkloadSettings
from gyre.errors import GraphError
from gyre.graph import RECIPES, compile_job


def job(recipe: str, **keys):
    roles = {name: {} for name in RECIPES[recipe].required if name != "trainer"}
    return compile_job(parse_job({"recipe": recipe, "roles": {**roles, **keys.pop("roles", {})}, **keys}))


@pytest.mark.parametrize(
    ("recipe", "reference"),
    [(name, False) for name in RECIPES] + [(name, True) for name in RECIPES if name != FLEET],
)
def test_a_recipe_compiles_to_the_same_graph_again(recipe, reference):
    first = job(recipe, roles={"reference": {}} if reference else {})
    again = compile_job(first.spec)
    assert again.dcg == first.dcg
    assert again.spec == first.spec
    WorkloadSettings.read(first.spec.config)  # its defaults are settings


@pytest.mark.parametrize(
    ("recipe", "estimator", "mode", "clip"),
    [
        ("grpo", "grpo", "token-mean", (0.2, 0.28)),
        ("dapo", "grpo", "token-mean", (0.2, 0.28)),
        ("dr_grpo", "dr_grpo", "seq-mean-token-sum-norm", (0.2, 0.2)),
        ("rloo", "rloo", "seq-mean-token-sum", (0.2, 0.2)),
    ],
)
def test_a_recipe_brings_its_loss(recipe, estimator, mode, clip):
    loss = WorkloadSettings.read(job(recipe).spec.config).loss
    assert (loss.adv_estimator, loss.loss_agg_mode) == (estimator, mode)
    assert (loss.clip_ratio_low, loss.clip_ratio_high) == clip


def test_what_the_job_says_goes_over_the_recipe_s_loss():
    spec = job(
        "rloo", config={"seed": 4, "loss": {"loss_agg_mode": "token-mean", "clip_ratio_low": 0.1}}
    ).spec
    loss = WorkloadSettings.read(spec.config).loss
    assert (loss.adv_estimator, loss.loss_agg_mode, loss.clip_ratio_low) == ("rloo", "token-mean", 0.1)
    assert spec.config["seed"] == 4


def test_the_job_as_it_was_given_is_not_changed():
    given = parse_job({"recipe": "rloo", "roles": {"actor": {}, "rollout": {}, "reward": {}}})
    compile_job(given)
    assert given.config == {}


def test_a_fleet_has_a_door_and_a_keeper() -> None:
    made = job(FLEET)
    assert made.spec.rollouts.door is not None
    assert str(made.spec.roles["trainer"].entrypoint) == "gyre.workloads.fleet_keeper:FleetKeeper"
    assert set(made.spec.roles) == {"trainer", "rollout", "rollout_manager"}
    assert job("grpo").spec.rollouts.door is None


@pytest.mark.parametrize(
    ("recipe", "keys", "sentence"),
    [
        ("grpo", {"rollouts": {"door": {}}}, "rollouts.door: is given, but recipe 'grpo' has a trainer"),
        (FLEET, {"rollouts": {"local": 1}}, "a fleet has no trainer whose devices it could use"),
        (
            FLEET,
            {"roles": {"rollout": {"entrypoint": "gyre.workloads.torch:TorchRollout"}}},
            "a fleet consists of instances of the rollout plane",
        ),
        (FLEET, {"roles": {"reference": {}}}, "roles.reference: nothing feeds or calls it"),
        (FLEET, {"roles": {"actor": {}}}, "roles.actor"),
    ],
)
def test_what_no_fleet_can_be_is_refused(recipe, keys, sentence):
    with pytest.raises(GraphError, match=sentence):
        job(recipe, **keys)


def test_a_fleet_may_have_pools() -> None:
    made = job(FLEET, roles={"rollout_spot": {"pool": {"price_per_hour": 1.0}}})
    assert str(made.spec.roles["rollout_spot"].entrypoint).endswith("RolloutInstance")
