"""The model of FSDP2's roles, and the weights that it begins with: a folder's, of a causal language model of
transformers, or the small decoder's.

Where Gyre's own decoder knows the model, its weights are read, compared and drawn as every back end does. Of another
one they must be there: only transformers could draw them.

Invariant *nothing is passed over*: a folder's tensors are those of its model, or it is refused.

This module must not know who trains the model or asks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gyre.config.sections import WorkloadSettings
from gyre.models.architecture import Architecture, read_architecture, read_config
from gyre.models.errors import ModelFolderError, NotComputed
from gyre.models.first_weights import score_weights
from gyre.models.safetensors_folder import SafetensorsFolder, TensorSource
from gyre.models.support import refuse_another, refuse_no_folder, weights_of_another
from gyre.models.tensor_names import EMBEDDING, HEAD, SCORE, VALUE_BIAS, VALUE_WEIGHT
from gyre.models.tried import problem_with
from gyre.workloads.fsdp.model import parsed_config
from gyre.workloads.learner.trained_model import TrainedModel, first_source, trained_model
from gyre.workloads.tasks.same_tokenizer import refuse_other_tokenizer, refuse_other_tokens
from gyre.workloads.tasks.task import Task


@dataclass(frozen=True, slots=True)
class FirstModel:
    """A `gyre.workloads.learner.trained_model.LearnedModel`. `known` is its shape, where Gyre's own decoder knows it;
    `folder` is None for the small decoder; `tied` says whether the output layer is the embedding."""

    config: dict[str, Any]
    folder: Path | None
    known: Architecture | None
    vocab: int
    hidden: int
    tied: bool

    @classmethod
    def of_folder(cls, folder: Path, key: str) -> FirstModel:
        """Raises ConfigError and ModelFolderError, the latter beginning with `key`, for what is no folder of a causal
        language model of transformers."""
        refuse_no_folder(folder, key)
        config = read_config(folder)
        known: Architecture | None = None
        try:
            known = read_architecture(folder)
        except NotComputed:
            refuse_another(folder, config)
            if problem := problem_with(config, "fsdp"):
                raise ModelFolderError(f"{key}: {folder} is not trained: {problem}.") from None
        return cls._of(config, folder, known)

    @classmethod
    def of_small(cls, model: TrainedModel) -> FirstModel:
        return cls._of(model.config, None, model.architecture)

    @classmethod
    def _of(cls, config: dict[str, Any], folder: Path | None, known: Architecture | None) -> FirstModel:
        text = parsed_config(config).get_text_config()
        tied = bool(getattr(text, "tie_word_embeddings", False))
        return cls(config, folder, known, int(text.vocab_size), int(text.hidden_size), tied)

    @property
    def small(self) -> Architecture | None:
        """The small decoder's shape, unless the model is a folder's."""
        return self.known if self.folder is None else None

    def source(self, settings: WorkloadSettings, *, head: bool = True) -> tuple[TensorSource, frozenset[str]]:
        """The weights that training begins with, by the names in files, and the names that must all be of the model;
        none where that is known already. Without `head` the output layer is not asked for. Raises ModelFolderError."""
        if self.known is not None:
            model = TrainedModel(self.known, self.config, self.folder)
            return first_source(model, settings, head=head), frozenset()
        folder = Path(settings.first_policy)
        weights_of_another(folder, self.config, head=HEAD if head else None)
        found = SafetensorsFolder(folder)
        both = head and self.tied and {HEAD, EMBEDDING} <= found.names
        if both and not torch.equal(found(HEAD), found(EMBEDDING)):
            raise ModelFolderError(
                f"{settings.first_policy}: the model ties its embeddings, and {HEAD} is not {EMBEDDING}.",
                hint=f"Set tie_word_embeddings to false, or remove {HEAD}.",
            )
        return found, found.names

    def score_source(self) -> tuple[TensorSource, frozenset[str]]:
        """A reward model's weights, its score as a value head without a bias. Raises ModelFolderError where there are
        none, or no score of one label."""
        assert self.folder is not None, "a reward model is a folder's"
        if self.known is not None:
            return score_weights(self.folder, self.known), frozenset()
        weights_of_another(self.folder, self.config, head=SCORE)
        found = SafetensorsFolder(self.folder)

        def give(name: str) -> torch.Tensor:
            return torch.zeros(1) if name == VALUE_BIAS else found(SCORE if name == VALUE_WEIGHT else name)

        return give, found.names


def first_model(config: Mapping[str, Any], task: Task | None = None) -> FirstModel:
    """The model of the job with this `config`. Raises ConfigError where there is none, or the prompts are another
    model's."""
    settings = WorkloadSettings.read(config)
    if not settings.model_path:
        return FirstModel.of_small(trained_model(config, task))
    folder = Path(settings.model_path)
    found = FirstModel.of_folder(folder, "config.model_path")
    refuse_other_tokenizer(config, folder, "config.model_path")
    refuse_other_tokens(config, found.vocab, folder)
    return found
