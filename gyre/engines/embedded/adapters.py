"""Adapters (LoRA) beside one causal model of transformers: their tensors, and linear layers that add the one that is
on.

Invariants:
- *the model stays as it is*: an adapter is tensors of its own; without one the layers say what they said before;
- *all of it or none*: an adapter is refused whole where a tensor is missing, of another shape or of no layer, or where
  it is more than the engine was started for.

This module must not know about requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre.errors import nearest
from gyre.models.adapters import A, AdapterLimits, B, in_file, read_adapter_config
from gyre.models.errors import ModelFolderError
from gyre.models.finite import is_finite, refuse_not_finite
from gyre.models.safetensors_folder import SafetensorsFolder, TensorSource


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """By layer, A `[rank, in]` and B `[out, rank]`, the latter times the scale."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]


class _Switch:
    """The adapter that the model's layers add now."""

    on: Adapter | None = None


class _AdaptedLinear(nn.Linear):
    name: str
    switch: _Switch

    def forward(self, input: Tensor) -> Tensor:
        said = super().forward(input)
        adapter = self.switch.on
        pair = adapter.pairs.get(self.name) if adapter is not None else None
        return said if pair is None else said + F.linear(F.linear(input, pair[0]), pair[1])


def make_adaptable(causal: Any) -> None:
    """Let the linear layers of a model, but for the output layer, take adapters."""
    switch, head = _Switch(), causal.get_output_embeddings()
    for name, module in causal.named_modules():
        if type(module) is nn.Linear and module is not head:
            layer: Any = module
            layer.__class__ = _AdaptedLinear
            layer.name, layer.switch = name, switch
    causal.adapter_switch = switch


@contextmanager
def adapted(causal: Any, adapter: Adapter | None) -> Iterator[None]:
    """In the block the model adds the adapter. One thread may be in it at a time."""
    if adapter is None:
        yield
        return
    switch: _Switch = causal.adapter_switch
    switch.on = adapter
    try:
        yield
    finally:
        switch.on = None


def layers_of(causal: nn.Module) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the layers that take adapters."""
    return {
        name: (module.in_features, module.out_features)
        for name, module in causal.named_modules()
        if isinstance(module, _AdaptedLinear)
    }


def read_adapter(
    folder: Path, layers: Mapping[str, tuple[int, int]], limits: AdapterLimits, dtype: torch.dtype
) -> Adapter:
    """The adapter in a folder, in memory of its own. Raises ModelFolderError where it is none for these layers."""
    config, source = read_adapter_config(folder), SafetensorsFolder(folder, adapter=True)
    limits.require(config, folder)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    broken: list[str] = []
    for asked in config.layers:
        named = [one for one in layers if one == asked or one.endswith(f".{asked}")]
        if not named:
            raise ModelFolderError(
                f"{folder}: the model has no linear layer {asked!r} that takes an adapter; "
                f"{nearest(asked, sorted(layers))}",
                hint="It is an adapter of another model.",
            )
        for name in named:
            inside, outside = layers[name]
            a = _checked(folder, source, f"{name}.{A}", (config.rank, inside))
            b = _checked(folder, source, f"{name}.{B}", (outside, config.rank))
            pairs[name] = a.to(dtype, copy=True), (b.float() * config.scale).to(dtype)
            broken += [
                in_file(f"{name}.{part}")
                for part, one in zip((A, B), pairs[name], strict=True)
                if not is_finite(one)
            ]
    refuse_not_finite(broken)
    unknown = sorted(source.names - {in_file(f"{name}.{part}") for name in pairs for part in (A, B)})
    if unknown:
        raise ModelFolderError(
            f"{folder} holds {len(unknown)} tensors that are of no layer of the adapter, {unknown[0]} among them."
        )
    return Adapter(pairs)


def _checked(folder: Path, source: TensorSource, name: str, shape: tuple[int, int]) -> Tensor:
    tensor = source(in_file(name))
    if tuple(tensor.shape) != shape:
        raise ModelFolderError(
            f"{folder}: {in_file(name)} is {tuple(tensor.shape)}, and beside this model it would be {shape}.",
            hint="It is an adapter of another model.",
        )
    return tensor
