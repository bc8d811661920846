"""The critic in FSDP2; what a critic does is `gyre.workloads.learner.value`.

This module imports transformers when it is set up, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.workloads.learner.value import ValueLearner

if TYPE_CHECKING:
    from gyre.workloads.fsdp.backend import FsdpBackend


class FsdpCritic(ValueLearner):
    """All operators go to every rank, `values` with each rank's share."""

    backend: FsdpBackend

    def make_backend(self) -> FsdpBackend:
        """Raises ConfigError and ModelFolderError where the folder holds no such model, or other weights."""
        from gyre.workloads.fsdp.backend import FsdpBackend
        from gyre.workloads.fsdp.first_model import first_model

        model = self.trained_model = first_model(self.config)
        source, held = model.source(self.settings, head=False)
        return FsdpBackend(
            self.context,
            self.settings,
            self.optim,
            model.config,
            self.with_head(source),
            values=True,
            held=held,
        )
