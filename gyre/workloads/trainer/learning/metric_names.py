"""The metrics of a step: their names, units and meanings, in one place.

The same names are in `StepCompleted.metrics`, in `metrics.jsonl`, in `gyre metrics`, in REST and, as
`gyre_step_<name>`, in Prometheus. docs/training.md has this table; a test compares the two.

Pure: it imports nothing. What a loss or an auxiliary role brings of its own goes by names of its own.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """`source` is `trainer` (from the step's samples) or `learner` (from the optimizer's step)."""

    unit: str
    source: str
    meaning: str


METRICS: dict[str, Metric] = {
    "step": Metric("", "trainer", "optimizer step, from 1"),
    "version": Metric("", "trainer", "policy version that the step made"),
    "at": Metric("s", "trainer", "when the step ended, in seconds since 1970"),
    "reward_mean": Metric("", "trainer", "mean reward of the step's samples"),
    "reward_std": Metric("", "trainer", "standard deviation of the rewards over all samples"),
    "reward_min": Metric("", "trainer", "least reward"),
    "reward_max": Metric("", "trainer", "greatest reward"),
    "loss": Metric("", "learner", "the loss that was descended, with every term"),
    "policy_loss": Metric("", "learner", "the policy's term of the loss, a mean over tokens"),
    "kl": Metric("nat", "learner", "KL to the reference policy per token; only with `loss.kl_loss_coef`"),
    "old_kl": Metric(
        "nat",
        "learner",
        "KL per token (k3) to the policy that the ratio is to: the one that generated, or, with "
        "`loss.tis_imp_ratio_cap`, the trainer's own before the step",
    ),
    "rollout_kl": Metric(
        "nat",
        "learner",
        "KL per token (k3) of the trainer's policy to the engine's; only with `loss.tis_imp_ratio_cap`",
    ),
    "entropy": Metric("nat", "learner", "entropy of the policy per token, over tokens with a gradient"),
    "clipped": Metric("ratio", "learner", "share of tokens at the clip of the ratio"),
    "tis_weight": Metric("", "learner", "mean importance weight; only with `loss.tis_imp_ratio_cap`"),
    "tis_capped": Metric("ratio", "learner", "share of tokens whose importance weight was capped"),
    "grad_norm": Metric("", "learner", "norm of the gradient before the clip"),
    "lr": Metric("", "learner", "learning rate"),
    "updates": Metric("", "learner", "updates of the weights; only with several a step"),
    "groups": Metric("", "trainer", "prompts that were trained on"),
    "samples": Metric("", "trainer", "answers that were trained on"),
    "tokens": Metric("", "trainer", "tokens of the answers; 0 where the step was skipped"),
    "prompt_tokens_mean": Metric("token", "trainer", "mean length of the prompts"),
    "completion_tokens_mean": Metric("token", "trainer", "mean length of the answers"),
    "completion_tokens_max": Metric("token", "trainer", "length of the longest answer"),
    "cut_off_ratio": Metric("ratio", "trainer", "share of answers that ended at their limit of tokens"),
    "flat_groups": Metric(
        "",
        "trainer",
        "groups whose samples all earned the same: with a baseline of the group they have no gradient",
    ),
    "flat_groups_ratio": Metric("ratio", "trainer", "share of groups that are flat"),
    "turns_mean": Metric(
        "",
        "trainer",
        "turns of a rollout on average; this and what follows only of a job with agents",
    ),
    "turns_max": Metric(
        "",
        "trainer",
        "most turns of a rollout",
    ),
    "rollouts_scored_ratio": Metric(
        "ratio",
        "trainer",
        "share of rollouts that ended with the agent's score",
    ),
    "rollouts_truncated_ratio": Metric(
        "ratio",
        "trainer",
        "share of rollouts that ended because their turns, tokens or time were spent",
    ),
    "rollouts_policy_fault_ratio": Metric(
        "ratio",
        "trainer",
        "share of rollouts that ended because the policy did what it must not",
    ),
    "tokens_not_drawn": Metric(
        "",
        "trainer",
        "tokens after the prompts that no policy drew: what agents, tools and the chat format put there",
    ),
    "tool_seconds_mean": Metric(
        "s",
        "trainer",
        "time of a rollout between a turn's answer and the next request, on average: its agent and its tools. "
        "Of rollouts that one rollout manager saw from first to last",
    ),
    "tool_seconds_max": Metric(
        "s",
        "trainer",
        "the longest of these",
    ),
    "engine_seconds_mean": Metric(
        "s",
        "trainer",
        "time of a rollout in which a turn was generated or waited for an engine, on average; of the same rollouts",
    ),
    "turn_1_tokens_mean": Metric(
        "token",
        "trainer",
        "tokens that were drawn in a rollout's first turn, on average over those that have one",
    ),
    "turn_2_tokens_mean": Metric(
        "token",
        "trainer",
        "tokens that were drawn in a rollout's second turn, on average over those that have one",
    ),
    "turn_3_tokens_mean": Metric(
        "token",
        "trainer",
        "tokens that were drawn in a rollout's third turn, on average over those that have one",
    ),
    "turn_4_tokens_mean": Metric(
        "token",
        "trainer",
        "tokens that were drawn in a rollout's fourth turn, on average over those that have one",
    ),
    "later_turns_tokens_mean": Metric(
        "token",
        "trainer",
        "tokens that were drawn in a turn after the fourth, on average",
    ),
    "staleness_mean": Metric("version", "trainer", "age of a token on average"),
    "staleness_max": Metric("version", "trainer", "age of the oldest token"),
    "seconds": Metric("s", "trainer", "time since the step before"),
    "tokens_per_s": Metric("token/s", "trainer", "tokens of the step over its seconds"),
    "tokens_per_s_per_gpu": Metric(
        "token/s", "trainer", "the same by GPU that the job has; only of a job on GPUs"
    ),
    "model_flops": Metric(
        "",
        "learner",
        "operations of the model in the step's passes, forward and backward; only of models that are known",
    ),
    "peak_flops": Metric(
        "1/s", "learner", "what the learner's GPUs could make at most; only of cards that are known"
    ),
    "mfu": Metric("ratio", "trainer", "`model_flops` over `peak_flops` times `seconds`"),
    "cost": Metric("", "trainer", "price of the step's `seconds`; only of a job with prices"),
    "cost_per_million_tokens": Metric("", "trainer", "price of a million `tokens` at the step's"),
    "skipped": Metric(
        "", "learner", "1 where the gradient was not finite and the weights stayed as they were"
    ),
    "groups_skipped": Metric("", "trainer", "groups of such a step, which are dropped"),
}
