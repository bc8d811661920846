"""An adapter (LoRA) beside a model that stays as it is: its layers, its tensors by PEFT's names, and merged weights.

A linear layer `x W` becomes `x W + alpha / rank * x A B`. A is drawn from the seed, as PEFT draws it, and B begins with
zeros, so training begins with the model itself.

Invariants:
- *only the adapter*: no parameter of the model has a gradient, an optimizer's state or a place in a checkpoint;
- *the same in every layout*: A follows from the seed and its name;
- *off is the model*: with the adapter off, the model says what it said before it had one;
- *PEFT's layout*: names, shapes and `adapter_config.json` are those that PEFT writes and reads.

This module must not know about steps or files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre.config.sections import LoraSettings
from gyre.config.sections.lora import ALL_LINEAR
from gyre.errors import ConfigError, nearest
from gyre.models.adapters import A, B, from_file, in_file
from gyre.models.first_weights import seeded_generator
from gyre.models.safetensors_folder import TensorSource
from gyre.workloads.fsdp.file_names import TensorBundle
from gyre.workloads.fsdp.ranks import FsdpRanks
from gyre.workloads.fsdp.shards import Shards, named_tensors
from gyre.workloads.fsdp.token_model import TokenModel

_WEIGHT = ".weight"
_KEY = "config.lora.target_modules"


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter: `lora_A` `[rank, in]`, `lora_B` `[out, rank]`."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    is_on: bool

    def forward(self, input: Tensor) -> Tensor:
        said = super().forward(input)
        if not self.is_on:
            return said
        low = F.linear(input, self.lora_A)
        # Product, scale and sum in one kernel: apart they pass over what is said three times, and over its gradient.
        rows = torch.addmm(said.flatten(0, -2), low.flatten(0, -2), self.lora_B.t(), alpha=self.scale)
        return rows.view_as(said)


def add_adapter(causal: nn.Module, settings: LoraSettings) -> list[str]:
    """Freeze the model's parameters, and give an adapter, whose parameters have no memory yet, to the layers that the
    settings name. Returns the names of these layers. Raises ConfigError where a name is of no linear layer."""
    layers = _linear_layers(causal)
    names = targets_of(list(layers), settings)
    causal.requires_grad_(False)
    for name in names:
        layer: Any = layers[name]
        layer.__class__ = AdaptedLinear
        layer.lora_A = nn.Parameter(torch.empty(settings.rank, layer.in_features, device="meta"))
        layer.lora_B = nn.Parameter(torch.empty(layer.out_features, settings.rank, device="meta"))
        layer.scale, layer.is_on = scale_of(settings), True
    return names


def scale_of(settings: LoraSettings) -> float:
    return settings.alpha / settings.rank


def targets_of(layers: list[str], settings: LoraSettings) -> list[str]:
    """Those of the linear layers that the settings name. Raises ConfigError where one of these names is of none."""
    asked = settings.target_modules
    if asked == ALL_LINEAR:
        return layers
    for one in asked:
        if not any(_is_named(name, one) for name in layers):
            ends = sorted({name.rpartition(".")[2] for name in layers})
            raise ConfigError(
                f"{_KEY}: the model has no linear layer {one!r}; {nearest(one, ends)}",
                hint="The output layer, and experts that are one tensor, take no adapter.",
            )
    return [name for name in layers if any(_is_named(name, one) for one in asked)]


def _is_named(name: str, asked: str) -> bool:
    return name == asked or name.endswith(f".{asked}")


def _linear_layers(causal: Any) -> dict[str, nn.Module]:
    head = causal.get_output_embeddings()
    return {
        name: module
        for name, module in causal.named_modules()
        if type(module) is nn.Linear and module is not head
    }


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """In the block the model is what it was without its adapter."""
    layers = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


# -- tensors ------------------------------------------------------------------------------------------


class AdapterShards(Shards):
    """This rank's shards of the adapter alone; in files they have PEFT's names."""

    def __init__(self, model: TokenModel, ranks: FsdpRanks, names: list[str], settings: LoraSettings) -> None:
        self.layers, self.settings = names, settings
        super().__init__(model, ranks)

    @staticmethod
    def named(model: TokenModel) -> dict[str, Any]:
        return named_tensors(model, adapter=True)

    def file_names(self, model: TokenModel) -> AdapterNames:
        return AdapterNames(self._shapes)

    def merged_into(self, base: Shards, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The model's whole tensors, the adapter added to them: as `Shards.gathered`."""
        layers = set(self.layers)

        def added(name: str, whole: Tensor) -> Tensor:
            layer = name.removesuffix(_WEIGHT)
            if layer == name or layer not in layers:
                return whole
            a, b = (self._whole(f"{layer}.{one}", torch.float32) for one in (A, B))
            return merged(whole, a, b, scale_of(self.settings), dtype=dtype)

        return base.gathered(dtype, change=added)


class AdapterNames:
    """Both ways between the adapter's own names, such as `model.layers.0.mlp.up_proj.lora_A`, and PEFT's in files."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.bundles = [TensorBundle((name,), {in_file(name): shape}) for name, shape in shapes.items()]

    def apart(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {in_file(name): tensor for name, tensor in tensors.items()}

    def together(self, files: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {from_file(name): one for name, one in files.items()}


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, dtype: torch.dtype) -> Tensor:
    """`weight` `[out, in]` with the adapter added to it in float32, as `dtype`."""
    return (weight.float() + scale * (b.float() @ a.float())).to(dtype)


def first_adapter(shapes: Mapping[str, tuple[int, ...]], seed: int) -> TensorSource:
    """What training begins with, by PEFT's names: A uniform between the roots of ±1 / in, B zeros. `shapes` are by the
    adapter's own names."""
    found = {in_file(name): shape for name, shape in shapes.items()}

    def give(name: str) -> Tensor:
        shape = found[name]
        if name.endswith(f"{B}{_WEIGHT}"):
            return torch.zeros(shape)
        cpu = torch.device("cpu")  # the same on every device
        drawn = torch.rand(shape, generator=seeded_generator(seed, name, cpu))
        return (2.0 * drawn - 1.0) / math.sqrt(shape[1])

    return give


# -- what is written of it ----------------------------------------------------------------------------


def record_of(settings: LoraSettings, layers: list[str], base: str) -> dict[str, Any]:
    """What a checkpoint says of its adapter: plain data. `base` is the fingerprint of the model beside it."""
    return {"rank": settings.rank, "alpha": settings.alpha, "layers": layers, "base": base}


def problem_with(found: Any, own: Mapping[str, Any] | None) -> str:
    """How what a checkpoint says of its adapter, if it has one, differs from this job's; "" where it does not."""
    if own is None:
        return "it is of an adapter, and config.lora is not given" if found is not None else ""
    if not isinstance(found, Mapping):
        return "it is of a whole model, and config.lora is given"
    for key, what in (
        ("rank", "config.lora.rank is"),
        ("alpha", "config.lora.alpha is"),
        ("layers", "config.lora.target_modules are"),
    ):
        if found.get(key) != own[key]:
            there = f"{found.get(key)!r:.80} there, {own[key]!r:.80} here"
            return f"{what} {there}"
    if found.get("base") != own["base"]:
        return "its adapter was trained beside the weights of another model"
    return ""


EXPERT_PARTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""The ends of the names that linear layers of experts had while each was a layer of its own."""


def read_otherwise_by_peft(layers: Collection[str], names: Collection[str]) -> list[str]:
    """Those of the adapter's layers that PEFT takes for experts, a shared one say, where the model, whose tensors have
    these `names`, has its experts in one tensor. It gives the adapter other places then, and leaves these parts of it
    out (`_convert_peft_config_moe` in PEFT 0.21)."""
    if not any(".experts." in name for name in names):
        return []
    return [name for name in layers if name.rpartition(".")[2] in EXPERT_PARTS]


def peft_config(record: Mapping[str, Any], base: str) -> dict[str, Any]:
    """The content of `adapter_config.json`. `base` is the folder of the model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": record["rank"],
        "lora_alpha": record["alpha"],
        "lora_dropout": 0.0,
        "target_modules": record["layers"],
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
        "use_rslora": False,
    }
