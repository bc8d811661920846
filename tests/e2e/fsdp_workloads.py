"""An FSDP2 actor whose passes do not fit while their activations are kept."""

from __future__ import annotations

import torch

from gyre.workloads.fsdp.actor import FsdpActor


class HungryFsdpActor(FsdpActor):
    """From step 3 on the second rank has no memory left at the last layer of a pass, until activations are computed
    again. The other rank waits for it there."""

    def setup(self) -> None:
        super().setup()
        last = self.backend._model.causal.model.layers[-1]
        last.register_forward_pre_hook(self._reach_the_last_layer)

    def _reach_the_last_layer(self, *_: object) -> None:
        keeps = not self.health()["passes"].endswith("since a pass did not fit")
        if self.rank == 1 and self.step >= 2 and keeps and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
