"""The trained policy in FSDP2; what an actor does is `gyre.workloads.learner.policy`.

This module imports transformers when it is set up, not before: naming the class costs little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.workloads.learner.policy import PolicyLearner

if TYPE_CHECKING:
    from gyre.workloads.fsdp.backend import FsdpBackend


class FsdpActor(PolicyLearner):
    """With `config.model_path` the model is that folder's, any causal language model of transformers. Without, it is
    the small decoder, whose `export_weights` has the decoder's own names, so that the plain torch roles go with it."""

    backend: FsdpBackend

    def make_backend(self) -> FsdpBackend:
        """Raises ConfigError and ModelFolderError where the folder holds no such model, or other weights."""
        from gyre.workloads.fsdp.backend import FsdpBackend
        from gyre.workloads.fsdp.first_model import first_model

        model = self.trained_model = first_model(self.config, self.task)
        source, held = model.source(self.settings)
        return FsdpBackend(
            self.context, self.settings, self.optim, model.config, source, values=False, held=held
        )
