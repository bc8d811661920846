"""The trained policy in FSDP2; what an actor does is `gyre.workloads.learner.policy`.

This module imports transformers when it is set up, not before: naming the class costs little.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.models.adapters import ADAPTER_CONFIG, config_of_published, model_print
from gyre.models.saving import save_model_folder
from gyre.rollouts.samples import Group
from gyre.workloads.base import operator
from gyre.workloads.learner.losses import with_extras
from gyre.workloads.learner.policy import PolicyLearner

if TYPE_CHECKING:
    from gyre.workloads.fsdp.backend import FsdpBackend


class FsdpActor(PolicyLearner):
    """With `config.model_path` the model is that folder's, a causal language model of transformers. Without, it is
    the small decoder, whose `export_weights` has the decoder's own names, so that the plain torch roles go with it.

    With `config.lora` a policy version is the adapter alone, and the folder's model, with the adapter off, is the
    reference of the loss's KL terms."""

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

    def judged(self, groups: list[Group]) -> list[Group]:
        """See `Learner.judged`: with `config.lora` what the reference says of them, where the loss needs it."""
        if self.settings.lora is None or not self.settings.loss.needs_reference:
            return groups
        with self.backend.without_adapter():
            found = self.by_sample(groups)
        return with_extras(groups, "ref_logprobs", found)

    def servable_files(self) -> dict[str, bytes]:
        """See `PolicyLearner.servable_files`."""
        if self.backend.adapter_record is None:
            return {}
        return {ADAPTER_CONFIG: self._adapter_config}

    @cached_property
    def _adapter_config(self) -> bytes:
        from gyre.workloads.fsdp.lora import peft_config

        base = Path(self.settings.first_policy).resolve()
        assert self.backend.adapter_record is not None
        return config_of_published(peft_config(self.backend.adapter_record, str(base)), model_print(base))

    @operator(kind="weights")
    def save_model(self, path: Path) -> None:
        """See `PolicyLearner.save_model`. With `config.lora` the adapter is added to the weights of the folder that
        training began with. Raises CheckpointMismatch too, where they have changed since."""
        if self.backend.adapter_record is None:
            super().save_model(path)
        elif self.rank == 0:
            import torch

            from gyre.workloads.fsdp.conversion import HeldAdapter, MergedWeights

            base = Path(self.settings.first_policy)
            adapter = HeldAdapter(self.weights(), self.backend.adapter_record)
            dtype = getattr(torch, self.backend.dtype)
            whole = MergedWeights(adapter, self.trained_model.config, dtype, base)
            save_model_folder(
                path,
                self.trained_model.config,
                whole.tensors(),
                beside=base,
                check=whole.refuse_another_base,
            )
