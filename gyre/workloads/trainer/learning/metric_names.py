"""The metrics of a step: their names, units, meanings and titles, in one place.

The same names are in `StepCompleted.metrics`, in `metrics.jsonl`, in `gyre metrics`, in REST and, as
`gyre_step_<name>`, in Prometheus. docs/training.md has this table; a test compares the two. The page has their titles
from here (`ui/src/facts.ts`), `gyre metrics` its headings.

Pure: it imports nothing. What a loss or an auxiliary role brings of its own goes by names of its own.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """`source` is `trainer` (from the step's samples) or `learner` (from the optimizer's step). `title` is above its
    curve, and `caption` beside that in place of the unit, or of what it is a share; `head` is above its column. Without
    them its name and its unit are."""

    unit: str
    source: str
    meaning: str
    title: str = ""
    caption: str = ""
    head: str = ""


METRICS: dict[str, Metric] = {
    "step": Metric("", "trainer", "optimizer step, from 1"),
    "version": Metric("", "trainer", "policy version that the step made"),
    "at": Metric("s", "trainer", "when the step ended, in seconds since 1970"),
    "reward_mean": Metric(
        "", "trainer", "mean reward of the step's samples", "Reward", "mean ± std", "REWARD"
    ),
    "reward_std": Metric("", "trainer", "standard deviation of the rewards over all samples", head="STD"),
    "reward_min": Metric("", "trainer", "least reward"),
    "reward_max": Metric("", "trainer", "greatest reward"),
    "loss": Metric("", "learner", "the loss that was descended, with every term", "Loss"),
    "policy_loss": Metric("", "learner", "the policy's term of the loss, a mean over tokens"),
    "kl": Metric(
        "nat",
        "learner",
        "KL to the reference policy per token; only with `loss.kl_loss_coef`",
        "KL to the reference",
    ),
    "old_kl": Metric(
        "nat",
        "learner",
        "KL per token (k3) to the policy that the ratio is to: the one that generated, or, with "
        "`loss.tis_imp_ratio_cap`, the trainer's own before the step",
        "KL to the old policy",
    ),
    "rollout_kl": Metric(
        "nat",
        "learner",
        "KL per token (k3) of the trainer's policy to the engine's; only with `loss.tis_imp_ratio_cap`",
        "KL to the engine",
    ),
    "entropy": Metric(
        "nat", "learner", "entropy of the policy per token, over tokens with a gradient", "Entropy"
    ),
    "clipped": Metric("ratio", "learner", "share of tokens at the clip of the ratio", "Clipped"),
    "tis_weight": Metric("", "learner", "mean importance weight; only with `loss.tis_imp_ratio_cap`"),
    "tis_capped": Metric("ratio", "learner", "share of tokens whose importance weight was capped"),
    "grad_norm": Metric(
        "", "learner", "norm of the gradient before the clip", "Gradient's norm", "before the clip", "GRAD"
    ),
    "lr": Metric("", "learner", "learning rate", "Learning rate"),
    "updates": Metric("", "learner", "updates of the weights; only with several a step"),
    "groups": Metric("", "trainer", "prompts that were trained on"),
    "samples": Metric("", "trainer", "answers that were trained on"),
    "tokens": Metric("", "trainer", "tokens of the answers; 0 where the step was skipped"),
    "prompt_tokens_mean": Metric("token", "trainer", "mean length of the prompts", head="PROMPT"),
    "completion_tokens_mean": Metric(
        "token", "trainer", "mean length of the answers", "Length of answers", head="ANSWER"
    ),
    "completion_tokens_max": Metric("token", "trainer", "length of the longest answer", head="LONGEST"),
    "cut_off_ratio": Metric(
        "ratio", "trainer", "share of answers that ended at their limit of tokens", "Cut off", head="CUT"
    ),
    "flat_groups": Metric(
        "",
        "trainer",
        "groups whose samples all earned the same: with a baseline of the group they have no gradient",
    ),
    "flat_groups_ratio": Metric(
        "ratio", "trainer", "share of groups that are flat", "Flat groups", head="FLAT"
    ),
    "turns_mean": Metric(
        "",
        "trainer",
        "turns of a rollout on average; this and what follows only of a job with agents",
        "Turns of a rollout",
    ),
    "turns_max": Metric("", "trainer", "most turns of a rollout", "Turns of a rollout, most"),
    "rollouts_scored_ratio": Metric(
        "ratio", "trainer", "share of rollouts that ended with the agent's score", "Rollouts that were scored"
    ),
    "rollouts_truncated_ratio": Metric(
        "ratio",
        "trainer",
        "share of rollouts that ended because their turns, tokens or time were spent",
        "Rollouts that were cut off",
    ),
    "rollouts_policy_fault_ratio": Metric(
        "ratio",
        "trainer",
        "share of rollouts that ended because the policy did what it must not",
        "Rollouts with a fault of the policy",
    ),
    "tokens_not_drawn": Metric(
        "",
        "trainer",
        "tokens after the prompts that no policy drew: what agents, tools and the chat format put there",
        "Tokens that were not drawn",
    ),
    "tool_seconds_mean": Metric(
        "s",
        "trainer",
        "time of a rollout between a turn's answer and the next request, on average: its agent and its tools. "
        "Of rollouts that one rollout manager saw from first to last",
        "Time of agents and tools, mean",
    ),
    "tool_seconds_max": Metric("s", "trainer", "the longest of these", "Time of agents and tools, longest"),
    "engine_seconds_mean": Metric(
        "s",
        "trainer",
        "time of a rollout in which a turn was generated or waited for an engine, on average; of the same rollouts",
        "Time of engines, mean",
    ),
    "turn_1_tokens_mean": Metric(
        "token",
        "trainer",
        "tokens that were drawn in a rollout's first turn, on average over those that have one",
        "Tokens of the first turn",
    ),
    "turn_2_tokens_mean": Metric(
        "token",
        "trainer",
        "tokens that were drawn in a rollout's second turn, on average over those that have one",
        "Tokens of the second turn",
    ),
    "turn_3_tokens_mean": Metric(
        "token",
        "trainer",
        "tokens that were drawn in a rollout's third turn, on average over those that have one",
        "Tokens of the third turn",
    ),
    "turn_4_tokens_mean": Metric(
        "token",
        "trainer",
        "tokens that were drawn in a rollout's fourth turn, on average over those that have one",
        "Tokens of the fourth turn",
    ),
    "later_turns_tokens_mean": Metric(
        "token",
        "trainer",
        "tokens that were drawn in a turn after the fourth, on average",
        "Tokens of later turns",
    ),
    "staleness_mean": Metric("version", "trainer", "age of a token on average", "Staleness, mean"),
    "staleness_max": Metric(
        "version", "trainer", "age of the oldest token", "Staleness, greatest", head="STALE"
    ),
    "seconds": Metric("s", "trainer", "time since the step before", "Time of a step"),
    "tokens_per_s": Metric(
        "token/s", "trainer", "tokens of the step over its seconds", "Speed", head="TOK/S"
    ),
    "tokens_per_s_per_gpu": Metric(
        "token/s", "trainer", "the same by GPU that the job has; only of a job on GPUs", "Speed by GPU"
    ),
    "model_flops": Metric(
        "",
        "learner",
        "operations of the model in the step's passes, forward and backward; only of models that are known",
    ),
    "peak_flops": Metric(
        "1/s", "learner", "what the learner's GPUs could make at most; only of cards that are known"
    ),
    "mfu": Metric(
        "ratio",
        "trainer",
        "`model_flops` over `peak_flops` times `seconds`",
        "MFU",
        "share of the learner's peak",
    ),
    "cost": Metric("", "trainer", "price of the step's `seconds`; only of a job with prices"),
    "cost_per_million_tokens": Metric(
        "", "trainer", "price of a million `tokens` at the step's", "Cost", "by million tokens"
    ),
    "skipped": Metric(
        "", "learner", "1 where the gradient was not finite and the weights stayed as they were"
    ),
    "groups_skipped": Metric("", "trainer", "groups of such a step, which are dropped"),
}
