"""A reward model in Megatron-core; what one is, is `gyre.workloads.learner.frozen`.

This module imports Megatron when it is set up, not before.
"""

from __future__ import annotations

from gyre.models.first_weights import score_weights
from gyre.workloads.learner.frozen import RewardModel, reward_model_folder
from gyre.workloads.learner.trained_model import TrainedModel
from gyre.workloads.megatron.backend import MegatronBackend


class MegatronRewardModel(RewardModel):
    """On the device and in the precision of `config.megatron`, with packed samples."""

    backend: MegatronBackend

    def make_backend(self) -> MegatronBackend:
        folder = reward_model_folder(self.config)
        model = TrainedModel.of_folder(folder)
        self.vocab = model.architecture.vocab
        return MegatronBackend(
            self.own_context,
            self.settings,
            self.settings.optim,
            model,
            lambda _device: score_weights(folder, model.architecture),
            values=True,
            trains=False,
        )
