"""The job that is soaked: GRPO whose answers are hundreds of tokens long, with the default budgets."""

from __future__ import annotations

from typing import Any

import numpy as np

from gyre.api import RLJobBuilder
from gyre.philox import uniforms
from gyre.rollouts import Group
from gyre.workloads import operator
from gyre.workloads.rewards import ExactMatchReward
from gyre.workloads.tasks.arithmetic import ArithmeticTask
from tests.soak.network import HEAD, NETWORK

SHORTEST, LONGEST = 128, 384
"""Answers, in tokens."""

_STREAM_LENGTH = 7


class LongAnswers(ArithmeticTask):
    """Sums whose answers end at a length that each prompt brings, for nothing else ends them."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.stop_token_ids = ()

    def prompt(self, index: int) -> Group:
        group = super().prompt(index)
        lot = float(uniforms(self.seed, _STREAM_LENGTH, index, 0, 0))
        group.meta["max_new_tokens"] = SHORTEST + int(lot * (LONGEST - SHORTEST + 1))
        return group


class Longer(ExactMatchReward):
    """An answer earns most for its length, some for the share of its tokens whose ids are odd: the end token, which the
    engine heeds whatever the data set says, has an even one, and is soon unlearned."""

    @operator
    def score(self, groups: list[Group]) -> list[Group]:  # type: ignore[override]
        for group in groups:
            most = group.token_limit(LONGEST)
            for sample in group.samples:
                odd = float(np.mean(sample.token_ids % 2))
                sample.reward = 0.9 * len(sample.token_ids) / most + 0.1 * odd
            self.report_progress()
        return groups


def soak_job(*, prompts: int, machines: int) -> RLJobBuilder:
    """An endless job on the head and so many machines."""
    model = {"layers": 1, "hidden": 48, "heads": 2, "kv_heads": 1, "mlp": 96, "max_positions": 512}
    return (
        RLJobBuilder()
        .node_num(1 + machines)
        .device_per_node(8)
        .device_type("CPU")
        .recipe("grpo")
        .weights(transports=["tcp"], bind=NETWORK)
        .config(
            {
                "seed": 7,
                "task": {"digits": 1},
                "model": model,
                "sampling": {"n": 4, "max_new_tokens": LONGEST},
                "optim": {"lr": 3e-3},
                "collective_timeout_s": 60,
            }
        )
        .run(
            steps=1_000_000,
            data="tests.soak.job:LongAnswers",
            prompts_per_step=prompts,
            groups_per_firing=max(prompts // 4, 1),
            groups_per_micro_batch=max(prompts // 2, 1),
            checkpoint_every=5,
            evaluate_every=10,
            held_out=4,
        )
        .max_staleness(2)
        .rollouts(host=HEAD, max_running=64, kv_tokens=32_768)
        .actor()
        .total(2)
        .rollout()
        .total(3)
        .elastic(min=1, max=6, auto=False)
        .resources(cpu=2)
        .reward("tests.soak.job", "Longer")
        .total(1)
        .end()
        .spread("rollout")
    )
