"""Whether two models that only transformers knows are one: by their `config.json`, and by the tensors of a folder.

This module must not know of jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gyre.models.errors import ModelFolderError
from gyre.models.safetensors_files import ANOTHER_MODEL, weight_files
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.workloads.fsdp.file_names import FileNames
from gyre.workloads.fsdp.model import build_causal, parsed_config
from gyre.workloads.fsdp.shards import named_tensors
from gyre.workloads.fsdp.token_model import TokenModel

_NO_WEIGHTS_MATTER = frozenset(
    (
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)
"""Keys that may differ between a model and one whose weights it begins with."""


def config_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """How the models of two `config.json` differ, each a text that names the key. What is absent has the default of
    transformers. Raises ConfigError where it has no such model."""
    kinds = [str(one.get("model_type", "")) for one in (theirs, ours)]
    if kinds[0] != kinds[1]:
        return [f"model_type is {kinds[0]} instead of {kinds[1]}"]
    there, here = (_flat(parsed_config(dict(one)).to_dict()) for one in (theirs, ours))
    return [
        f"{key} is {there.get(key)} instead of {here.get(key)}"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in _NO_WEIGHTS_MATTER:
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def given_weights_of(folder: Path, hugging_face_config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The folder's tensors, one after another, which are those of the model of this `config.json`. Raises
    ModelFolderError where there are none, others, or of other shapes, before the first one."""
    held = {entry.name: entry.shape for entries in weight_files(folder).values() for entry in entries}
    if not held:
        raise ModelFolderError(
            f"{folder} holds no weights as safetensors.",
            hint="Save the model with transformers' save_pretrained, which writes safetensors.",
        )
    wanted = tensors_in_files(hugging_face_config)
    for name, shape in wanted.items():
        if held.get(name) != shape:
            raise ModelFolderError(
                f"{folder}: tensor {name} is {held.get(name, 'missing')}, the model's is {shape}.",
                hint=ANOTHER_MODEL,
            )
    source = SafetensorsFolder(folder)
    return ((name, source(name)) for name in wanted)


def tensors_in_files(hugging_face_config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a model by the names that files have, with their shapes. Raises ConfigError where transformers has
    no such model."""
    model = TokenModel(build_causal(hugging_face_config, "auto"), values=False)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    names = FileNames(model.causal, shapes)
    return {name: shape for bundle in names.bundles for name, shape in bundle.files.items()}
