"""The gradient of one mini-batch, summed micro-batch by micro-batch, with what is needed to normalise it.

Invariants:
- *all or nothing*: a micro-batch's gradient and counts are added in one go, after everything that can fail;
- *sums*: nothing is divided before the whole mini-batch, over all ranks, is known.

This module must not know about ranks, optimizers or the idempotence of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyre.rollouts.samples import Group, Sample
from gyre.workloads.torch.grpo import group_advantages, policy_loss
from gyre.workloads.torch.logprobs import TokenRow, pad_rows, pad_values, token_logprobs
from gyre.workloads.torch.model import Decoder
from gyre.workloads.torch.settings import TorchSettings


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over samples. `scored_tokens` are those that went through the model: samples whose group's rewards
    are all equal have no gradient, and are left out unless a KL term needs them."""

    groups: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    reward: float = 0.0
    loss: float = 0.0
    scored_tokens: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0

    def to_list(self) -> list[float]:
        return [getattr(self, name) for name in Tally.__slots__]

    def plus(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(self.to_list(), other.to_list(), strict=True)))


@dataclass(slots=True)
class Accumulation:
    """What this rank has accumulated for optimizer step `step`. `gradient` is flat, in parameter order."""

    step: int
    gradient: Tensor
    tally: Tally = field(default_factory=Tally)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    group_ids: set[int] = field(default_factory=set)

    def add(
        self, index: int, gradient: Tensor | None, tally: Tally, group_ids: Sequence[int]
    ) -> dict[str, Any]:
        """Take a micro-batch in and return its record."""
        record = {
            "index": index,
            "groups": int(tally.groups),
            "samples": int(tally.samples),
            "tokens": int(tally.tokens),
            "loss_sum": tally.loss,
            "reward_mean": tally.reward / max(tally.samples, 1.0),
        }
        if gradient is not None:
            self.gradient += gradient
        self.tally = self.tally.plus(tally)
        self.group_ids.update(group_ids)
        self.records[index] = record
        return record


def micro_batch_gradient(
    model: Decoder, groups: Sequence[Group], settings: TorchSettings
) -> tuple[Tensor | None, Tally]:
    """The flat float32 gradient of the summed loss, or None where it is exactly zero, and the tally.

    Raises ValueError for a sample without reward, or without `ref_logprobs` when the KL term is on.
    """
    loss_settings = settings.loss
    samples = [(group, sample) for group in groups for sample in group.samples]
    advantages = _advantages(groups, loss_settings.scale_by_std)
    everything = loss_settings.kl_coef > 0
    chosen = [
        k
        for k, (_, sample) in enumerate(samples)
        if len(sample.token_ids) and (everything or advantages[k] != 0.0)
    ]
    tally = Tally(
        groups=len(groups),
        samples=len(samples),
        tokens=sum(len(sample.token_ids) for _, sample in samples),
        reward=float(sum(sample.reward or 0.0 for _, sample in samples)),
    )
    if not chosen:
        return None, tally

    batch = pad_rows([TokenRow(samples[k][0].prompt_ids, samples[k][1].token_ids) for k in chosen])
    logprobs, entropies = token_logprobs(model, batch, settings.sampling.temperature)
    result = policy_loss(
        logprobs,
        pad_values([samples[k][1].logprobs for k in chosen], batch),
        torch.from_numpy(advantages[chosen]),
        batch.mask,
        clip_low=loss_settings.clip_low,
        clip_high=loss_settings.clip_high,
        aggregation=loss_settings.aggregation,
        ref_logprobs=pad_values([_reference(samples[k][1]) for k in chosen], batch) if everything else None,
        kl_coef=loss_settings.kl_coef,
    )
    gradients = torch.autograd.grad(result.loss, list(model.parameters()))
    tally = tally.plus(
        Tally(
            loss=result.loss.item(),
            scored_tokens=float(batch.mask.sum()),
            entropy=entropies[batch.mask].sum().item(),
            kl=result.kl.item(),
            clipped=float(result.clipped),
        )
    )
    return torch.cat([gradient.reshape(-1) for gradient in gradients]), tally


def _advantages(groups: Sequence[Group], scale_by_std: bool) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 `[samples]`, in the order of groups and samples."""
    parts = []
    for group in groups:
        rewards = [sample.reward for sample in group.samples]
        if any(reward is None for reward in rewards):
            raise ValueError(f"group {group.id} has samples without a reward: score it before training on it")
        if rewards:
            parts.append(group_advantages(torch.tensor([rewards]), scale_by_std=scale_by_std)[0].numpy())
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def _reference(sample: Sample) -> Any:
    values = sample.extras.get("ref_logprobs")
    if values is None:
        raise ValueError("loss.kl_coef is positive, but a sample has no ref_logprobs: add a reference role")
    return values
