"""The trained policy in plain torch; what an actor does is `gyre.workloads.learner.policy`."""

from __future__ import annotations

from gyre.models.architecture import Architecture
from gyre.workloads.learner.policy import PolicyLearner
from gyre.workloads.learner.trained_model import TrainedModel, first_source, trained_model
from gyre.workloads.torch.backend import TorchBackend


class TorchActor(PolicyLearner):
    """With `config.model_path` the model is that folder's, in float32; without, it is the small decoder."""

    backend: TorchBackend
    trained_model: TrainedModel

    def exports_names_of(self) -> Architecture:
        return self.trained_model.architecture

    def make_backend(self) -> TorchBackend:
        """Raises ConfigError where the folder that training begins with holds no weights of this model."""
        model = self.trained_model = trained_model(self.config, self.task)
        source = first_source(model, self.settings)
        return TorchBackend(self.context, self.settings, self.optim, model.architecture, source, values=False)
