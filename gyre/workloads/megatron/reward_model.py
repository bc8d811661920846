"""A reward model in Megatron-core; what one is, is `gyre.workloads.torch.reward_model`.

This module imports Megatron when it is set up, not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from gyre.config.sections import MegatronSettings
from gyre.models.first_weights import score_weights
from gyre.rollouts.samples import Group
from gyre.workloads.base import operator
from gyre.workloads.megatron.frozen import FrozenModel
from gyre.workloads.torch.reward_model import ends_of, reward_model_folder, scored_tokens, take_rewards

if TYPE_CHECKING:
    from gyre.models.architecture import Architecture
    from gyre.models.safetensors_folder import TensorSource


class MegatronRewardModel(FrozenModel):
    """`TorchRewardModel` on `config.megatron`'s device and in its precision, with packed samples. A vertex holds all of
    it."""

    VALUES: ClassVar[bool] = True

    def model_folder(self, layout: MegatronSettings) -> Path:
        return reward_model_folder(self.config)

    def weights_in(self, folder: Path, architecture: Architecture, device: torch.device) -> TensorSource:
        return score_weights(folder, architecture)

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        """See `TorchRewardModel.score`."""
        from gyre.workloads.learner.packing import Row

        asked = scored_tokens(groups, self.architecture.vocab)
        found = [
            self.policy.token_values([part])[0].float().cpu()
            for part in self.passes([Row(row.prompt_ids, row.token_ids) for row in asked])
        ]
        return take_rewards(groups, ends_of(asked, torch.cat(found).tolist() if found else []))
