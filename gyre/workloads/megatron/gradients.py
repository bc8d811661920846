"""The policy's loss over packed passes: from groups to rows, and from a pass's log-probs to a summed loss.

The maths is `gyre.workloads.losses`; which samples have a gradient is decided as in `gyre.workloads.torch.gradients`.

This module must not know about Megatron, ranks or steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gyre.rollouts.samples import Group
from gyre.workloads.advantages import advantages_of, reference_of
from gyre.workloads.losses import LossSum, policy_loss
from gyre.workloads.megatron.packing import Pass, Row
from gyre.workloads.torch.accumulation import Tally
from gyre.workloads.torch.settings import TorchSettings


def policy_rows(groups: Sequence[Group], settings: TorchSettings) -> list[Row]:
    """The samples that have a gradient, with `advantages`, `engine` log-probs, and `reference` where it is needed.

    Raises ValueError for a sample without reward, or without what a term of the loss needs.
    """
    loss = settings.loss
    samples = [(group, sample) for group in groups for sample in group.samples]
    rows = []
    for (group, sample), advantages in zip(samples, advantages_of(groups, loss), strict=True):
        if not len(sample.token_ids) or not (loss.needs_every_sample or advantages.any()):
            continue
        values = {"advantages": advantages, "engine": sample.logprobs}
        if loss.kl_loss_coef > 0:
            values["reference"] = reference_of(sample)
        rows.append(Row(group.prompt_ids, sample.token_ids, values))
    return rows


def packed_policy_loss(
    part: Pass, logprobs: Tensor, entropies: Tensor, settings: TorchSettings
) -> tuple[Tensor, LossSum]:
    """The summed loss of a pass, twice: to go backwards from, and with what it says of its tokens."""
    loss = settings.loss
    engine = part.values["engine"]
    truncated = loss.tis_imp_ratio_cap > 0
    found = policy_loss(
        logprobs,
        part.values["advantages"],
        torch.ones_like(part.targets, dtype=torch.bool),
        loss,
        # One optimizer step a batch: the policy before the step is the one that computes here.
        old_logprobs=None if truncated else engine,
        rollout_logprobs=engine if truncated else None,
        ref_logprobs=part.values.get("reference"),
        entropies=entropies,
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
