"""The reference policy in Megatron-core; what one is, is `gyre.workloads.learner.frozen`.

This module imports Megatron when it is set up, not before.
"""

from __future__ import annotations

from gyre.workloads.learner.frozen import ReferenceModel
from gyre.workloads.learner.trained_model import first_source, trained_model
from gyre.workloads.megatron.backend import MegatronBackend


class MegatronReference(ReferenceModel):
    """On the device and in the precision of `config.megatron`, with packed samples."""

    backend: MegatronBackend

    def make_backend(self) -> MegatronBackend:
        self.refuse_small()
        model = trained_model(self.config)
        return MegatronBackend(
            self.own_context,
            self.settings,
            self.settings.optim,
            model,
            lambda device: first_source(model, self.settings, device),
            values=False,
            trains=False,
        )
