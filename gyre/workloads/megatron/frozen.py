"""A folder's model in Megatron-core that is asked and never trained: what the reference and the reward model share.

A vertex of such a role holds the whole model; several of them share the samples, not the model.

This module must not know what is asked. It imports Megatron when it is set up, not before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from gyre.config.sections import MegatronSettings, WorkloadSettings
from gyre.workloads.base import BaseWorkload
from gyre.workloads.learner.devices import device_of, dtype_of

if TYPE_CHECKING:
    from gyre.models.architecture import Architecture
    from gyre.models.safetensors_folder import TensorSource
    from gyre.workloads.learner.packing import Pass, Row


class FrozenModel(BaseWorkload):
    """A folder's model on the device and in the precision of `config.megatron`, with its `pass_tokens`."""

    VALUES: ClassVar[bool] = False
    """Whether the model gives values instead of logits."""

    def model_folder(self, layout: MegatronSettings) -> Path:
        """Raises ConfigError where none is named."""
        raise NotImplementedError

    def weights_in(self, folder: Path, architecture: Architecture, device: torch.device) -> TensorSource:
        raise NotImplementedError

    def setup(self) -> None:
        self.settings = WorkloadSettings.read(self.config)
        layout = self.settings.megatron
        path = self.model_folder(layout)
        self.layout = layout.model_copy(
            update={"tensor_parallel": 1, "pipeline_parallel": 1, "sequence_parallel": False}
        )
        torch.set_num_threads(self.settings.threads)
        device = device_of(self.layout)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        from gyre.workloads.learner.memory_choice import choice_of
        from gyre.workloads.megatron.model.seam import open_seam

        seam = open_seam(device)
        from gyre.models.architecture import read_config
        from gyre.workloads.megatron.model.config import architecture_from
        from gyre.workloads.megatron.model.parallel import Ranks
        from gyre.workloads.megatron.policy import MegatronPolicy

        self.architecture = architecture_from(read_config(path), str(path))
        source = self.weights_in(path, self.architecture, device)
        if self.VALUES:
            self.architecture = replace(self.architecture, tied=False)  # the head is a value's
        self.ranks = Ranks(
            replace(self.context, rank=0, world_size=1),
            self.layout,
            device=device,
            timeout_s=self.settings.collective_timeout_s,
            seed=self.settings.seed,
        )
        self.pass_tokens = choice_of(
            "megatron",
            self.architecture,
            self.settings,
            self.context,
            device,
            ranks=1,
            exchange=self.ranks.exchange,
            trains=False,
            values=self.VALUES,
        ).tokens
        self.policy = MegatronPolicy(
            self.architecture,
            self.layout,
            self.settings.optim,
            self.ranks,
            source,
            device=device,
            dtype=dtype_of(self.layout, device),
            seam=seam,
            trains=False,
            values=self.VALUES,
        )

    def teardown(self) -> None:
        if hasattr(self, "ranks"):  # none before they were joined
            self.ranks.close()

    def passes(self, rows: list[Row]) -> Iterator[Pass]:
        """The rows packed, with a tick after each pass."""
        from gyre.workloads.learner.packing import pack

        for part in pack(rows, max_tokens=self.pass_tokens, prompts_once=self.layout.prompts_once):
            yield part
            self.report_progress()
