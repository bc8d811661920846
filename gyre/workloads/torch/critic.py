"""The critic in plain torch; what a critic does is `gyre.workloads.learner.value`."""

from __future__ import annotations

from collections.abc import Callable

from gyre.workloads.learner.trained_model import first_source, trained_model
from gyre.workloads.learner.value import ValueLearner
from gyre.workloads.torch.backend import TorchBackend


class TorchCritic(ValueLearner):
    """With `config.model_path` the model is that folder's, in float32; without, it is the small decoder."""

    backend: TorchBackend

    def make_backend(self) -> TorchBackend:
        """Raises ConfigError where the folder holds no model, or one that is not computed here."""
        model = self.trained_model = trained_model(self.config)
        source = self.with_head(first_source(model, self.settings, head=False))
        return TorchBackend(self.context, self.settings, self.optim, model.architecture, source, values=True)

    def later_digest(self) -> Callable[[], str | None]:
        """It is known at once: the model is whole on this rank, and small."""
        known = self.digest()
        return lambda: known
