"""The recipes: their graphs compile, and each brings the loss that it is named after."""

from __future__ import annotations

import pytest

from gyre.config import parse_job
from gyre.config.sections import WorkloadSettings
from gyre.graph import RECIPES, compile_job


def job(recipe: str, **keys):
    roles = {name: {} for name in RECIPES[recipe].required if name != "trainer"}
    return compile_job(parse_job({"recipe": recipe, "roles": {**roles, **keys.pop("roles", {})}, **keys}))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("reference", [False, True])
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
