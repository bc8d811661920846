"""The critic in Megatron-core: the decoder with a value head, over tensor, pipeline and data parallel ranks.

What a critic is, is `gyre.workloads.torch.critic`; what is Megatron's of a learner, `gyre.workloads.megatron.learner`.

This module imports Megatron when it is set up, not before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from gyre.models.first_weights import with_value_head
from gyre.models.safetensors_folder import TensorSource
from gyre.models.tensor_names import VALUE_BIAS, VALUE_WEIGHT, to_names
from gyre.rollouts.samples import Group
from gyre.weights.version.manifest import WeightManifest, unpack_weights
from gyre.workloads.base import operator
from gyre.workloads.learner.accumulation import Tally
from gyre.workloads.megatron.learner import MegatronLearner
from gyre.workloads.torch.critic import TorchCritic

if TYPE_CHECKING:
    from gyre.models.architecture import Architecture
    from gyre.workloads.algorithms.losses import LossSum
    from gyre.workloads.learner.packing import Pass


class MegatronCritic(MegatronLearner, TorchCritic):
    """The operators and metrics of `TorchCritic`; all of them go to every rank, `values` with each rank's share.

    With `config.model_path` it begins with that folder's model, and its head is drawn from the seed. Without,
    it begins with the policy's small decoder and a head of zeros. With `config.first_weights` it is those weights.
    """

    VALUES: ClassVar[bool] = True

    def first_model(self) -> tuple[Architecture, TensorSource]:
        architecture, source = super().first_model()
        if self.small_architecture is None:
            source = with_value_head(source, architecture.hidden, self.settings.seed)
        else:
            source = _with_zeros(source, architecture.hidden)
        return replace(architecture, tied=False), source  # the head is a value's, and shares nothing

    def gradient(self, groups: list[Group]) -> tuple[None, Tally]:
        from gyre.workloads.megatron.steps.gradients import value_rows

        return self.add_gradient(groups, value_rows(groups, self.settings))

    def backward(self, passes: list[Pass]) -> list[LossSum]:
        from gyre.workloads.megatron.steps.gradients import packed_value_loss

        return self.policy.backward_values(
            passes, lambda part, values: packed_value_loss(part, values, self.settings)
        )

    @operator(kind="weights")
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        """See `TorchCritic.load_weights`."""
        described = WeightManifest.from_dict(manifest)
        if self.step == 0 and self.small_architecture is not None:
            named = to_names(unpack_weights(described, buffer), self.small_architecture)
            self.policy.load(_with_zeros(named.__getitem__, self.small_architecture.hidden))
            self._changed()
        return described.version

    @operator
    def values(self, groups: list[Group], *, step: int) -> list[Group]:
        """See `TorchCritic.values`; `groups` are this rank's share."""
        self.refuse_other_step(step)
        pooled = self.ranks.pool_shares(groups)
        found = iter(self.by_group(pooled, self.policy.token_values))
        values = {group.id: [next(found) for _ in group.samples] for group in pooled}
        for group in groups:
            for sample, mine in zip(group.samples, values[group.id], strict=True):
                sample.extras["values"] = mine
        return groups


def _with_zeros(source: TensorSource, hidden: int) -> TensorSource:
    heads = {VALUE_WEIGHT: torch.zeros(1, hidden), VALUE_BIAS: torch.zeros(1)}
    return lambda name: heads[name] if name in heads else source(name)
