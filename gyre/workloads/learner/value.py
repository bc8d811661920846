"""The critic, whatever computes it: a decoder with a value head, trained towards the returns of generalised advantages.

Its decoder has the actor's shape: with `config.model_path` it is that folder's model, and its head is drawn from the
seed; without, it is the small decoder with a head of zeros. Either begins with the policy that training begins with
(`config.first_weights`).

How a step is made, repeated, checkpointed and restored: `gyre.workloads.learner.learner`.

Invariant *values before their step*: the values of the groups of step `s` come from the critic after step `s - 1`,
exactly, whoever asks and however often; so a replay has the values that the first run had.

This module must not know how values become advantages.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from gyre.config.sections import OptimSettings
from gyre.models.first_weights import with_value_head
from gyre.models.safetensors_folder import TensorSource
from gyre.models.tensor_names import VALUE_BIAS, VALUE_WEIGHT, to_names
from gyre.rollouts.samples import Group
from gyre.weights.version.manifest import WeightManifest, unpack_weights
from gyre.workloads.algorithms.advantages import returns_of
from gyre.workloads.algorithms.losses import LossSum
from gyre.workloads.base import operator
from gyre.workloads.learner.accumulation import Tally
from gyre.workloads.learner.errors import StepGap
from gyre.workloads.learner.learner import BaseLearner
from gyre.workloads.learner.losses import value_pass_loss, value_rows
from gyre.workloads.learner.packing import Pass, TrainingRow


class ValueLearner(BaseLearner):
    """A critic. Metrics of a step beyond the learner's, over tokens: `value`, `return`, `value_error` (squared),
    `value_clipped` (the fraction at the clip), and `explained`, the share of the returns' variation that the values
    account for."""

    SUMS: ClassVar[tuple[str, ...]] = ("value", "return", "return_square", "value_error", "value_clipped")
    VALUES: ClassVar[bool] = True

    @property
    def optim(self) -> OptimSettings:
        return self.settings.critic.optim

    def check(self, groups: list[Group]) -> None:
        for group in groups:
            returns_of(group, self.settings.loss)

    def rows(self, groups: list[Group]) -> list[TrainingRow]:
        return value_rows(groups, self.settings)

    def loss(self, part: Pass, numbers: torch.Tensor, entropies: torch.Tensor) -> LossSum:
        return value_pass_loss(part, numbers, self.settings)

    def step_metrics(self, tally: Tally) -> dict[str, Any]:
        names = ("value", "return", "value_error", "value_clipped")
        spread = tally.mean("return_square") - tally.mean("return") ** 2
        explained = 1.0 - tally.mean("value_error") / spread if spread > 1e-12 else 0.0
        return {**{name: tally.mean(name) for name in names}, "explained": explained}

    def with_head(self, source: TensorSource) -> TensorSource:
        """The policy's weights with the value head that training begins with."""
        small, hidden = self.trained_model.small, self.trained_model.hidden
        if small is None:
            return with_value_head(source, hidden, self.settings.seed)
        heads = {VALUE_WEIGHT: torch.zeros(1, hidden), VALUE_BIAS: torch.zeros(1)}
        return lambda name: heads[name] if name in heads else source(name)

    @operator(kind="weights")
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        """Begin with the decoder of a policy, and return its version; once a step was applied, nothing is changed, and
        a folder's model has begun with the folder's.

        Raises WeightMismatch where bytes and manifest disagree, or where it is another model's.
        """
        described, small = WeightManifest.from_dict(manifest), self.trained_model.small
        if self.step == 0 and small is not None:
            self.backend.load(self.with_head(to_names(unpack_weights(described, buffer), small).__getitem__))
            self.changed()
        return described.version

    @operator
    def values(self, groups: list[Group], *, step: int) -> list[Group]:
        """The same groups, each sample with `extras["values"]`, float32 `[t]`: the return expected before each token, 0
        where it was not drawn.

        `groups` are this rank's share; `step` is the optimizer step that will train on them. Raises StepGap where it is
        not this critic's next.
        """
        self.refuse_other_step(step)
        pooled = self.ranks.pool_shares(groups)
        found = iter(self.by_group(pooled))
        values = {group.id: [next(found) for _ in group.samples] for group in pooled}
        for group in groups:
            for sample, mine in zip(group.samples, values[group.id], strict=True):
                sample.extras["values"] = mine
        return groups

    def refuse_other_step(self, step: int) -> None:
        """Raises StepGap where `step` is not this critic's next."""
        if step != self.step + 1:
            raise StepGap(
                f"values for step {step} were asked of {self.role}[{self.rank}], "
                f"whose last applied step is {self.step}."
            )
