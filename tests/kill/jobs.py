"""The small job that the kill tests run: the real recipe on a real Ray cluster, made tiny."""

from __future__ import annotations

from typing import Any

from gyre.api import RLJobBuilder
from gyre.api.demo import AGENT_CONFIG

STEPS = 20


def tiny_job(steps: int = STEPS, **overrides: Any) -> RLJobBuilder:
    """GRPO with two rollout instances, a reward vertex and a gang of two actor ranks: about 10 s of work.

    With `own_rollouts` the rollouts are a class of the user's, called by the trainer; else they are the rollout plane.
    """
    builder = (
        RLJobBuilder()
        .node_num(1)
        .device_per_node(8)
        .device_type("CPU")
        .recipe("grpo")
        .config(
            {
                "seed": 7,
                "task": {"digits": 1},
                "model": {
                    "layers": 1,
                    "hidden": 48,
                    "heads": 2,
                    "kv_heads": 1,
                    "mlp": 96,
                    "max_positions": 32,
                },
                "sampling": {"n": 4, "max_new_tokens": 4},
                "optim": {"lr": 1e-3},
                "warm_start": {"max_steps": 80, "batch": 64, "lr": 1e-2, "slips": 0.3, "stop_at": 0.6},
                "pace_s": 0.05,
                "collective_timeout_s": 60,
                **overrides.pop("config", {}),
            }
        )
        .run(
            **{
                "steps": steps,
                "prompts_per_step": 16,
                "groups_per_firing": 4,
                "groups_per_micro_batch": 8,
                "checkpoint_every": 5,
                "evaluate_every": 10,
                "held_out": 16,
                **overrides.pop("run", {}),
            }
        )
        .failover(
            **{
                "silence_timeout_s": 3.0,
                "master_hung_after_s": 4.0,
                "backoff_s": 0.1,
                **overrides.pop("failover", {}),
            }
        )
    )
    builder = builder.max_staleness(overrides.pop("max_staleness", 0))
    staleness = overrides.pop("staleness", None)
    if staleness is not None:
        builder = builder.staleness(staleness)
    store_url = overrides.pop("store", None)
    if store_url is not None:
        builder = builder.store(store_url)
    builder = builder.observe(**overrides.pop("observe", {}))
    stall_s = overrides.pop("stall_timeout_s", 20.0)
    own_rollouts = overrides.pop("own_rollouts", False)
    rollouts = overrides.pop("rollouts", {})
    rollout_total = overrides.pop("rollout_total", 2)
    elastic = overrides.pop("elastic", None)
    rollout_cpu = overrides.pop("rollout_cpu", None)
    actors = overrides.pop("actors", 2)
    actor = overrides.pop("actor", ())
    reward = overrides.pop("reward", "PacedReward")
    reward_total = overrides.pop("reward_total", 1)
    reward_cpu = overrides.pop("reward_cpu", None)
    assert not overrides, overrides
    builder = builder.actor(*actor).total(actors).stall_timeout(stall_s)
    builder = builder.rollouts(**{"max_running": 64, "kv_tokens": 4096, "report_interval_s": 0.1, **rollouts})
    own = ("gyre.workloads.torch", "TorchRollout") if own_rollouts else ()
    builder = builder.rollout(*own).total(rollout_total).stall_timeout(stall_s)
    if elastic is not None:
        builder = builder.elastic(**elastic)
    if rollout_cpu is not None:
        builder = builder.resources(cpu=rollout_cpu)
    own = reward if isinstance(reward, tuple) else ("tests.kill.workloads", reward)
    builder = builder.reward(*own).total(reward_total).stall_timeout(stall_s)
    if reward_cpu is not None:
        builder = builder.resources(cpu=reward_cpu)
    return builder.end()


def agent_job(
    steps: int = STEPS, *, reward: tuple[str, str] = ("tests.kill.workloads", "PacedSessions"), **config: Any
) -> RLJobBuilder:
    """The demo's agents, made tiny: two vertices run sessions of up to four turns, over one engine."""
    builder = (
        RLJobBuilder()
        .node_num(1)
        .device_per_node(8)
        .device_type("CPU")
        .recipe("grpo")
        .config(
            {
                **AGENT_CONFIG,
                "seed": 7,
                "sampling": {"n": 4, "temperature": 1.0, "max_new_tokens": 12},
                "warm_start": {"max_steps": 60, "batch": 64, "lr": 4e-3, "slips": 0.6},
                "pace_s": 0.05,
                "collective_timeout_s": 60,
                **config,
            }
        )
        .run(
            steps=steps,
            prompts_per_step=16,
            groups_per_firing=4,
            groups_per_micro_batch=8,
            checkpoint_every=5,
            evaluate_every=4,
            held_out=16,
        )
        .failover(silence_timeout_s=30.0, master_hung_after_s=4.0, backoff_s=0.1)
    )
    builder = builder.actor().total(1).rollout().total(1).agent().total(2)
    return builder.reward(*reward).total(1).end()
