"""The reference policy in FSDP2's back end: log-probs of samples under the weights of a folder, which never change.

This module must not know what the log-probs are used for. It imports transformers when it is set up, not before.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from gyre.errors import ConfigError
from gyre.rollouts.samples import Group
from gyre.workloads.base import operator
from gyre.workloads.fsdp.frozen import FrozenModel

if TYPE_CHECKING:
    from gyre.models.safetensors_folder import TensorSource
    from gyre.workloads.fsdp.first_model import FirstModel


class FsdpReference(FrozenModel):
    """Adds `extras["ref_logprobs"]` to samples. It reads `config.model_path` by itself, or the weights of
    `config.first_weights`, which is what the actor begins with; so it takes no weights from anybody."""

    def model(self) -> FirstModel:
        from gyre.workloads.fsdp.first_model import first_model

        if not self.settings.model_path:
            raise ConfigError(
                "FsdpReference has no model: config.model_path is not set.",
                hint="Without it the actor's model is the small decoder, whose reference is "
                "gyre.workloads.torch:TorchReference.",
            )
        return first_model(self.config)

    def weights_of(self, model: FirstModel) -> tuple[TensorSource, Collection[str]]:
        return model.source(self.settings)

    @operator
    def logprobs(self, groups: list[Group]) -> list[Group]:
        """The same groups, each sample with `extras["ref_logprobs"]`, float32 `[t]` at the sampling temperature."""
        from gyre.workloads.learner.packing import Row

        samples = [(group, sample) for group in groups for sample in group.samples]
        rows = [Row(group.prompt_ids, sample.token_ids) for group, sample in samples if len(sample.token_ids)]
        flat = np.array(self.said_of(rows), dtype=np.float32)
        at = 0
        for _, sample in samples:
            sample.extras["ref_logprobs"] = flat[at : at + len(sample.token_ids)].copy()
            at += len(sample.token_ids)
        return groups
