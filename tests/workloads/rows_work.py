"""What plain torch makes of rows of rollouts: what the other back ends are compared with."""

from __future__ import annotations

import copy
from typing import Any

from gyre.models.tensor_names import to_names
from gyre.rollouts.samples import Group
from gyre.workloads.base import WorkloadContext
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.critic import TorchCritic
from tests.megatron.learner_work import flat_values, step_by, take_valued_step, values_of

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_loss_coef": 0.1, "loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.02},
    "ppo": {"adv_estimator": "gae", "lam": 0.95, "gamma": 0.99, "kl_reward_coef": 0.05},
    "dr_grpo": {
        "adv_estimator": "dr_grpo",
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "kl_reward_coef": 0.02,
    },
    "rloo": {"adv_estimator": "rloo", "loss_agg_mode": "seq-mean-token-sum"},
    "truncated": {"tis_imp_ratio_cap": 1.1},
}
OPTIM = {"lr": 0.03, "eps": 0.03, "clip_norm": 0.5, "warmup_steps": 0}


def _bound(workload: Any, config: dict[str, Any]) -> Any:
    workload.context = WorkloadContext("j", "learner", 0, 1, config=config)
    workload.setup()
    return workload


def plain_steps(
    config: dict[str, Any], losses: dict[str, dict[str, Any]], groups: dict[str, list[Group]]
) -> list[dict[str, Any]]:
    """Of each loss in turn, the metrics and weights after a step, on from the one before."""
    actor = _bound(TorchActor(), config)
    found = []
    for name, loss in losses.items():
        metrics = step_by(actor, loss, groups[name])
        named = to_names(dict(actor.backend.model.named_parameters()), actor.backend.model.architecture)
        weights = {key: one.detach().numpy().copy() for key, one in named.items()}
        found.append({"metrics": metrics, "weights": weights})
    return found


def plain_values(config: dict[str, Any], groups: list[Group]) -> dict[str, Any]:
    """The values before a critic's step, and the metrics of the step."""
    critic = _bound(TorchCritic(), config)
    values = flat_values(values_of(critic, copy.deepcopy(groups)))
    return {"values": values, "metrics": take_valued_step(critic, [copy.deepcopy(groups)])}
