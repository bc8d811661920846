"""A folder's model in FSDP2's back end that is asked and never trained: what the reference and the reward model share.

A vertex of such a role holds the whole model; several of them share the samples, not the model.

This module must not know what is asked. It imports transformers when it is set up, not before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gyre.config.sections import WorkloadSettings
from gyre.workloads.base import BaseWorkload

if TYPE_CHECKING:
    from gyre.models.safetensors_folder import TensorSource
    from gyre.workloads.fsdp.backend import FsdpBackend
    from gyre.workloads.fsdp.first_model import FirstModel
    from gyre.workloads.learner.packing import Row


class FrozenModel(BaseWorkload):
    """A folder's model on the device and in the precision of `config.fsdp`, with its `pass_tokens`."""

    VALUES: ClassVar[bool] = False
    """Whether the model gives values instead of logits."""

    def model(self) -> FirstModel:
        """Raises ConfigError where no folder is named, or it is another kind of model's."""
        raise NotImplementedError

    def weights_of(self, model: FirstModel) -> tuple[TensorSource, Collection[str]]:
        """The weights, and the names of all tensors beside them. Raises ModelFolderError."""
        raise NotImplementedError

    def setup(self) -> None:
        from gyre.workloads.fsdp.backend import FsdpBackend

        self.settings = WorkloadSettings.read(self.config)
        torch.set_num_threads(self.settings.threads)
        self.trained_model = self.model()
        source, held = self.weights_of(self.trained_model)
        self.backend: FsdpBackend = FsdpBackend(
            replace(self.context, rank=0, world_size=1),
            self.settings,
            self.settings.optim,
            self.trained_model.config,
            source,
            values=self.VALUES,
            trains=False,
            held=held,
        )

    def teardown(self) -> None:
        if hasattr(self, "backend"):  # none before it is set up
            self.backend.close(keep=False)

    def said_of(self, rows: Sequence[Row]) -> list[float]:
        """What the model says of each predicted token of the rows, one after the other, with a tick after each
        pass."""
        from gyre.workloads.learner.packing import pack

        found: list[float] = []
        once = self.backend.prompts_once
        for part in pack(rows, max_tokens=self.backend.pass_tokens, prompts_once=once):
            (said,) = self.backend.forward([part])
            found += said.tolist()
            self.report_progress()
        return found
