"""Gradients of the policy's and of the critic's loss for one micro-batch of groups, as flat sums.

Invariant *sums*: what is returned is not divided by anything; see `gyre.workloads.losses`.

This module must not know about ranks, optimizers or steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gyre.rollouts.samples import Group, Sample
from gyre.workloads.advantages import advantages_of, gae_of, reference_of, values_of
from gyre.workloads.losses import LossSum, policy_loss, value_loss
from gyre.workloads.torch.accumulation import Tally
from gyre.workloads.torch.logprobs import TokenRow, pad_rows, pad_values, token_logprobs, token_values
from gyre.workloads.torch.model import Decoder, ValueModel
from gyre.workloads.torch.settings import TorchSettings

Chosen = list[tuple[Group, Sample]]


def policy_gradient(
    model: Decoder, groups: Sequence[Group], settings: TorchSettings
) -> tuple[Tensor | None, Tally]:
    """The flat float32 gradient of the summed loss, or None where it is exactly zero, and the tally.

    Samples without advantage have no gradient and are left out, unless another term of the loss needs them. Raises
    ValueError for a sample without reward, or without what a term of the loss needs.
    """
    loss = settings.loss
    samples = [(group, sample) for group in groups for sample in group.samples]
    every = advantages_of(groups, loss)
    kept = [
        k
        for k, (_, sample) in enumerate(samples)
        if len(sample.token_ids) and (loss.needs_every_sample or every[k].any())
    ]
    tally = counted(groups)
    if not kept:
        return None, tally
    chosen, advantages = [samples[k] for k in kept], [every[k] for k in kept]
    batch = pad_rows([TokenRow(group.prompt_ids, sample.token_ids) for group, sample in chosen])
    logprobs, entropies = token_logprobs(
        model, batch, settings.sampling.temperature, entropy_gradient=loss.entropy_coeff != 0
    )
    engines = pad_values([sample.logprobs for _, sample in chosen], batch)
    truncated = loss.tis_imp_ratio_cap > 0
    reference = None
    if loss.kl_loss_coef > 0:
        reference = pad_values([reference_of(sample) for _, sample in chosen], batch)
    found = policy_loss(
        logprobs,
        pad_values(advantages, batch),
        batch.mask,
        loss,
        # One optimizer step a batch: the policy before the step is the one that computes here.
        old_logprobs=None if truncated else engines,
        rollout_logprobs=engines if truncated else None,
        ref_logprobs=reference,
        entropies=entropies,
        norm_length=settings.norm_length,
    )
    return _flat_gradient(found, model), tally.plus(told(found))


def value_gradient(
    model: ValueModel, groups: Sequence[Group], settings: TorchSettings
) -> tuple[Tensor | None, Tally]:
    """The same of the critic's loss; every sample with a token has a gradient.

    Raises ValueError for a sample without reward or without the values that its advantages are made from.
    """
    tally = counted(groups)
    chosen = [(group, sample) for group in groups for sample in group.samples if len(sample.token_ids)]
    if not chosen:
        return None, tally
    batch = pad_rows([TokenRow(group.prompt_ids, sample.token_ids) for group, sample in chosen])
    found = value_loss(
        token_values(model, batch),
        pad_values([values_of(sample) for _, sample in chosen], batch),
        pad_values([gae_of(sample, settings.loss)[1] for _, sample in chosen], batch),
        batch.mask,
        settings.loss,
        norm_length=settings.norm_length,
    )
    return _flat_gradient(found, model), tally.plus(told(found))


def counted(groups: Sequence[Group]) -> Tally:
    """What there is to train on, before anything went through a model."""
    samples = [sample for group in groups for sample in group.samples]
    return Tally(
        groups=len(groups),
        samples=len(samples),
        sequences=sum(len(sample.token_ids) > 0 for sample in samples),
        tokens=sum(len(sample.token_ids) for sample in samples),
        reward=float(sum(sample.reward or 0.0 for sample in samples)),
    )


def told(found: LossSum) -> Tally:
    """What a loss says of the tokens that it saw."""
    sums = {name: value.item() for name, value in found.metrics.items()}
    return Tally(loss=found.loss.item(), scored_tokens=sums.pop("tokens"), sums=sums)


def _flat_gradient(found: LossSum, model: nn.Module) -> Tensor:
    gradients = torch.autograd.grad(found.loss, list(model.parameters()))
    return torch.cat([gradient.reshape(-1) for gradient in gradients])
