"""PPO in one process: a critic beside the actor, whatever dies; and each recipe with the real torch workloads."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from gyre.testing.in_process import InProcessJob
from tests.workloads.conftest import digests_of, steps_of

DEADLINE_S = 60

TINY: dict[str, Any] = {
    "seed": 3,
    "model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16},
    "sampling": {"n": 4, "max_new_tokens": 3},
    "warm_start": {"max_steps": 3, "batch": 8},
}
RUN = {
    "steps": 4,
    "prompts_per_step": 4,
    "groups_per_firing": 2,
    "groups_per_micro_batch": 2,
    "checkpoint_every": 2,
    "evaluate_every": 0,
    "call_timeout_s": 30.0,
}


def spec(recipe: str, *, actors: int = 1, **loss: Any) -> dict[str, Any]:
    roles: dict[str, Any] = {
        "actor": {"total": actors},
        "rollout": {"entrypoint": "gyre.workloads.torch.rollout:TorchRollout"},
        "reward": {"entrypoint": f"{__name__}:TokenSum"},
    }
    if recipe == "ppo":
        roles["critic"] = {}
    if loss.get("kl_loss_coef") or loss.get("kl_reward_coef"):
        roles["reference"] = {}
    return {"name": recipe, "recipe": recipe, "roles": roles, "run": RUN, "config": TINY | {"loss": loss}}


class TokenSum:
    """Differs between samples even of an untrained model."""

    def score(self, groups: list[Any]) -> list[Any]:
        for group in groups:
            for sample in group.samples:
                sample.reward = float(sample.token_ids.sum() % 5) / 4
        return groups


PPO_LOSS = {"kl_reward_coef": 0.02}


@pytest.fixture(scope="module")
def undisturbed(empty_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    shutil.copy(empty_store, folder / "gyre.db")
    with InProcessJob(spec("ppo", **PPO_LOSS), folder) as job:
        job.result(timeout_s=DEADLINE_S)
    return digests_of(job), critic_of(job), steps_of(job)


def critic_of(job):
    """What the critic's last checkpoint holds."""
    found = sorted((job.directory / "checkpoints").glob("step_*/critic/rank_00000.pt"))
    content = torch.load(found[-1], weights_only=True)
    return {key: content[key] for key in ("step", "digest", "trained")}


def test_the_critic_is_trained_beside_the_actor_and_told_with_its_steps(undisturbed):
    digests, critic, steps = undisturbed
    assert len(digests) == 4
    assert (critic["step"], critic["trained"]) == (4, [(0, 16)])
    assert len(set(digests.values())) == 4, "the actor did not move"
    errors = [row.metrics["critic_value_error"] for row in steps]
    assert min(errors) > 0
    assert {"critic_loss", "critic_explained", "critic_grad_norm"} <= steps[-1].metrics.keys()


DEATHS = [
    ("critic.values", "critic-0", 3, "before"),
    ("critic.values", "critic-0", 6, "after"),
    ("critic.accumulate", "critic-0", 4, "after"),
    ("critic.apply", "critic-0", 1, "before"),
    ("critic.apply", "critic-0", 3, "after"),
    ("critic.checkpoint", "critic-0", 2, "before"),
    ("actor.apply", "actor-0", 3, "before"),
    ("actor.apply", "trainer-0", 3, "after"),
    ("critic.apply", "trainer-0", 2, "after"),
    ("actor.apply", "critic-0", 4, "after"),
]


@pytest.mark.parametrize(("call", "victim", "nth", "when"), DEATHS)
def test_whoever_dies_actor_and_critic_end_with_the_same_bits(make_job, undisturbed, call, victim, nth, when):
    job = make_job(spec("ppo", **PPO_LOSS))
    if victim == "trainer-0":
        job.on(call, nth, job.kill_trainer, when=when)
    else:
        job.on(call, nth, lambda: job.restart(victim), when=when)
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert victim == "trainer-0" or job.vertex(victim).host.incarnation == 2, "the moment never came"
    assert digests_of(job) == undisturbed[0]
    assert critic_of(job) == undisturbed[1]
    account = job.account()
    assert (account.trained, account.lost, account.trained_twice) == (16, (), ())


@pytest.mark.parametrize(
    ("recipe", "loss"),
    [
        ("dr_grpo", {"kl_loss_coef": 0.01, "kl_loss_type": "k2"}),
        ("dapo", {"tis_imp_ratio_cap": 2.0}),
        ("rloo", {"kl_reward_coef": 0.05}),
        ("grpo", {"entropy_coeff": 0.01}),
    ],
)
def test_every_recipe_trains(make_job, recipe, loss):
    with make_job(spec(recipe, **loss)) as job:
        job.result(timeout_s=DEADLINE_S)
    assert len(set(digests_of(job).values())) == 4
    row = steps_of(job)[-1].metrics
    assert row["grad_norm"] > 0
    if "kl_loss_coef" in loss:
        assert row["kl"] > 0
    if "tis_imp_ratio_cap" in loss:
        assert row["tis_weight"] == pytest.approx(1.0, abs=1e-3)
