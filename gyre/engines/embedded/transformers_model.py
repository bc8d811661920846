"""A causal model of transformers as the engine's core wants it: its configuration, and its weights.

transformers builds the model, reads its tensors by the names that files have, and computes. What a step is made of
stands in `transformers_steps`.

Invariants:
- *all of it or none*: a folder that lacks a tensor, holds one of another shape, or one that the model does not have, is
  refused: transformers would draw what is missing;
- *no code from a folder*: only classes that transformers brings are built;
- *one precision at a time*: torch's default precision, which transformers changes for the whole process while it builds
  a model of another one, is changed at the first load only, when no step runs.

This module is imported when a folder needs it: it imports transformers. It must not know about requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as their_logging

from gyre.engines.embedded.adapters import Adapter, layers_of, make_adaptable, read_adapter
from gyre.engines.embedded.served_model import ModelWeights, Runner
from gyre.engines.embedded.transformers_steps import fitting_runner
from gyre.errors import nearest
from gyre.models.adapters import AdapterLimits
from gyre.models.architecture import read_config, read_eos_token_ids
from gyre.models.errors import ModelFolderError
from gyre.models.safetensors_files import ANOTHER_MODEL
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.models.small_model import transformers_config
from gyre.models.tensor_names import is_harmless

_UNBOUNDED = 1 << 20
"""Positions of a model that has no bound of its own, such as one whose layers keep a state."""

_log = logging.getLogger(__name__)


class TransformersModel:
    """The causal language model that a folder's `config.json` describes; with `adapters` it takes those. Raises
    ModelFolderError where transformers has no such model."""

    def __init__(self, folder: Path, adapters: AdapterLimits | None = None) -> None:
        told = read_config(folder)
        self.family = str(told.get("model_type"))
        self._config = _parsed(told, folder)
        text: Any = self._config.get_text_config()
        self.vocab = int(text.vocab_size)
        self.max_positions = _positions(text)
        self.eos_token_ids = read_eos_token_ids(folder, told, self.vocab) or _default_eos(text, self.vocab)
        self._class = _class_of(self._config, folder)
        self._attention: str | None = None
        self._first: _Kept | None = None
        self._adapters = adapters
        self._layers: dict[str, tuple[int, int]] = {}
        """Inputs and outputs of the layers that take adapters, once the model is loaded."""

    @property
    def takes_adapters(self) -> bool:
        return self._adapters is not None

    def load(self, folder: Path, dtype: torch.dtype) -> ModelWeights:
        source = SafetensorsFolder(folder)
        if not source:
            raise ModelFolderError(
                f"{folder} holds no safetensors.",
                hint="Save the model with save_pretrained, or check the path.",
            )
        first = self._first
        causal = self._built(folder, source.tensors(), dtype if first is None else torch.float32)
        if first is None:
            self._attention = _working_attention(causal)
            first = self._first = _Kept(causal)
        first.take_over(causal)
        if self._adapters is not None:
            make_adaptable(causal)
            self._layers = layers_of(causal)
        return causal

    def load_adapter(self, folder: Path, dtype: torch.dtype) -> Adapter:
        if self._adapters is None:
            raise ModelFolderError(
                f"{folder}: the engine was started for no adapters.", hint="Start it with --enable-lora."
            )
        return read_adapter(folder, self._layers, self._adapters, dtype)

    def runner(self, weights: nn.Module, *, slots: int, prefill_tokens: int, context_length: int) -> Runner:
        found, said = fitting_runner(weights, slots=slots, context_length=context_length)
        _log.info("%s of transformers, attention %s: %s", type(weights).__name__, self._attention, said)
        return found

    def _built(self, folder: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> Any:
        wanted = {} if self._attention is None else {"attn_implementation": self._attention}
        shown = their_logging.is_progress_bar_enabled()
        their_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            causal, said = self._class.from_pretrained(
                None,
                config=self._config,
                state_dict=tensors,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are told below
                **wanted,
            )
        except (RuntimeError, ValueError, KeyError, ImportError) as error:
            raise ModelFolderError(
                f"{folder}: transformers cannot load it: {' '.join(str(error).split())}", hint=ANOTHER_MODEL
            ) from error
        finally:
            if shown:
                their_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        _require(folder, said)
        return causal.requires_grad_(False)


class _Kept:
    """What every version of one model has in common beside its weights: the precision of each tensor, and buffers that
    no file holds. transformers makes these two from the precision that it builds a model in."""

    def __init__(self, causal: nn.Module) -> None:
        saved = causal.state_dict()
        self._dtypes = {name: tensor.dtype for name, tensor in saved.items()}
        self._buffers = {name: one.clone() for name, one in causal.named_buffers() if name not in saved}

    def take_over(self, causal: nn.Module) -> None:
        """Make the model like the first one, in memory of its own: what was read may be a view of a file."""
        for name, tensor in (*causal.named_parameters(), *causal.named_buffers()):
            if name in self._buffers:
                tensor.data = self._buffers[name].clone()
            else:
                tensor.data = tensor.data.to(self._dtypes.get(name, tensor.dtype), copy=True)


def _parsed(told: dict[str, Any], folder: Path) -> Any:
    kind = str(told.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ModelFolderError(
            f"{folder / 'config.json'}: transformers has no model of the type {kind!r}; "
            f"{nearest(kind, list(CONFIG_MAPPING))}",
            hint="A newer transformers may have it. Code that a folder brings is not run.",
        )
    try:
        return transformers_config(told)
    except Exception as error:  # each configuration checks its own keys, by errors of many classes
        raise ModelFolderError(
            f"{folder / 'config.json'}: transformers refuses it: {' '.join(str(error).split())}"
        ) from error


def _class_of(config: Any, folder: Path) -> Any:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelFolderError(
            f"{folder / 'config.json'}: transformers has no causal language model of the type {config.model_type!r}."
        )
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _positions(text: Any) -> int:
    """The most tokens of a sequence. Where frequencies change with the longest sequence of a batch (longrope), those
    below the change: keys in a cache would be of the one kind, and queries of the other."""
    longest = int(getattr(text, "max_position_embeddings", None) or _UNBOUNDED)
    rope = getattr(text, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if one.get("rope_type") == "longrope":
            original = one.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            longest = min(longest, int(original or longest))
    return longest


def _default_eos(text: Any, vocab: int) -> frozenset[int]:
    """What the family ends samples with where its folder does not say."""
    value = getattr(text, "eos_token_id", None)
    found = value if isinstance(value, list) else [value]
    return frozenset(one for one in found if isinstance(one, int) and 0 <= one < vocab)


def _working_attention(causal: Any) -> str:
    """transformers' name for the attention that the model computes with. That a model lacks one which transformers has
    chosen (sdpa, where scores are capped) shows in a forward only."""
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with torch.no_grad():
        try:
            causal(input_ids=tokens, use_cache=False)
        except ValueError:
            causal.set_attn_implementation("eager")
            causal(input_ids=tokens, use_cache=False)
    return str(causal.config._attn_implementation)


def _require(folder: Path, said: Mapping[str, Any]) -> None:
    """Raises ModelFolderError unless the folder held all tensors of the model, each of its shape, and no others."""
    missing = sorted(said["missing_keys"])
    unknown = sorted(name for name in said["unexpected_keys"] if not is_harmless(name, ()))
    mismatched = sorted(name for name, *_ in said["mismatched_keys"])
    problems = [
        f"{what.format(len(names))}, {names[0]} among them"
        for what, names in (
            ("lacks {} tensors", missing),
            ("holds {} unknown tensors", unknown),
            ("holds {} tensors of another shape", mismatched),
        )
        if names
    ]
    if problems:
        raise ModelFolderError(f"{folder} {' and '.join(problems)}.", hint=ANOTHER_MODEL)
