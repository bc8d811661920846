"""Which of Gyre's classes go together: defaults by the model that is trained, and sentences where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.config import parse_job
from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError, GraphError
from gyre.graph import CompiledJob, Dispatch, compile_job

ACTOR = {"entrypoint": "gyre.workloads.megatron:MegatronActor"}
FOLDER = {"megatron": {"model_path": "models/Qwen3-0.6B"}}


def ppo(config: dict[str, Any] | None = None, run: dict[str, Any] | None = None, **roles: Any) -> CompiledJob:
    given = {name: roles.pop(name, {}) for name in ("actor", "critic", "rollout", "reward")} | roles
    return compile_job(parse_job({"recipe": "ppo", "roles": given, "config": config or {}, "run": run or {}}))


def classes(job: CompiledJob) -> dict[str, str]:
    return {
        name: role.entrypoint.name for name, role in job.spec.roles.items() if role.entrypoint is not None
    }


def test_a_model_from_a_folder_brings_megatrons_critic_and_reference() -> None:
    found = ppo(FOLDER, actor=ACTOR, reference={})
    assert {classes(found)[role] for role in ("critic", "reference")} == {
        "MegatronCritic",
        "MegatronReference",
    }
    assert not any(operator.initial_policy for operator in found.dcg.operators), "they read it by themselves"
    again = compile_job(found.spec)
    assert (again.dcg, again.spec) == (found.dcg, found.spec)


@pytest.mark.parametrize("actor", [{}, ACTOR, {"entrypoint": "gyre.workloads.megatron.actor:MegatronActor"}])
def test_the_small_decoder_keeps_those_of_plain_torch_which_begin_with_its_policy(actor: Any) -> None:
    found = ppo(actor=actor, reference={})
    assert {classes(found)[role] for role in ("critic", "reference")} == {"TorchCritic", "TorchReference"}
    first = {operator.ref for operator in found.dcg.operators if operator.initial_policy}
    assert first == {"critic.values", "reference.logprobs"}


@pytest.mark.parametrize(
    "name", ["torch:TorchCritic", "megatron:MegatronCritic", "megatron.critic:MegatronCritic"]
)
def test_either_critic_may_be_named(name: str) -> None:
    found = ppo(FOLDER, actor=ACTOR, critic={"entrypoint": f"gyre.workloads.{name}"})
    assert not found.dcg.operator("critic.values").initial_policy


def test_plain_torch_trains_a_folders_model_too() -> None:
    found = ppo({"model_path": "models/Qwen3-0.6B"}, reference={})
    assert {classes(found)[role] for role in ("critic", "reference")} == {"TorchCritic", "TorchReference"}
    assert not any(operator.initial_policy for operator in found.dcg.operators), "they read it by themselves"


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"model_path": "models/a"}, "models/a"),
        ({"megatron": {"model_path": "models/a"}}, "models/a"),
        ({"model_path": "models/a/", "megatron": {"model_path": "models/a"}}, "models/a/"),
        ({}, ""),
    ],
)
def test_the_models_folder_has_one_setting_and_an_alias(config: dict[str, Any], path: str) -> None:
    assert WorkloadSettings.read(config).model_path == path


def test_an_alias_that_names_another_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model_path \(a\) and megatron.model_path \(b\) .* differ"):
        WorkloadSettings.read({"model_path": "a", "megatron": {"model_path": "b"}})


def test_a_critic_of_ones_own_is_given_the_first_policy() -> None:
    found = ppo(FOLDER, actor=ACTOR, critic={"entrypoint": "my.module:MegatronCritic"})
    assert found.dcg.operator("critic.values").initial_policy


def test_values_are_asked_of_all_ranks_of_the_critic() -> None:
    assert ppo().dcg.operator("critic.values").dispatch is Dispatch.SPREAD


SPLIT = {"tensor_parallel": 2, "pipeline_parallel": 2}


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        (
            {"config": {"megatron": FOLDER["megatron"] | SPLIT}, "actor": ACTOR | {"total": 6}},
            r"roles.actor.total: 6 is not a multiple .* \(4\)",
        ),
        (
            {"config": {"megatron": FOLDER["megatron"] | SPLIT}, "actor": ACTOR | {"total": 4}},
            r"roles.critic.total: 1 is not a multiple",
        ),
        (
            {"config": {"critic": {"optim": {"mini_batches": 3}}}, "run": {"prompts_per_step": 16}},
            r"config.critic.optim.mini_batches: 3 does not divide run.prompts_per_step \(16\)",
        ),
        (
            {"config": {"optim": {"mini_batches": 32}}, "run": {"prompts_per_step": 16}},
            "config.optim.mini_batches: 32",
        ),
    ],
)
def test_what_does_not_go_together_is_a_sentence(job: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GraphError, match=sentence):
        ppo(**job)


def test_generalised_advantages_need_a_critic() -> None:
    given = {"recipe": "grpo", "roles": {"actor": {}, "rollout": {}, "reward": {}}}
    with pytest.raises(GraphError, match="'gae' needs the values of a critic"):
        compile_job(parse_job(given | {"config": {"loss": {"adv_estimator": "gae"}}}))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"megatron": []}, r"config\.megatron: \[\] given, expected a mapping"),
        ({"optim": {"mini_batches": 0}}, r"config\.optim\.mini_batches: 0 should be greater"),
        (
            {"sampling": {"temprature": 1}},
            r"config\.sampling\.temprature: unknown key; did you mean 'temperature'",
        ),
        ({"optim": {"lr": "fast"}}, r"config\.optim\.lr: 'fast' should be a valid number"),
        ({"samplin": {}}, r"config\.samplin: unknown key; did you mean 'sampling'"),
    ],
)
def test_a_mistake_below_config_is_refused_with_its_path(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ppo(config)


def test_keys_that_no_section_claims_are_the_users_own() -> None:
    ppo({"curriculum": {"from": "easy"}, "goal": 3})


def test_config_is_the_users_own_where_neither_recipe_nor_class_is_gyres() -> None:
    script = {"roles": {"trainer": {"entrypoint": "my.job:Loop"}}, "config": {"model": "mine", "optim": 3}}
    compile_job(parse_job(script))
    script["roles"]["reward"] = {"entrypoint": "gyre.workloads.rewards:PythonReward"}
    with pytest.raises(ConfigError, match=r"config\.model: 'mine' given"):
        compile_job(parse_job(script))


@pytest.mark.parametrize("key", ["kl_loss_coef", "kl_reward_coef"])
def test_a_divergence_to_the_reference_needs_a_reference(key: str) -> None:
    given = {"loss": {key: 0.01}}
    with pytest.raises(
        GraphError, match=rf"config\.loss\.{key}: 0\.01 given, but the job has no reference role"
    ):
        ppo(given)
    ppo(given, reference={})
