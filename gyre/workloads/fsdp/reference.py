"""The reference policy in FSDP2's back end; what one is, is `gyre.workloads.learner.frozen`.

This module imports transformers when it is set up, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.workloads.learner.frozen import ReferenceModel

if TYPE_CHECKING:
    from gyre.workloads.fsdp.backend import FsdpBackend


class FsdpReference(ReferenceModel):
    """For the causal language models of transformers that docs/models.md lists, on the device and in the precision of
    `config.fsdp`."""

    backend: FsdpBackend

    def make_backend(self) -> FsdpBackend:
        from gyre.workloads.fsdp.backend import FsdpBackend
        from gyre.workloads.fsdp.first_model import first_model

        self.refuse_small()
        model = first_model(self.config)
        source, held = model.source(self.settings)
        return FsdpBackend(
            self.own_context,
            self.settings,
            self.settings.optim,
            model.config,
            source,
            values=False,
            trains=False,
            held=held,
        )
