"""An adapter (LoRA) as a folder in PEFT's layout: `adapter_config.json` beside safetensors, whose names say which
linear layer of the model each tensor is for.

Invariants:
- *of one model*: an adapter that Gyre publishes says which weights it was trained beside (`model_print`), and is loaded
  beside no others;
- *nothing is passed over*: what changes an adapter and is not known here is refused.

This module must not know who trains it or serves it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from gyre.models.architecture import read_config
from gyre.models.errors import ModelFolderError
from gyre.models.safetensors_files import weight_files

ADAPTER_CONFIG: Final = "adapter_config.json"
A: Final = "lora_A"
B: Final = "lora_B"
PRINT: Final = "gyre_model_print"
_BASE: Final = "base_model_name_or_path"
_PEFTS, _WEIGHT = "base_model.model.", ".weight"

ALL_LAYERS: Final = "all"
"""Engines' word for adapters of any layer."""

_LARGEST_SCALE = 3.4e38

_PRINTED_BYTES = 4096
"""Of the beginning and of the end of each tensor: weights that were trained differ everywhere."""

_EMPTY: tuple[Any, ...] = (None, {}, [])
_OFF: tuple[Any, ...] = (None, False)
_ANY: Final = None

_KEYS: Mapping[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("r", "lora_alpha", "target_modules", _BASE, PRINT), _ANY),
    # What training does, and who wrote it: of no effect on what the adapter says.
    **dict.fromkeys(
        ("task_type", "peft_version", "revision", "inference_mode", "lora_dropout", "auto_mapping"), _ANY
    ),
    "megatron_core": _ANY,  # a module's name, which counts beside megatron_config alone
    "qalora_group_size": _ANY,  # which counts beside use_qalora alone
    # The kinds of beginning that leave the model beside the adapter as it is.
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    **dict.fromkeys(
        (
            "fan_in_fan_out",
            "use_dora",
            "use_rslora",
            "use_qalora",
            "lora_bias",
            "ensure_weight_tying",
            "use_bdlora",
        ),
        _OFF,
    ),
    **dict.fromkeys(
        (
            "modules_to_save",
            "rank_pattern",
            "alpha_pattern",
            "exclude_modules",
            "layers_to_transform",
            "layers_pattern",
            "layer_replication",
            "trainable_token_indices",
            "target_parameters",
            "megatron_config",
            "loftq_config",
            "eva_config",
            "corda_config",
            "lora_ga_config",
            "velora_config",
            "monteclora_config",
            "alora_invocation_tokens",
            "arrow_config",
            "kasa_config",
        ),
        _EMPTY,
    ),
}
"""Every key of PEFT's `LoraConfig`, and with which values an adapter is what is computed here; `_ANY` where each is, or
is looked at by itself. A key that is not here may change what an adapter says, so it is refused."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What `adapter_config.json` says. `layers` are the linear layers or the ends of their names; `base` is the folder
    of the model beside it, where it was trained, and `model_print` that model's; "" where the file does not say."""

    rank: int
    alpha: float
    layers: tuple[str, ...]
    base: str
    model_print: str

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def layer_ends(self) -> tuple[str, ...]:
        """The last parts of the layers' names, such as `q_proj`, each once."""
        return tuple(sorted({name.rpartition(".")[2] for name in self.layers}))


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What adapters an engine is started for. `layers` are the last parts of layers' names; none for any layer."""

    max_rank: int
    layers: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """An engine's arguments for them, as the embedded engine has them."""
        layers = self.layers or (ALL_LAYERS,)
        return ["--enable-lora", "--max-lora-rank", str(self.max_rank), "--lora-target-modules", *layers]

    def require(self, config: AdapterConfig, folder: Path) -> None:
        """Raises ModelFolderError for an adapter beyond the limits."""
        if config.rank > self.max_rank:
            raise ModelFolderError(
                f"{folder}: the adapter's rank is {config.rank}, and the engine was started for at most "
                f"{self.max_rank} (--max-lora-rank).",
                hint="Start the engine anew for the larger rank.",
            )
        others = sorted(set(config.layer_ends) - set(self.layers)) if self.layers else []
        if others:
            raise ModelFolderError(
                f"{folder}: the adapter has a part for {others[0]}, and the engine was started for "
                f"{', '.join(sorted(self.layers))} (--lora-target-modules).",
                hint="Start the engine anew for these layers.",
            )


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Raises ModelFolderError for what is no adapter, or one that is computed otherwise than `alpha / r * x A B`."""
    path = folder / ADAPTER_CONFIG
    try:
        told = json.loads(path.read_text())
        rank, alpha, layers = told["r"], told["lora_alpha"], told["target_modules"]
        is_whole = type(rank) is int and rank >= 1 and type(alpha) in (int, float) and 0 < alpha < math.inf
        if not is_whole or not isinstance(layers, list) or not all(isinstance(one, str) for one in layers):
            raise ValueError("r, lora_alpha or target_modules are not what they should be")
        scale = float(alpha) / rank
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise ModelFolderError(
            f"{path} is no adapter's: {type(error).__name__}: {error}",
            hint="It is the file that PEFT writes beside an adapter's tensors.",
        ) from error
    for key, value in told.items():
        if key not in _KEYS:
            raise ModelFolderError(
                f"{path}: nobody here knows what {key!a:.80} does to an adapter.",
                hint="Plain LoRA is served, with the keys that PEFT's LoraConfig has.",
            )
        fitting = _KEYS[key]
        if fitting is not _ANY and not any(type(value) is type(one) and value == one for one in fitting):
            raise ModelFolderError(
                f"{path}: {key} is {value!r:.80}, which is not served here.",
                hint="Plain LoRA is: alpha / r * x A B, added to linear layers.",
            )
    if not scale <= _LARGEST_SCALE:
        raise ModelFolderError(f"{path}: lora_alpha / r is {scale:g}, beyond any number of float32.")
    base, seen = (str(told.get(key) or "") for key in (_BASE, PRINT))
    return AdapterConfig(rank, float(alpha), tuple(layers), base, seen)


def config_of_published(peft_config: Mapping[str, Any], model_print: str) -> bytes:
    """The content of the `adapter_config.json` of a policy version. `model_print` is that of the model beside it."""
    return json.dumps({**peft_config, PRINT: model_print}, indent=1).encode()


def in_file(name: str) -> str:
    """PEFT's name of an adapter's tensor, such as `model.layers.0.mlp.up_proj.lora_A`."""
    return f"{_PEFTS}{name}{_WEIGHT}"


def from_file(name: str) -> str:
    """The same backwards."""
    return name.removeprefix(_PEFTS).removesuffix(_WEIGHT)


def base_of(adapter: Path, own: Path | None) -> Path:
    """The folder of the model beside which the adapter was trained: `own`, where it is given, else where the trainer
    had it. Raises ModelFolderError where it is not on this machine, or holds other weights."""
    config = read_adapter_config(adapter)
    base = own or Path(config.base)
    if not (own or config.base) or not (base / "config.json").is_file():
        raise ModelFolderError(
            f"{adapter} is an adapter of the model in {config.base or 'an unnamed folder'}, which is not on this "
            "machine.",
            hint="Put the model's folder there, or say where it is: `gyre join --model FOLDER`.",
        )
    if config.model_print and model_print(base) != config.model_print:
        raise ModelFolderError(
            f"{adapter} is an adapter of other weights than those in {base}.",
            hint="Copy the folder that the trainer has as config.model_path.",
        )
    return base


def model_print(folder: Path) -> str:
    """A short text that tells the weights in a folder from others: of each tensor the name, type and shape, and its
    first and last bytes. It reads a few kilobytes a tensor. Raises ModelFolderError where the folder has no weights."""
    seen = xxhash.xxh3_128()
    kind = str(read_config(folder).get("model_type"))
    files = weight_files(folder)
    if not files:
        raise ModelFolderError(f"{folder} holds no safetensors.")
    where = {entry.name: (path, entry) for path, entries in files.items() for entry in entries}
    for name in sorted(where):
        path, entry = where[name]
        seen.update(json.dumps([name, entry.dtype, entry.shape]).encode())
        try:
            with open(path, "rb") as file:
                for at in (0, max(0, entry.size_bytes - _PRINTED_BYTES)):
                    file.seek(entry.offset + at)
                    seen.update(file.read(min(_PRINTED_BYTES, entry.size_bytes)))
        except OSError as error:
            raise ModelFolderError(f"{path} cannot be read: {error}.") from error
    return f"{kind}-{seen.hexdigest()}"
