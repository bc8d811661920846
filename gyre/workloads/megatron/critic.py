"""The critic in Megatron-core; what a critic does is `gyre.workloads.learner.value`.

This module imports Megatron when it is set up, not before.
"""

from __future__ import annotations

from gyre.workloads.learner.trained_model import first_source, trained_model
from gyre.workloads.learner.value import ValueLearner
from gyre.workloads.megatron.backend import MegatronBackend


class MegatronCritic(ValueLearner):
    """All operators go to every rank, `values` with each rank's share."""

    backend: MegatronBackend

    def make_backend(self) -> MegatronBackend:
        model = self.trained_model = trained_model(self.config)
        return MegatronBackend(
            self.context,
            self.settings,
            self.optim,
            model,
            lambda device: self.with_head(first_source(model, self.settings, device, head=False)),
            values=True,
        )
