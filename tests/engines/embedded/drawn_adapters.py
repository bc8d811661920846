"""Adapters with drawn weights beside tiny models: what the trainer's own layers say with them, and their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from gyre.config.sections import LoraSettings
from gyre.models.adapters import ADAPTER_CONFIG, config_of_published, in_file, model_print
from gyre.workloads.fsdp.lora import AdaptedLinear, add_adapter, peft_config

SETTINGS = LoraSettings(rank=2, alpha=6.0)


def adapted(
    folder: Path, seed: int, settings: LoraSettings = SETTINGS, *, large: float = 0.2
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The trainer's model with an adapter of this seed, and the adapter's tensors by PEFT's names."""
    causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    named: dict[str, Tensor] = {}
    for name in add_adapter(causal, settings):
        layer = causal.get_submodule(name)
        assert isinstance(layer, AdaptedLinear)
        for one in ("lora_A", "lora_B"):
            drawn = large * torch.randn(getattr(layer, one).shape, generator=generator)
            setattr(layer, one, nn.Parameter(drawn, requires_grad=False))
            named[in_file(f"{name}.{one}")] = drawn
    return causal.eval(), named


def write_adapter(
    path: Path, base: Path, named: dict[str, Tensor], settings: LoraSettings = SETTINGS, **changes: Any
) -> Path:
    """The folder of a policy version; `changes` are to `adapter_config.json`, None leaves a key out."""
    path.mkdir(parents=True)
    layers = sorted({name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in named})
    record = {"rank": settings.rank, "alpha": settings.alpha, "layers": layers}
    told = json.loads(config_of_published(peft_config(record, str(base.resolve())), model_print(base)))
    told = {key: value for key, value in (told | changes).items() if value is not None or key not in changes}
    (path / ADAPTER_CONFIG).write_text(json.dumps(told))
    (path / "config.json").write_text((base / "config.json").read_text())
    save_file(named, path / "model.safetensors")
    return path
