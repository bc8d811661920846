"""A step on one line, for people: the same in the trainer's log, above the live panel and in a pipe.

    step 12/80  reward 0.41 ±0.49  loss 0.0021  old_kl 0.0003  entropy 1.84  grad 0.31  prompt 11 answer 3.9 tok
    (cut 12 %)  flat 3/16  stale 1  5.2k tok/s  actor waits 38 % for rollout

What a step does not have is left out. Pure: it imports nothing of weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.observe.number_text import percent as percent
from gyre.observe.number_text import plus_minus
from gyre.observe.number_text import short as short
from gyre.observe.number_text import thousands as thousands

LEAST_WAIT_SHOWN = 0.05
GAP = "  "

_DISPENSABLE = ("waits", "prompt", "stale", "speed", "loss", "grad", "kl", "flat", "entropy", "answer")
"""Facts that a narrow terminal does without, the first ones first: its panel has the speed and the bottleneck."""

_KL = ("kl", "rollout_kl", "old_kl")
"""To the reference, to the engine, to the policy of the ratio: the first that there is."""


def step_line(
    metrics: Mapping[str, Any],
    *,
    steps: int = 0,
    waits: Mapping[str, float] | None = None,
    skipped: int = 0,
    width: int | None = None,
) -> str:
    """`metrics` are those of the step, `steps` is how many are planned, `waits` who waits for whom ("actor waits for
    rollout (generating)" → share). `skipped` steps before it are not shown. With `width` the line is no longer, where
    leaving facts out can achieve it."""

    def has(*names: str) -> bool:
        return all(isinstance(metrics.get(name), int | float) for name in names)

    total = f"/{steps}" if steps else ""
    parts = {"step": f"step {metrics.get('step', '?')}{total}"}
    if metrics.get("skipped"):
        parts["skipped"] = "skipped: its gradient was not finite"
    if has("reward_mean"):
        deviation = metrics["reward_std"] if has("reward_std") else None
        parts["reward"] = f"reward {plus_minus(metrics['reward_mean'], deviation)}"
    if has("loss"):
        parts["loss"] = f"loss {short(metrics['loss'])}"
    if kl := next((name for name in _KL if has(name)), ""):
        parts["kl"] = f"{kl} {short(metrics[kl])}"
    if has("entropy"):
        parts["entropy"] = f"entropy {short(metrics['entropy'])}"
    if has("grad_norm"):
        parts["grad"] = f"grad {short(metrics['grad_norm'])}"
    if has("prompt_tokens_mean"):
        parts["prompt"] = f"prompt {short(metrics['prompt_tokens_mean'])} tok"
    if has("completion_tokens_mean"):
        cut = f" (cut {percent(metrics['cut_off_ratio'])})" if has("cut_off_ratio") else ""
        parts["answer"] = f"answer {short(metrics['completion_tokens_mean'])} tok{cut}"
    if (
        has("flat_groups", "groups") and metrics.get("samples") != metrics["groups"]
    ):  # groups of one are not compared
        parts["flat"] = f"flat {int(metrics['flat_groups'])}/{int(metrics['groups'])}"
    if has("staleness_max"):
        parts["stale"] = f"stale {int(metrics['staleness_max'])}"
    if has("tokens_per_s"):
        parts["speed"] = f"{thousands(metrics['tokens_per_s'])} tok/s"
    if who := longest_wait(waits or {}):
        parts["waits"] = who
    if skipped:
        parts["not shown"] = f"({skipped} step{'' if skipped == 1 else 's'} before it not shown)"
    for name in _DISPENSABLE:
        if width is None or len(GAP.join(parts.values())) <= width:
            break
        parts.pop(name, None)
    return GAP.join(parts.values())


def longest_wait(waits: Mapping[str, float]) -> str:
    """The first role's longest wait, as in `actor waits 38 % for rollout`; "" where it hardly waits."""
    shares: dict[tuple[str, str], float] = {}
    for who, share in waits.items():
        role, wait, cause = who.partition(" waits for ")
        if (
            wait and isinstance(share, int | float) and not cause.startswith("itself")
        ):  # it is absent, or begins
            key = role, cause.partition(" (")[0]
            shares[key] = shares.get(key, 0.0) + share
    first = next(iter(shares), ("", ""))[0]
    role, cause = max(
        (key for key in shares if key[0] == first), key=lambda key: shares[key], default=("", "")
    )
    share = shares.get((role, cause), 0.0)
    return f"{role} waits {percent(share)} for {cause}" if share >= LEAST_WAIT_SHOWN else ""
