"""PPO in one process: a critic beside the actor, whatever dies; and each recipe with the real torch workloads."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from gyre.config import parse_job
from gyre.errors import GraphError, UserCodeError
from gyre.graph import compile_job
from gyre.testing.in_process import InProcessJob
from gyre.workloads.torch.actor import TorchActor
from tests.workloads.conftest import digests_of, steps_of

pytestmark = pytest.mark.landing

DEADLINE_S = 60

TINY: dict[str, Any] = {
    "seed": 3,
    "task": {"digits": 2},
    "model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16, "max_positions": 32},
    "sampling": {"n": 4, "max_new_tokens": 3},
    "optim": {"lr": 1e-3},
    "critic": {"optim": {"lr": 1e-3}},
    "warm_start": {"max_steps": 3, "batch": 8, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
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


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize(("call", "victim", "nth", "when"), DEATHS)
def test_whoever_dies_actor_and_critic_end_with_the_same_bits(make_job, undisturbed, call, victim, nth, when):
    job = make_job(spec("ppo", **PPO_LOSS))
    job.on(call, nth, lambda: job.kill(victim), when=when)
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert job.killed == [victim], "the moment never came"
    assert digests_of(job) == undisturbed[0]
    assert critic_of(job) == undisturbed[1]
    account = job.account()
    assert (account.trained, account.lost, account.trained_twice) == (16, (), ())


# -- several updates a step ---------------------------------------------------------------------------

SEVERAL = {"lr": 1e-3, "epochs": 2, "mini_batches": 2}


def several(**loss: Any) -> dict[str, Any]:
    given = spec("ppo", **PPO_LOSS, **loss)
    given["config"] = given["config"] | {"optim": SEVERAL, "critic": {"optim": SEVERAL | {"epochs": 3}}}
    return given


@pytest.fixture(scope="module")
def undisturbed_updates(empty_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("updates")
    shutil.copy(empty_store, folder / "gyre.db")
    with InProcessJob(several(tis_imp_ratio_cap=2.0), folder) as job:
        job.result(timeout_s=DEADLINE_S)
    return digests_of(job), critic_of(job), steps_of(job), job.reports_of("WeightsPublished")


def test_a_step_of_several_updates_is_one_step_and_one_policy(undisturbed, undisturbed_updates):
    digests, critic, steps, published = undisturbed_updates
    assert [(row.metrics["updates"], row.metrics["critic_updates"]) for row in steps] == [(4, 6)] * 4
    assert steps[-1].metrics["old_kl"] > 0
    assert sorted(report.body["version"] for report in published) == [0, 1, 2, 3, 4]
    assert (critic["step"], critic["trained"]) == (4, [(0, 16)])
    assert digests[4] != undisturbed[0][4]


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize(
    ("call", "victim", "nth", "when"),
    [
        ("critic.apply", "critic-0", 3, "before"),
        ("actor.accumulate", "actor-0", 6, "after"),
        ("actor.apply", "trainer-0", 3, "after"),
        ("critic.apply", "actor-0", 4, "after"),
    ],
)
def test_so_whoever_dies_all_updates_are_made_again_with_the_same_bits(
    make_job, undisturbed_updates, call, victim, nth, when
):
    job = make_job(several(tis_imp_ratio_cap=2.0))
    job.on(call, nth, lambda: job.kill(victim), when=when)
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert job.killed == [victim], "the moment never came"
    assert (digests_of(job), critic_of(job)) == undisturbed_updates[:2]
    account = job.account()
    assert (account.trained, account.lost, account.trained_twice) == (16, (), ())


class FailsOnce(TorchActor):
    """Between the second and the third update of a step, once in the process's life."""

    calls = 0

    def gradient(self, groups: list[Any], rows: list[Any]) -> Any:
        FailsOnce.calls += 1
        if FailsOnce.calls == 4 * 2 + 3:  # of the third step, two after the first checkpoint
            raise RuntimeError("a device that is tired")
        return super().gradient(groups, rows)


def test_updates_that_fail_half_way_are_made_again_from_the_checkpoint(make_job, undisturbed_updates):
    given = several(tis_imp_ratio_cap=2.0)
    given["roles"]["actor"]["entrypoint"] = f"{__name__}:FailsOnce"
    FailsOnce.calls = 0
    with make_job(given) as job:
        job.result(timeout_s=DEADLINE_S)
    (told,) = job.reports_of("OperatorFailed")
    assert "a device that is tired" in told.body["error"]
    assert FailsOnce.calls == 4 * 4 + 3, "those of the step that failed were made again, and no others"
    assert (digests_of(job), critic_of(job)) == undisturbed_updates[:2]


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


class OftenTheSame(TokenSum):
    """Of every third prompt all samples earn the same."""

    def score(self, groups: list[Any]) -> list[Any]:
        for group in super().score(groups):
            for index, sample in enumerate(group.samples):
                sample.reward = 1.0 if group.id % 3 == 0 else float(index % 2)
        return groups


class AlwaysTheSame:
    def score(self, groups: list[Any]) -> list[Any]:
        for group in groups:
            for sample in group.samples:
                sample.reward = 0.5
        return groups


def streamed(recipe: str, reward: str = "TokenSum", **run: Any) -> dict[str, Any]:
    given = spec(recipe)
    given["roles"]["reward"] = {"entrypoint": f"{__name__}:{reward}"}
    return given | {"run": RUN | {"micro_batches": "streamed", **run}}


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize(
    ("call", "victim", "nth", "optim"),
    [
        ("critic.apply", "critic-0", 3, {"lr": 1e-3}),
        ("critic.accumulate", "critic-0", 4, {"lr": 1e-3}),
        ("actor.apply", "trainer-0", 2, {"lr": 1e-3}),
        ("critic.apply", "critic-0", 3, SEVERAL),
        ("actor.apply", "actor-0", 3, SEVERAL),
    ],
)
def test_a_streamed_critic_replays_what_was_recorded(make_job, call, victim, nth, optim):
    given = streamed("ppo")
    given["config"] = given["config"] | {"optim": optim, "critic": {"optim": optim}}
    job = make_job(given)
    job.on(call, nth, lambda: job.kill(victim), when="after")
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert (job.account().trained, job.account().lost, job.account().trained_twice) == (16, (), ())
    assert critic_of(job)["trained"] == [(0, 16)]
    told = [report.body["error"] for report in job.reports_of("OperatorFailed")]
    assert not [text for text in told if "replaying" in text], "a replay gave other weights"


@pytest.mark.parametrize("staleness", [0, 1])
def test_dynamic_sampling_replaces_groups_without_a_gradient(make_job, staleness):
    job = make_job(streamed("dapo", "OftenTheSame", dynamic_sampling=5) | {"max_staleness": staleness})
    job.on("actor.apply", 2, job.kill_trainer, when="after")
    with job:
        result = job.result(timeout_s=DEADLINE_S)
    account = job.account()
    trained = [group_id for row in steps_of(job) for group_id in row.group_ids]
    assert len(trained) == len(set(trained)) == 16
    assert not [group_id for group_id in trained if group_id % 3 == 0]
    assert account.drawn == account.trained + account.dropped
    assert account.dropped == len([n for n in range(account.drawn) if n % 3 == 0])
    assert (account.lost, account.trained_twice, result["prompts_lost"]) == ((), (), 0)
    told = [report.body for report in job.reports_of("GroupReplaced")]
    assert {body["reason"] for body in told} == {"no_gradient"}


def test_a_reward_that_tells_nothing_apart_fails_the_job(make_job):
    with (
        make_job(streamed("dapo", "AlwaysTheSame", dynamic_sampling=1)) as job,
        pytest.raises(UserCodeError, match="all samples earned the same"),
    ):
        job.result(timeout_s=DEADLINE_S)


def test_dynamic_sampling_needs_streamed_micro_batches():
    given = spec("dapo") | {"run": RUN | {"dynamic_sampling": 2}}
    with pytest.raises(GraphError, match="streamed"):
        compile_job(parse_job(given))
