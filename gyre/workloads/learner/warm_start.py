"""A short supervised start, so that reinforcement learning finds some right answers to reinforce.

The answers are a forgetful pupil's: the model learns how answers look and how digits add, with carries made
and forgotten side by side. What is left to the reinforcement learning is to find out which of the two is rewarded.

Invariant *measured before learned*: training ends at the first batch on which the smoothed rate of agreement
with the pupil reaches `stop_at`; that rate is taken before the batch is learned from.

This module must not know about ranks, versions or optimizer steps of the reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gyre.config.sections import WarmStartSettings
from gyre.models.modules import Decoder
from gyre.workloads.learner.padded import TokenRow, pad_rows, token_logits
from gyre.workloads.tasks.task import DemonstratedTask

# The warm start reads the endless sequence of prompts far from where training does.
FIRST_PROMPT = 1 << 40
_SMOOTHING = 0.8


@dataclass(frozen=True, slots=True)
class WarmStep:
    """After `steps` updates: the last batch's loss a token, and the smoothed rate of agreement with the pupil."""

    steps: int
    loss: float
    agreement: float


def warm_steps(model: Decoder, task: DemonstratedTask, settings: WarmStartSettings) -> Iterator[WarmStep]:
    """Trains `model` in place, yielding after every update until the target or `max_steps` is reached."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    agreement = 0.0
    for step in range(settings.max_steps):
        corpus = task.demonstrations(FIRST_PROMPT + step * settings.batch, settings.batch, settings.slips)
        batch = pad_rows([TokenRow(one.prompt_ids, one.token_ids, one.mask) for one in corpus])
        logits = token_logits(model, batch)
        loss = F.cross_entropy(logits[batch.mask], batch.targets[batch.mask])
        # With all earlier tokens right, the likeliest token is what greedy decoding would write.
        right = ((logits.argmax(dim=-1) == batch.targets) | ~batch.mask).all(dim=1).float().mean().item()
        agreement = _SMOOTHING * agreement + (1.0 - _SMOOTHING) * right
        if agreement >= settings.stop_at:
            yield WarmStep(step, loss.item(), agreement)
            return
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / 20)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield WarmStep(step + 1, loss.item(), agreement)
