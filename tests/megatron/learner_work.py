"""What rank processes do with critics, and with plain torch. Nothing here imports Megatron by itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.workloads.base import WorkloadContext
from tests.megatron.work import Steps, actor_on, ids, take_step


@contextmanager
def critic_on(rank: int, ranks: int, port: int, config: dict[str, Any]) -> Iterator[Any]:
    from gyre.workloads.megatron.critic import MegatronCritic

    critic = MegatronCritic()
    critic.context = WorkloadContext(
        "j", "critic", rank, ranks, config=config, master_addr="127.0.0.1", master_port=port
    )
    try:
        critic.setup()
        yield critic
    finally:
        if hasattr(critic, "backend"):
            critic.teardown()


def take_valued_step(critic: Any, micro_batches: list[list[Group]]) -> dict[str, Any]:
    """One step, its groups given to the ranks in another way for their values than for their training."""
    valued = values_of(critic, [group for groups in micro_batches for group in groups])
    by_id = {group.id: group for group in valued}
    return take_step(critic, [[by_id[group.id] for group in groups] for groups in micro_batches])


def values_of(critic: Any, groups: list[Group]) -> list[Group]:
    """All groups with the values of the critic's next step, as the trainer has them: put together from the ranks."""
    mine = copy.deepcopy(groups[::-1][critic.rank :: critic.world_size])
    told = critic.values(mine, step=critic.step + 1)
    assert ids(told) == ids(mine)
    return sorted(pooled(critic, told), key=lambda group: group.id)


def pooled(critic: Any, groups: list[Group]) -> list[Group]:
    """Every rank's groups, on each of them."""
    return [group for blob in critic.ranks.exchange(pack_groups(groups)) for group in unpack_groups(blob)]


def flat_values(groups: list[Group]) -> Any:
    return np.concatenate([sample.extras["values"] for group in groups for sample in group.samples])


def named_weights(critic: Any) -> dict[str, Any]:
    """By Hugging Face's names, on the first rank: a collective."""
    return {name: tensor.numpy().copy() for name, tensor in critic.backend.weights()}


def train_critic(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, policy: Any = None
) -> dict[str, Any]:
    """Values and metrics of each step, and the weights after the last."""
    with critic_on(rank, ranks, port, config) as critic:
        if policy is not None:
            assert critic.load_weights(*policy) == 0
        values, metrics = [], []
        for micro_batches in steps:
            values.append(flat_values(values_of(critic, [g for groups in micro_batches for g in groups])))
            metrics.append(take_valued_step(critic, micro_batches))
        return {
            "values": values,
            "metrics": metrics,
            "state": critic.state(),
            "weights": named_weights(critic),
        }


def checkpoint_and_go_on(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, folder: Path
) -> dict[str, Any]:
    with critic_on(rank, ranks, port, config) as critic:
        take_valued_step(critic, steps[0])
        critic.checkpoint(folder)
        state = critic.state()
        metrics = [take_valued_step(critic, micro_batches) for micro_batches in steps[1:]]
        return {"at": state, "metrics": metrics, "after": critic.state(), "weights": named_weights(critic)}


def restore_and_go_on(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, folder: Path
) -> dict[str, Any]:
    """Of another seed, which the checkpoint must replace."""
    with critic_on(rank, ranks, port, {**config, "seed": 99}) as critic:
        critic.restore(folder)
        state = critic.state()
        metrics = [take_valued_step(critic, micro_batches) for micro_batches in steps[1:]]
        return {"at": state, "metrics": metrics, "after": critic.state(), "weights": named_weights(critic)}


def train_in_plain_torch(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps
) -> dict[str, Any]:
    """The plain actor on ranks of its own: metrics, weights by Hugging Face's names, and state."""
    from gyre.models.tensor_names import to_names
    from gyre.workloads.torch.actor import TorchActor

    actor = TorchActor()
    actor.context = WorkloadContext(
        "j", "actor", rank, ranks, config=config, master_addr="127.0.0.1", master_port=port
    )
    actor.setup()
    try:
        actor.warm_start()
        metrics = [take_step(actor, micro_batches) for micro_batches in steps]
        named = to_names(dict(actor.backend.model.named_parameters()), actor.backend.model.architecture)
        weights = {name: tensor.detach().numpy().copy() for name, tensor in named.items()}
        return {"metrics": metrics, "weights": weights, "state": actor.state()}
    finally:
        actor.teardown()


def restore_and_train(
    rank: int, ranks: int, port: int, config: dict[str, Any], steps: Steps, folder: Path
) -> dict[str, Any]:
    """An actor that is killed after its first step and begins anew."""
    with actor_on(rank, ranks, port, config) as actor:
        actor.restore(folder)
        state = actor.state()
        metrics = [take_step(actor, micro_batches) for micro_batches in steps[1:]]
        return {"at": state, "after": {"metrics": metrics, "state": actor.state()}}


def step_by(actor: Any, loss: dict[str, Any], groups: list[Group]) -> dict[str, Any]:
    """A step by another loss than the one before."""
    from gyre.config.sections import WorkloadSettings

    actor.settings = WorkloadSettings.read({**actor.config, "loss": loss})
    return take_step(actor, [groups[:1], groups[1:]])


def steps_by(
    rank: int,
    ranks: int,
    port: int,
    config: dict[str, Any],
    losses: dict[str, dict[str, Any]],
    groups: dict[str, list[Group]],
) -> list[dict[str, Any]]:
    """A step by each loss in turn: metrics, and on the first rank weights."""
    from tests.megatron.work import named_weights as weights_of

    with actor_on(rank, ranks, port, config) as actor:
        return [
            {"metrics": step_by(actor, loss, groups[name]), "weights": weights_of(actor)}
            for name, loss in losses.items()
        ]


class TokenSum:
    """Differs between samples even of an untrained model."""

    def score(self, groups: list[Group]) -> list[Group]:
        for sample in (sample for group in groups for sample in group.samples):
            sample.reward = float(sample.token_ids.sum() % 5) / 4
        return groups


def run_ppo(rank: int, ranks: int, port: int, folder: Path, optim: dict[str, Any]) -> dict[str, Any]:
    """A whole job in this process: PPO with this critic beside the plain actor."""
    from gyre.testing.in_process import InProcessJob

    small = {"layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "mlp": 16}
    spec = {
        "name": "ppo",
        "recipe": "ppo",
        "roles": {
            "actor": {},
            "critic": {"entrypoint": "gyre.workloads.megatron:MegatronCritic"},
            "rollout": {"entrypoint": "gyre.workloads.torch.rollout:TorchRollout"},
            "reward": {"entrypoint": f"{__name__}:TokenSum"},
        },
        "run": {
            "steps": 3,
            "prompts_per_step": 4,
            "groups_per_firing": 2,
            "groups_per_micro_batch": 2,
            "checkpoint_every": 2,
            "evaluate_every": 0,
        },
        "config": {
            "seed": 3,
            "model": small,
            "task": {"digits": 2},
            "sampling": {"n": 2, "max_new_tokens": 3},
            "warm_start": {"max_steps": 2, "batch": 8, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
            "optim": optim,
            "critic": {"optim": optim},
        },
    }
    with InProcessJob(spec, folder) as job:
        job.on("actor.apply", 2, job.kill_trainer, when="after")
        result = job.result(timeout_s=60)
    books = sorted((job.directory / "checkpoints").glob("step_*/critic/actor.json"))
    account = job.account()
    return {
        "steps": result["steps"],
        "account": (account.trained, account.lost, account.trained_twice),
        "critic": json.loads(books[-1].read_text()),
    }
