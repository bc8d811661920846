"""The model that a job trains: the one of a folder, or the small decoder whose shape the job gives.

This module must not know who trains it, serves it or asks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError
from gyre.models.architecture import Architecture, config_of, read_architecture, read_config
from gyre.models.finite import is_finite, refuse_not_finite
from gyre.models.first_weights import first_weights, given_weights
from gyre.models.modules import Decoder
from gyre.models.safetensors_folder import TensorSource
from gyre.models.support import refuse_no_folder
from gyre.models.tensor_names import expected_shapes, from_names, to_names
from gyre.workloads.tasks.same_tokenizer import refuse_other_tokenizer, refuse_other_tokens
from gyre.workloads.tasks.task import Task, task_of

_CPU = torch.device("cpu")


class LearnedModel(Protocol):
    """What a learner must know of its model, whatever computes it."""

    @property
    def config(self) -> dict[str, Any]:
        """The content of its `config.json`."""
        ...

    @property
    def small(self) -> Architecture | None:
        """The small decoder's shape, unless the model is a folder's."""
        ...

    @property
    def hidden(self) -> int:
        """The width of what its output layer reads."""
        ...


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model that Gyre's own decoder knows. `config` is the content of its `config.json`; `folder` is where it comes
    from, None for the small decoder."""

    architecture: Architecture
    config: dict[str, Any]
    folder: Path | None

    @classmethod
    def of_folder(cls, folder: Path) -> TrainedModel:
        """Raises ModelFolderError where it holds no model that Gyre's own decoder knows."""
        return cls(read_architecture(folder), read_config(folder), folder)

    @property
    def small(self) -> Architecture | None:
        """The small decoder's shape, unless the model is a folder's."""
        return self.architecture if self.folder is None else None

    @property
    def hidden(self) -> int:
        return self.architecture.hidden

    def first_weights(
        self, settings: WorkloadSettings, device: torch.device = _CPU, *, head: bool = True
    ) -> TensorSource | None:
        """The weights that training begins with, by Hugging Face's names: another job's, the folder's, or for a folder
        without any those of the seed, drawn on the device. None where the small decoder draws its own. Without `head`
        the output layer is not asked for. Raises ModelFolderError."""
        if settings.first_weights.path:
            return given_weights(Path(settings.first_weights.path), self.architecture, head=head)
        if self.folder is None:
            return None
        return first_weights(self.folder, self.architecture, settings.seed, device, head=head)


def trained_model(config: Mapping[str, Any], task: Task | None = None) -> TrainedModel:
    """The model of the job with this `config`. Raises ConfigError where there is none, or the prompts are another
    model's."""
    settings = WorkloadSettings.read(config)
    if not settings.model_path:
        task = task or task_of(config)
        architecture = small_architecture(settings, task)
        return TrainedModel(architecture, config_of(architecture, eos_id=task.tokenizer.eos_id), None)
    folder = Path(settings.model_path)
    refuse_no_folder(folder, "config.model_path")
    model = TrainedModel.of_folder(folder)
    refuse_other_tokenizer(config, folder, "config.model_path")
    refuse_other_tokens(config, model.architecture.vocab, folder)
    return model


def first_source(
    model: TrainedModel, settings: WorkloadSettings, device: torch.device = _CPU, *, head: bool = True
) -> TensorSource:
    """The weights that training begins with, the small decoder's too, by Hugging Face's names. Raises
    ModelFolderError."""
    source = model.first_weights(settings, device, head=head)
    if source is not None:
        return source
    decoder = Decoder(model.architecture, seed=settings.seed)
    return to_names(decoder.state_dict(), model.architecture).__getitem__


def own_parameters(source: TensorSource, architecture: Architecture) -> dict[str, torch.Tensor]:
    """The source's tensors as the decoder's parameters, in float32. Raises ModelFolderError where one is not finite."""
    named = {name: source(name).float() for name in expected_shapes(architecture)}
    refuse_not_finite([name for name, tensor in named.items() if not is_finite(tensor)])
    return from_names(named, architecture)


def small_architecture(settings: WorkloadSettings, task: Task) -> Architecture:
    """The small decoder's shape for the task's vocabulary. Raises ConfigError where the job gave none."""
    model = settings.model
    if model is None:
        raise ConfigError(
            "The job has no model.",
            hint="Give a model's folder as config.model_path, or the shape of a small decoder as config.model.",
        )
    return Architecture.qwen3(
        vocab=task.tokenizer.vocab_size,
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        mlp=model.mlp,
        max_positions=model.max_positions,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        tied=model.tied_embeddings,
    )
