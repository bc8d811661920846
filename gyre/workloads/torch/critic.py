"""The critic in plain torch: a decoder with a value head, trained towards the returns of generalised advantages.

Its decoder has the actor's shape: with `config.model_path` it is that folder's model, in float32; without, it
is the small one. Either begins with the policy that training begins with (`config.first_weights`).

How a step is made, repeated, checkpointed and restored: `gyre.workloads.torch.learner`.

Invariant *values before their step*: the values of the groups of step `s` come from the critic after step `s - 1`,
exactly, whoever asks and however often; so a replay has the values that the first run had.

This module must not know how values become advantages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from gyre.config.sections import OptimSettings
from gyre.models.first_weights import with_value_head
from gyre.models.modules import ValueModel
from gyre.models.tensor_names import VALUE_BIAS, VALUE_WEIGHT
from gyre.rollouts.samples import Group
from gyre.weights.version.manifest import WeightManifest, unpack_weights
from gyre.workloads.algorithms.advantages import gae_of
from gyre.workloads.base import operator
from gyre.workloads.learner.accumulation import Tally
from gyre.workloads.learner.errors import StepGap
from gyre.workloads.learner.trained_model import own_parameters, trained_model
from gyre.workloads.torch.learner import TorchLearner
from gyre.workloads.torch.served_policy import load_parameters
from gyre.workloads.torch.steps.gradients import value_gradient
from gyre.workloads.torch.steps.logprobs import TokenRow, pad_rows, token_values


class TorchCritic(TorchLearner):
    """Metrics of a step beyond the learner's, over tokens: `value`, `return`, `value_error` (squared), `value_clipped`
    (the fraction at the clip), and `explained`, the share of the returns' variation that the values account for."""

    SUMS: ClassVar[tuple[str, ...]] = ("value", "return", "return_square", "value_error", "value_clipped")

    model: ValueModel

    def make_model(self) -> ValueModel:
        """Raises ConfigError where the folder holds no model, or one that is not computed here."""
        found, seed = trained_model(self.config), self.settings.seed
        architecture = replace(found.architecture, tied=True)  # whatever head it has is the policy's alone
        weights = found.first_weights(self.settings, head=False) if self.settings.model_path else None
        if weights is None:
            return ValueModel(architecture, seed=seed)
        source = with_value_head(weights, architecture.hidden, seed)
        model = ValueModel(architecture)
        tensors = {f"decoder.{name}": one for name, one in own_parameters(source, architecture).items()}
        load_parameters(model, tensors | {name: source(name) for name in (VALUE_WEIGHT, VALUE_BIAS)})
        return model

    @property
    def optim(self) -> OptimSettings:
        return self.settings.critic.optim

    def gradient(self, groups: list[Group]) -> tuple[torch.Tensor | None, Tally]:
        return value_gradient(self.model, groups, self.settings, passes=self.passes)

    def prepared(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            for sample in group.samples:
                if len(sample.token_ids):
                    gae_of(sample, self.settings.loss)
        return groups

    def step_metrics(self, tally: Tally) -> dict[str, Any]:
        names = ("value", "return", "value_error", "value_clipped")
        spread = tally.mean("return_square") - tally.mean("return") ** 2
        explained = 1.0 - tally.mean("value_error") / spread if spread > 1e-12 else 0.0
        return {**{name: tally.mean(name) for name in names}, "explained": explained}

    @operator(kind="weights")
    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        """Begin with the decoder of a policy, and return its version; once a step was applied, nothing is changed, and
        a folder's model has begun with the folder's.

        Raises WeightMismatch where bytes and manifest disagree, or where it is another model's.
        """
        described = WeightManifest.from_dict(manifest)
        if self.step == 0 and not self.settings.model_path:
            tensors = unpack_weights(described, buffer)
            tensors.pop("head.weight", None)  # of the policy alone, where it is not tied
            load_parameters(self.model.decoder, tensors)
        return described.version

    @operator
    @torch.no_grad()
    def values(self, groups: list[Group], *, step: int) -> list[Group]:
        """The same groups, each sample with `extras["values"]`, float32 `[t]`: the return expected before each token.

        `step` is the optimizer step that will train on them. Raises StepGap where it is not this critic's next.
        """
        self.refuse_other_step(step)
        for group in groups:
            kept = [sample for sample in group.samples if len(sample.token_ids)]
            if kept:
                batch = pad_rows([TokenRow(group.prompt_ids, sample.token_ids) for sample in kept])
                for sample, row in zip(kept, token_values(self.model, batch), strict=True):
                    sample.extras["values"] = row[: len(sample.token_ids)].numpy().copy()
            for sample in group.samples:
                sample.extras.setdefault("values", torch.zeros(0).numpy())
            self.report_progress(step=step)
        return groups

    def refuse_other_step(self, step: int) -> None:
        """Raises StepGap where `step` is not this critic's next."""
        if step != self.step + 1:
            raise StepGap(
                f"values for step {step} were asked of {self.role}[{self.rank}], "
                f"whose last applied step is {self.step}."
            )
