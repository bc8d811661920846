"""Gradients of the policy's and of the critic's loss for one micro-batch of groups, as flat sums.

Invariant *sums*: what is returned is not divided by anything; see `gyre.workloads.algorithms.losses`.

This module must not know about ranks, optimizers or steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gyre.config.sections import WorkloadSettings
from gyre.models.modules import Decoder, ValueModel
from gyre.rollouts.samples import OLD_LOGPROBS, Group, Sample
from gyre.workloads.algorithms.advantages import advantages_of, gae_of, reference_of, values_of
from gyre.workloads.algorithms.losses import LossSum, policy_loss_of, value_loss
from gyre.workloads.learner.accumulation import Tally
from gyre.workloads.learner.seen_logprobs import SeenLogprobs, Tag
from gyre.workloads.torch.steps.logprobs import TokenRow, pad_rows, pad_values, token_logprobs, token_values

T = TypeVar("T")


def trained_samples(
    groups: Sequence[Group], settings: WorkloadSettings
) -> list[tuple[Group, Sample, NDArray[np.float32]]]:
    """The samples that have a gradient, with their advantages, in order. A sample without an advantage has none,
    unless another term of the loss needs it.

    Raises ValueError for a sample without reward, or without what a term of the loss needs.
    """
    loss = settings.loss
    samples = [(group, sample) for group in groups for sample in group.samples]
    found = [
        (group, sample, advantages)
        for (group, sample), advantages in zip(samples, advantages_of(groups, loss), strict=True)
        if len(sample.token_ids) and (loss.needs_every_sample or advantages.any())
    ]
    if loss.kl_loss_coef > 0:
        for _, sample, _ in found:
            reference_of(sample)
    return found


def keeps_old_logprobs(settings: WorkloadSettings) -> bool:
    """Whether the policy's own log-probs before a step have to be kept: the ratio is to them, and not to the engine's,
    and a later update of the step would compute others."""
    return settings.loss.tis_imp_ratio_cap > 0 and settings.optim.updates > 1


def with_old_logprobs(groups: Sequence[Group], found: Sequence[NDArray[np.float32]]) -> list[Group]:
    """The groups, each sample with its `OLD_LOGPROBS` of `found`, which are in the order of groups and samples."""
    rows = iter(found)
    return [
        replace(
            group,
            samples=[
                replace(sample, extras=sample.extras | {OLD_LOGPROBS: next(rows)}) for sample in group.samples
            ],
        )
        for group in groups
    ]


@torch.no_grad()
def old_logprobs(
    model: Decoder, groups: Sequence[Group], settings: WorkloadSettings
) -> list[NDArray[np.float32]]:
    """Log-probs of every sample under the weights as they are, float32 `[t]`; zeros for samples without a gradient."""
    needed = {id(sample) for _, sample, _ in trained_samples(groups, settings)}
    found = []
    for group in groups:
        kept = [sample for sample in group.samples if id(sample) in needed]
        rows = iter(())
        if kept:
            batch = pad_rows([TokenRow(group.prompt_ids, sample.token_ids) for sample in kept])
            rows = iter(token_logprobs(model, batch, settings.sampling.temperature)[0])
        for sample in group.samples:
            count = len(sample.token_ids)
            found.append(
                next(rows)[:count].numpy().copy() if id(sample) in needed else np.zeros(count, np.float32)
            )
    return found


def policy_gradient(
    model: Decoder,
    groups: Sequence[Group],
    settings: WorkloadSettings,
    *,
    passes: int = 1,
    seen: SeenLogprobs | None = None,
) -> tuple[Tensor | None, Tally]:
    """The flat float32 gradient of the summed loss, or None where it is exactly zero, and the tally. It is computed in
    so many `passes`, or as many as there are samples. `seen` gets the log-probs that come of it.

    Samples without a gradient are left out. Raises ValueError as `trained_samples`.
    """
    found = trained_samples(groups, settings)
    tags = tags_of(groups)
    parts = (_policy_pass(model, part, settings, seen, tags) for part in _dealt(found, passes))
    return _summed(parts, counted(groups))


def tags_of(groups: Sequence[Group]) -> dict[int, Tag]:
    """Which sample of which group an object is, by its `id()`."""
    return {id(sample): (group.id, index) for group in groups for index, sample in enumerate(group.samples)}


def _policy_pass(
    model: Decoder,
    part: Sequence[tuple[Group, Sample, NDArray[np.float32]]],
    settings: WorkloadSettings,
    seen: SeenLogprobs | None,
    tags: Mapping[int, Tag],
) -> tuple[Tensor, Tally]:
    loss = settings.loss
    chosen = [(group, sample) for group, sample, _ in part]
    advantages = [one for _, _, one in part]
    batch = pad_rows([TokenRow(group.prompt_ids, sample.token_ids) for group, sample in chosen])
    logprobs, entropies = token_logprobs(
        model, batch, settings.sampling.temperature, entropy_gradient=loss.entropy_coeff != 0
    )
    if seen is not None:
        lengths = [len(sample.token_ids) for _, sample in chosen]
        seen.add([tags[id(sample)] for _, sample in chosen], lengths, logprobs[batch.mask])
    engines = pad_values([sample.logprobs for _, sample in chosen], batch)
    truncated = loss.tis_imp_ratio_cap > 0
    old = None if truncated else engines
    if keeps_old_logprobs(settings):
        old = pad_values([sample.extras[OLD_LOGPROBS] for _, sample in chosen], batch)
    reference = None
    if loss.kl_loss_coef > 0:
        reference = pad_values([reference_of(sample) for _, sample in chosen], batch)
    found = policy_loss_of(loss)(
        logprobs,
        pad_values(advantages, batch),
        batch.mask,
        loss,
        old_logprobs=old,  # None: of one update, the policy before it is the one that computes here
        rollout_logprobs=engines if truncated else None,
        ref_logprobs=reference,
        entropies=entropies,
        rows=None,
        norm_length=settings.norm_length,
    )
    return _flat_gradient(found, model), loss_tally(found)


def value_gradient(
    model: ValueModel, groups: Sequence[Group], settings: WorkloadSettings, *, passes: int = 1
) -> tuple[Tensor | None, Tally]:
    """The same of the critic's loss; every sample with a token has a gradient.

    Raises ValueError for a sample without reward or without the values that its advantages are made from.
    """
    chosen = [(group, sample) for group in groups for sample in group.samples if len(sample.token_ids)]
    return _summed((_value_pass(model, part, settings) for part in _dealt(chosen, passes)), counted(groups))


def _value_pass(
    model: ValueModel, chosen: Sequence[tuple[Group, Sample]], settings: WorkloadSettings
) -> tuple[Tensor, Tally]:
    batch = pad_rows([TokenRow(group.prompt_ids, sample.token_ids) for group, sample in chosen])
    found = value_loss(
        token_values(model, batch),
        pad_values([values_of(sample) for _, sample in chosen], batch),
        pad_values([gae_of(sample, settings.loss)[1] for _, sample in chosen], batch),
        batch.mask,
        settings.loss,
        norm_length=settings.norm_length,
    )
    return _flat_gradient(found, model), loss_tally(found)


def _dealt(samples: Sequence[T], passes: int) -> Iterator[Sequence[T]]:
    """The samples in at most so many parts of the same size, in order; none of them is empty."""
    size = max(1, math.ceil(len(samples) / passes))
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def _summed(parts: Iterable[tuple[Tensor, Tally]], tally: Tally) -> tuple[Tensor | None, Tally]:
    """The sum of what passes find, one after the other."""
    gradient = None
    for found, told in parts:
        gradient = found if gradient is None else gradient.add_(found)
        tally = tally.plus(told)
    return gradient, tally


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


def loss_tally(found: LossSum) -> Tally:
    """What a loss says of the tokens that it saw."""
    sums = {name: value.item() for name, value in found.metrics.items()}
    return Tally(loss=found.loss.item(), scored_tokens=sums.pop("tokens"), sums=sums)


def _flat_gradient(found: LossSum, model: nn.Module) -> Tensor:
    gradients = torch.autograd.grad(found.loss, list(model.parameters()))
    return torch.cat([gradient.reshape(-1) for gradient in gradients])
