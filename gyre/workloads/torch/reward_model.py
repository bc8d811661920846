"""A reward model in plain torch; what one is, is `gyre.workloads.learner.frozen`."""

from __future__ import annotations

from gyre.models.first_weights import score_weights
from gyre.workloads.learner.frozen import RewardModel, reward_model_folder
from gyre.workloads.learner.trained_model import TrainedModel
from gyre.workloads.torch.backend import TorchBackend


class TorchRewardModel(RewardModel):
    """In float32 on the CPU."""

    backend: TorchBackend

    def make_backend(self) -> TorchBackend:
        folder = reward_model_folder(self.config)
        architecture = TrainedModel.of_folder(folder).architecture
        self.vocab = architecture.vocab
        return TorchBackend(
            self.own_context,
            self.settings,
            self.settings.optim,
            architecture,
            score_weights(folder, architecture),
            values=True,
            trains=False,
        )
