"""An algorithm of your own: a loss, an advantage and a graph, in one file, trained on two-digit addition.

    gyre plan examples/own_algorithm.py
    gyre run examples/own_algorithm.py

Nothing of Gyre is edited: the job names each by its import path, `module:Name`. An installed package may give it a
shorter name by an entry point. What each may assume and must promise: docs/bring-your-own.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gyre import Group, RLJobBuilder
from gyre.config import JobSpec
from gyre.config.sections import LossSettings
from gyre.graph import Dispatch, Edge, EdgeKind, Operator, Recipe

# -- the advantage: a sample's rank in its group, from -1 to 1 ----------------------------------------


def ranks(group: Group, rewards: np.ndarray, *, scale: float = 1.0) -> np.ndarray:
    """Of each sample a number. `rewards` is float64 `[n]`; a group whose samples earned the same gives zeros."""
    beaten = (rewards[:, None] > rewards[None, :]).mean(axis=1)
    ahead = (rewards[:, None] < rewards[None, :]).mean(axis=1)
    return scale * (beaten - ahead)


# -- the loss: REINFORCE, where a token counts less the further the policy has moved from it ----------


def faded(
    logprobs: Any, advantages: Any, mask: Any, settings: LossSettings, *, width: float, **given: Any
) -> Any:
    """The sum over tokens, with the weight to divide it by. All tensors are of one shape, `[rows, t]` or `[tokens]`."""
    from gyre.workloads.algorithms.losses import aggregate

    old = given["old_logprobs"]
    moved = logprobs.detach() - (logprobs.detach() if old is None else old)
    trust = (-(moved / width).square()).exp()
    per_token = -trust * advantages * logprobs
    return aggregate(
        per_token,
        mask,
        settings.loss_agg_mode,
        {"policy_loss": per_token, "trust": trust},
        rows=given["rows"],
        norm_length=given["norm_length"],
    )


faded.metrics = ("trust",)  # its mean over tokens is told with every step


# -- the recipe: the graph that the trainer walks -----------------------------------------------------


def on_policy(spec: JobSpec) -> tuple[list[Operator], list[Edge]]:
    """Prompts are answered, answers scored, scored groups trained on; then the next step's prompts are answered."""
    batch, micro = spec.run.prompts_per_step, spec.run.groups_per_micro_batch
    prompts = Operator("trainer", "prompts", Dispatch.CONTROLLER)
    generate = Operator("rollout", "generate")
    score = Operator("reward", "score")
    accumulate = Operator("actor", "accumulate", Dispatch.GANG, ordered=True)
    apply = Operator("actor", "apply", Dispatch.GANG, ordered=True)
    return [prompts, generate, score, accumulate, apply], [
        Edge(prompts.ref, generate.ref, EdgeKind.SAMPLES, micro, micro, capacity=2 * batch),
        Edge(generate.ref, score.ref, EdgeKind.SAMPLES, micro, micro, capacity=2 * batch),
        Edge(score.ref, accumulate.ref, EdgeKind.SAMPLES, micro, micro, capacity=2 * batch),
        Edge(accumulate.ref, apply.ref, EdgeKind.CONTROL, 1, batch // micro),
        # The cycle: the new weights license the next step's answers; one step of them is licensed at the start.
        Edge(apply.ref, generate.ref, EdgeKind.WEIGHTS, batch // micro, 1, delay=1),
    ]


REINFORCE = Recipe(
    name="reinforce",
    required=("trainer", "actor", "rollout", "reward"),
    optional=(),
    build=on_policy,
    loss={"loss_mode": "own_algorithm:faded", "loss_options": {"width": 0.5}},
)


# -- the job ------------------------------------------------------------------------------------------


def job() -> RLJobBuilder:
    return (
        RLJobBuilder()
        .name("own-algorithm")
        .recipe("own_algorithm:REINFORCE")
        .config(
            {
                "seed": 0,
                "task": {"digits": 2},
                "model": {
                    "layers": 2,
                    "hidden": 96,
                    "heads": 4,
                    "kv_heads": 2,
                    "mlp": 256,
                    "max_positions": 32,
                },
                "sampling": {"n": 8, "max_new_tokens": 4},
                "optim": {"lr": 1e-3},
                "warm_start": {"max_steps": 250, "batch": 256, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
                "loss": {"adv_estimator": "own_algorithm:ranks", "adv_options": {"scale": 2.0}},
            }
        )
        .run(steps=40, prompts_per_step=128, groups_per_micro_batch=32, checkpoint_every=10, evaluate_every=0)
        .actor()
        .total(1)
        .rollout("gyre.workloads.torch", "TorchRollout")  # called by the trainer: `generate` is its operator
        .total(2)
        .reward()
        .end()
    )
