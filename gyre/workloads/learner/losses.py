"""From groups to rows, and from what a model says of a pass to its loss: the policy's and the critic's.

The maths is `gyre.workloads.algorithms`. Invariant *sums*: nothing here is divided by anything.

This module must not know about models, ranks, optimizers or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre.config.sections import WorkloadSettings
from gyre.rollouts.samples import OLD_LOGPROBS, Group, Sample
from gyre.workloads.algorithms.advantages import advantages_of, gae_of, reference_of, values_of
from gyre.workloads.algorithms.losses import LossSum, policy_loss_of, value_loss
from gyre.workloads.learner.accumulation import Tally
from gyre.workloads.learner.packing import Pass, TrainingRow
from gyre.workloads.learner.seen_logprobs import Tag


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


def policy_rows(groups: Sequence[Group], settings: WorkloadSettings) -> list[TrainingRow]:
    """The samples that have a gradient, with `advantages`, `engine` log-probs, and `old` ones and `reference`'s where
    they are needed. Raises ValueError as `trained_samples`."""
    rows, tags = [], tags_of(groups)
    for group, sample, advantages in trained_samples(groups, settings):
        values = {"advantages": advantages, "engine": sample.logprobs}
        if keeps_old_logprobs(settings):
            values["old"] = sample.extras[OLD_LOGPROBS]
        if settings.loss.kl_loss_coef > 0:
            values["reference"] = reference_of(sample)
        rows.append(TrainingRow(group.prompt_ids, sample.token_ids, values, tags[id(sample)]))
    return rows


def value_rows(groups: Sequence[Group], settings: WorkloadSettings) -> list[TrainingRow]:
    """The samples with a token, with the `values` that their advantages are made from, and the `returns`.

    Raises ValueError for a sample without reward or without values.
    """
    return [
        TrainingRow(
            group.prompt_ids,
            sample.token_ids,
            {"values": values_of(sample), "returns": gae_of(sample, settings.loss)[1]},
        )
        for group in groups
        for sample in group.samples
        if len(sample.token_ids)
    ]


def policy_pass_loss(part: Pass, logprobs: Tensor, entropies: Tensor, settings: WorkloadSettings) -> LossSum:
    """The policy's loss of a pass, with a gradient."""
    loss = settings.loss
    engine = part.values["engine"]
    truncated = loss.tis_imp_ratio_cap > 0
    return policy_loss_of(loss)(
        logprobs,
        part.values["advantages"],
        torch.ones_like(part.targets, dtype=torch.bool),
        loss,
        # None: of one update, the policy before it is the one that computes here.
        old_logprobs=part.values.get("old") if truncated else engine,
        rollout_logprobs=engine if truncated else None,
        ref_logprobs=part.values.get("reference"),
        entropies=entropies,
        rows=part.rows,
        norm_length=settings.norm_length,
    )


def value_pass_loss(part: Pass, values: Tensor, settings: WorkloadSettings) -> LossSum:
    """The critic's loss of a pass, with a gradient."""
    return value_loss(
        values,
        part.values["values"],
        part.values["returns"],
        torch.ones_like(part.targets, dtype=torch.bool),
        settings.loss,
        rows=part.rows,
        norm_length=settings.norm_length,
    )


def detached(found: LossSum) -> LossSum:
    """What a loss says, without the graph behind it."""
    return LossSum(found.loss.detach(), found.weight, found.metrics)


def summed(losses: Sequence[LossSum]) -> Tally:
    """What the losses of several passes say together; one exchange with the device for all of them."""
    if not losses:
        return Tally()
    names = list(losses[0].metrics)
    stacked = torch.stack([torch.stack([one.loss, *(one.metrics[name] for name in names)]) for one in losses])
    loss, *values = stacked.double().sum(dim=0).tolist()
    sums = dict(zip(names, values, strict=True))
    return Tally(loss=loss, scored_tokens=sums.pop("tokens"), sums=sums)


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


def keeps_old_logprobs(settings: WorkloadSettings) -> bool:
    """Whether the policy's own log-probs before a step have to be kept: the ratio is to them, and not to the engine's,
    and a later update of the step would compute others."""
    return settings.loss.tis_imp_ratio_cap > 0 and settings.optim.updates > 1


def with_extras(groups: Sequence[Group], name: str, found: Sequence[NDArray[np.float32]]) -> list[Group]:
    """The groups, each sample with its extra of `found`, which are in the order of groups and samples."""
    rows = iter(found)
    return [
        replace(
            group,
            samples=[replace(sample, extras=sample.extras | {name: next(rows)}) for sample in group.samples],
        )
        for group in groups
    ]


def tags_of(groups: Sequence[Group]) -> dict[int, Tag]:
    """Which sample of which group an object is, by its `id()`."""
    return {id(sample): (group.id, index) for group in groups for index, sample in enumerate(group.samples)}
