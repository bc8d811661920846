"""The policy's and the critic's loss over packed passes: from groups to rows, and from what a model says of a pass to
a summed loss.

The maths is `gyre.workloads.algorithms.losses`; which samples have a gradient is decided as in
`gyre.workloads.torch.steps.gradients`.

This module must not know about Megatron, ranks or steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gyre.config.sections import WorkloadSettings
from gyre.rollouts.samples import OLD_LOGPROBS, Group
from gyre.workloads.algorithms.advantages import gae_of, reference_of, values_of
from gyre.workloads.algorithms.losses import LossSum, policy_loss_of, value_loss
from gyre.workloads.learner.accumulation import Tally
from gyre.workloads.learner.packing import Pass, Row
from gyre.workloads.torch.steps.gradients import keeps_old_logprobs, tags_of, trained_samples


def policy_rows(groups: Sequence[Group], settings: WorkloadSettings) -> list[Row]:
    """The samples that have a gradient, with `advantages`, `engine` log-probs, and `old` ones and `reference`'s where
    they are needed. Raises ValueError as `trained_samples`."""
    rows, tags = [], tags_of(groups)
    for group, sample, advantages in trained_samples(groups, settings):
        values = {"advantages": advantages, "engine": sample.logprobs}
        if keeps_old_logprobs(settings):
            values["old"] = sample.extras[OLD_LOGPROBS]
        if settings.loss.kl_loss_coef > 0:
            values["reference"] = reference_of(sample)
        rows.append(Row(group.prompt_ids, sample.token_ids, values, tags[id(sample)]))
    return rows


def value_rows(groups: Sequence[Group], settings: WorkloadSettings) -> list[Row]:
    """The samples with a token, with the `values` that their advantages are made from, and the `returns`.

    Raises ValueError for a sample without reward or without values.
    """
    return [
        Row(
            group.prompt_ids,
            sample.token_ids,
            {"values": values_of(sample), "returns": gae_of(sample, settings.loss)[1]},
        )
        for group in groups
        for sample in group.samples
        if len(sample.token_ids)
    ]


def packed_policy_loss(
    part: Pass, logprobs: Tensor, entropies: Tensor, settings: WorkloadSettings
) -> tuple[Tensor, LossSum]:
    """The summed loss of a pass, twice: to go backwards from, and with what it says of its tokens."""
    loss = settings.loss
    engine = part.values["engine"]
    truncated = loss.tis_imp_ratio_cap > 0
    found = policy_loss_of(loss)(
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
    return found.loss, LossSum(found.loss.detach(), found.weight, found.metrics)


def packed_value_loss(part: Pass, values: Tensor, settings: WorkloadSettings) -> tuple[Tensor, LossSum]:
    """The same of the critic's loss."""
    found = value_loss(
        values,
        part.values["values"],
        part.values["returns"],
        torch.ones_like(part.targets, dtype=torch.bool),
        settings.loss,
        rows=part.rows,
        norm_length=settings.norm_length,
    )
    return found.loss, LossSum(found.loss.detach(), found.weight, found.metrics)


def summed(losses: Sequence[LossSum]) -> Tally:
    """What the losses of several passes say together; one exchange with the device for all of them."""
    if not losses:
        return Tally()
    names = list(losses[0].metrics)
    stacked = torch.stack([torch.stack([one.loss, *(one.metrics[name] for name in names)]) for one in losses])
    loss, *values = stacked.double().sum(dim=0).tolist()
    sums = dict(zip(names, values, strict=True))
    return Tally(loss=loss, scored_tokens=sums.pop("tokens"), sums=sums)
