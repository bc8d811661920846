"""The reference policy in Megatron-core: log-probs of samples under the weights of a folder, which never change.

This module must not know what the log-probs are used for. It imports Megatron when it is set up, not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gyre.config.sections import MegatronSettings
from gyre.errors import ConfigError
from gyre.models.first_weights import first_weights
from gyre.rollouts.samples import Group
from gyre.workloads.base import operator
from gyre.workloads.megatron.frozen import FrozenModel
from gyre.workloads.tasks.same_tokenizer import refuse_other_tokenizer

if TYPE_CHECKING:
    from gyre.models.architecture import Architecture
    from gyre.models.safetensors_folder import TensorSource


class MegatronReference(FrozenModel):
    """Adds `extras["ref_logprobs"]` to samples. It reads `config.model_path` by itself, or the weights of
    `config.first_weights`, which is what the actor begins with; so it takes no weights from anybody."""

    def model_folder(self, layout: MegatronSettings) -> Path:
        if not self.settings.model_path:
            raise ConfigError(
                "MegatronReference has no model: config.model_path is not set.",
                hint="Without it the actor's model is the small decoder, whose reference is "
                "gyre.workloads.torch:TorchReference.",
            )
        folder = Path(self.settings.first_policy)
        refuse_other_tokenizer(self.config, folder, "config.model_path")
        return folder

    def weights_in(self, folder: Path, architecture: Architecture, device: torch.device) -> TensorSource:
        return first_weights(folder, architecture, self.settings.seed, device)

    @operator
    def logprobs(self, groups: list[Group]) -> list[Group]:
        """The same groups, each sample with `extras["ref_logprobs"]`, float32 `[t]` at the sampling temperature."""
        from gyre.workloads.learner.packing import Row

        samples = [(group, sample) for group in groups for sample in group.samples]
        rows = [Row(group.prompt_ids, sample.token_ids) for group, sample in samples if len(sample.token_ids)]
        values = []
        for part in self.passes(rows):
            ((logprobs, _),) = self.policy.logprobs([part], temperature=self.settings.sampling.temperature)
            values.append(logprobs.cpu())
        flat = torch.cat(values).numpy() if values else torch.zeros(0).numpy()
        at = 0
        for _, sample in samples:
            sample.extras["ref_logprobs"] = flat[at : at + len(sample.token_ids)].copy()
            at += len(sample.token_ids)
        return groups
