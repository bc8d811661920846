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
from gyre.rollouts.drawn import as_drawn
from gyre.rollouts.samples import OLD_LOGPROBS, Group, Sample
from gyre.workloads.algorithms.advantages import advantages_of, reference_of, returns_of, values_of
from gyre.workloads.algorithms.losses import LossSum, policy_loss_of, takes_lengths, value_loss
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
        if sample.drawn and (loss.needs_every_sample or advantages.any())
    ]
    if loss.kl_loss_coef > 0:
        for _, sample, _ in found:
            reference_of(sample)
    return found


def policy_rows(groups: Sequence[Group], settings: WorkloadSettings) -> list[TrainingRow]:
    """The samples that have a gradient, with `advantages`, `engine` log-probs, and `old` ones, `reference`'s and
    `lengths` where they are needed. Raises ValueError as `trained_samples`, and where the job's own loss would take
    the means of rows for those of rollouts."""
    rows, tags, lengths = [], tags_of(groups), _lengths(groups, settings)
    if (
        lengths
        and not takes_lengths(settings.loss)
        and any(len(of) > 1 for one in groups for of in one.rollouts)
    ):
        raise ValueError(
            f"config.loss.loss_mode: {settings.loss.loss_mode} has no parameter `lengths`, and a rollout has several "
            "rows, each of which it would take for a sequence: give it one, or another loss_agg_mode than "
            "seq-mean-token-mean"
        )
    for group, sample, advantages in trained_samples(groups, settings):
        values = {"advantages": advantages, "engine": sample.logprobs, **lengths.get(id(sample), {})}
        if keeps_old_logprobs(settings):
            values["old"] = sample.extras[OLD_LOGPROBS]
        if settings.loss.kl_loss_coef > 0:
            values["reference"] = reference_of(sample)
        rows.append(TrainingRow(group.prompt_ids, sample.token_ids, values, tags[id(sample)], sample.mask))
    return rows


def value_rows(groups: Sequence[Group], settings: WorkloadSettings) -> list[TrainingRow]:
    """The samples with a token, with the `values` that their advantages are made from, the `returns`, and `lengths`
    where they are needed.

    Raises ValueError for a sample without reward or without values.
    """
    lengths = _lengths(groups, settings)
    return [
        TrainingRow(
            group.prompt_ids,
            sample.token_ids,
            {"values": values_of(sample), "returns": returns, **lengths.get(id(sample), {})},
            mask=sample.mask,
        )
        for group in groups
        for sample, returns in zip(group.samples, returns_of(group, settings.loss), strict=True)
        if sample.drawn
    ]


def _lengths(
    groups: Sequence[Group], settings: WorkloadSettings
) -> dict[int, dict[str, NDArray[np.float32]]]:
    """By the `id()` of each sample how many tokens were drawn for its rollout, float32 `[t]`, as the value `lengths`;
    empty where no mean over a rollout's tokens is taken."""
    if settings.loss.loss_agg_mode != "seq-mean-token-mean":
        return {}
    found = {}
    for group in groups:
        for rows in group.rollouts:
            of = [group.samples[row] for row in rows]
            drawn = sum(sample.drawn for sample in of)
            for sample in of:
                found[id(sample)] = {"lengths": np.full(len(sample.token_ids), drawn, np.float32)}
    return found


def policy_pass_loss(part: Pass, logprobs: Tensor, entropies: Tensor, settings: WorkloadSettings) -> LossSum:
    """The policy's loss of a pass, with a gradient."""
    loss = settings.loss
    engine = part.values["engine"]
    truncated = loss.tis_imp_ratio_cap > 0
    lengths = part.values.get("lengths")
    more = {"lengths": lengths} if lengths is not None and takes_lengths(loss) else {}
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
        **more,
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
        lengths=part.values.get("lengths"),
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
    """What there is to train on, before anything went through a model: the rows of a rollout are one sample, and one
    sequence, of the tokens that were drawn."""
    samples = [sample for group in groups for sample in as_drawn(group).samples]
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
