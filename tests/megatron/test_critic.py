"""The critic over real ranks: every layout gives plain torch's values, and its gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.models.tensor_names import to_names
from gyre.workloads.base import WorkloadContext
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.critic import TorchCritic
from tests.megatron import learner_work, work
from tests.megatron.test_hugging_face import FAMILIES
from tests.megatron.work import LAYOUTS, config_of, random_groups, take_step
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow

STRAIGHT = {"lr": 1.0, "eps": 1.0, "clip_norm": 1e9, "warmup_steps": 0}
PPO: dict[str, Any] = {
    "loss": {"adv_estimator": "gae", "lam": 0.9, "gamma": 0.98, "cliprange_value": 0.2},
    "critic": {"optim": {"lr": 0.2, "eps": 0.1, "warmup_steps": 0}},
}
STEPS = [
    [random_groups(0, 3), [], random_groups(3, 1), random_groups(4, 5)],
    [random_groups(9, 1), random_groups(10, 4)],
    [random_groups(14, 4)],
]
"""Micro-batches of unequal size; after the first step no value is 0 any more, and the second clips."""


def plain_torch(config: dict[str, Any], steps: work.Steps, policy: Any = None) -> dict[str, Any]:
    """Plain torch in one process."""
    critic = TorchCritic()
    critic.context = WorkloadContext("j", "critic", 0, 1, config=config)
    critic.setup()
    if policy is not None:
        critic.load_weights(*policy)
    values, metrics = [], []
    for parts in steps:
        groups = critic.values(
            copy.deepcopy([group for part in parts for group in part]), step=critic.step + 1
        )
        values.append(learner_work.flat_values(groups))
        metrics.append(take_step(critic, [groups]))
    named = to_names(
        dict(critic.backend.model.decoder.named_parameters()), critic.backend.model.decoder.architecture
    )
    named |= {f"value_head.{name}": one for name, one in critic.backend.model.value_head.named_parameters()}
    return {
        "values": values,
        "metrics": metrics,
        "weights": {name: tensor.detach().numpy() for name, tensor in named.items()},
    }


def same(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for result in found:
        for mine, theirs in zip(result["values"], wanted["values"], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=0)
        for told, expected in zip(result["metrics"], wanted["metrics"], strict=True):
            assert told == pytest.approx(expected, rel=2e-5, abs=1e-5)
        assert result["state"] == found[0]["state"]
    weights = found[0]["weights"]
    assert weights.keys() == wanted["weights"].keys()
    for name, expected in wanted["weights"].items():
        np.testing.assert_allclose(weights[name], expected, atol=1e-5, rtol=0, err_msg=name)


@pytest.fixture(scope="module")
def policy() -> Any:
    """Of another seed than the critics': what they begin with."""
    actor = TorchActor()
    actor.context = WorkloadContext("j", "actor", 0, 1, config={**config_of("alone"), "seed": 5})
    actor.setup()
    return actor.export_weights(version=0)


@pytest.fixture(scope="module")
def small(policy: Any) -> dict[str, Any]:
    found = plain_torch(config_of("alone", **PPO), STEPS, policy)
    assert not found["values"][0].any()
    assert found["values"][1].std() > 0.01
    return found


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("layout", ["pp2", "tp2-sequence", "dp2"])
def test_values_and_steps_are_plain_torchs(
    pool: RankPool, policy: Any, small: dict[str, Any], layout: str
) -> None:
    same(
        pool.run(learner_work.train_critic, LAYOUTS[layout][0], config_of(layout, **PPO), STEPS, policy),
        small,
    )


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3-tied", "tp2"), ("qwen2", "pp2"), ("llama-bias", "dp2")]
)
def test_so_are_those_of_a_model_from_a_folder(
    pool: RankPool, tmp_path: Path, family: str, layout: str
) -> None:
    folder = work.write_folder(tmp_path / "m", FAMILIES[family])
    config = config_of(layout, **PPO)
    config["megatron"]["model_path"] = str(folder)
    expected = plain_torch(config, STEPS[:2])
    assert expected["values"][0].std() > 0.01, "the head is drawn, and not zero"
    same(pool.run(learner_work.train_critic, LAYOUTS[layout][0], config, STEPS[:2]), expected)


@pytest.mark.slow
def test_a_restored_critic_goes_on_bit_by_bit_and_in_another_layout(pool: RankPool, tmp_path: Path) -> None:
    config = config_of("tp2", **PPO)
    was = pool.run(learner_work.checkpoint_and_go_on, 2, config, STEPS[:2], tmp_path)
    came = pool.run(learner_work.restore_and_go_on, 2, config, STEPS[:2], tmp_path)
    for mine, theirs in zip(came, was, strict=True):
        assert (mine["at"], mine["metrics"], mine["after"]) == (
            theirs["at"],
            theirs["metrics"],
            theirs["after"],
        )
    (other,) = pool.run(learner_work.restore_and_go_on, 1, config_of("alone", **PPO), STEPS[:2], tmp_path)
    assert other["at"] == was[0]["at"]
    for name, expected in was[0]["weights"].items():
        np.testing.assert_allclose(other["weights"][name], expected, atol=1e-5, rtol=0, err_msg=name)


def test_a_job_trains_it_beside_its_actor(pool: RankPool, tmp_path: Path) -> None:
    """In several updates a step. The trainer dies once, and the critic is checkpointed with the actor."""
    (told,) = pool.run(learner_work.run_ppo, 1, tmp_path, {"lr": 1e-3, "epochs": 2, "mini_batches": 2})
    assert (told["steps"], told["account"]) == (3, (12, (), ()))
    critic = told["critic"]
    assert (critic["step"], critic["trained"], critic["metrics"]["updates"]) == (3, [[0, 12]], 4)
    assert critic["metrics"]["value_error"] > 0
