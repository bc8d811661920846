"""The trained policy in Megatron-core; what an actor does is `gyre.workloads.learner.policy`.

This module imports Megatron when it is set up, not before: naming the class costs nothing.
"""

from __future__ import annotations

from gyre.workloads.learner.policy import PolicyLearner
from gyre.workloads.learner.trained_model import first_source, trained_model
from gyre.workloads.megatron.backend import MegatronBackend


class MegatronActor(PolicyLearner):
    """With `config.model_path` the model is that folder's. Without, it is the small decoder, whose `export_weights` has
    the decoder's own names, so that the plain torch roles go with it."""

    backend: MegatronBackend

    def make_backend(self) -> MegatronBackend:
        model = self.trained_model = trained_model(self.config, self.task)
        return MegatronBackend(
            self.context,
            self.settings,
            self.optim,
            model,
            lambda device: first_source(model, self.settings, device),
            values=False,
        )
