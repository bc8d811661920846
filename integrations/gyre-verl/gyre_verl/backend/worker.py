"""verl's worker, made of a job's settings.

It is a plain object here: its methods are called, and neither Ray nor verl's controller knows of it. The process group
is Gyre's, which has deadlines; verl makes none where there is one.

This module must not know about passes or steps.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.utils.device import get_device_name
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from gyre.config.sections import FsdpSettings, OptimSettings, WorkloadSettings
from gyre.errors import ConfigError
from gyre.workloads.base import WorkloadContext
from gyre.workloads.learner.devices import device_of, seed_everything
from gyre_verl.backend.settings import VerlSettings

_REFUSALS = (
    AssertionError,
    AttributeError,
    ImportError,
    KeyError,
    NotImplementedError,
    OSError,
    TypeError,
    ValueError,
)
"""How verl and transformers refuse a model. What is not among them is no fault of the model's: a rank that is gone and
a device without memory are RuntimeErrors, and are told as such."""

_VERLS_DTYPE = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def device_of_verl() -> torch.device:
    """The device that verl computes on, as it finds it. Raises ConfigError where verl has none, or one that Gyre does
    not know."""
    try:
        name = get_device_name()
    except Exception as error:  # verl's platforms say in their own ways that there is none
        raise ConfigError(
            f"verl finds no device here: {error}.",
            hint="It needs a GPU; tests on CPUs import gyre_verl.testing.cpu.",
        ) from error
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"verl computes on {name} here; under Gyre it does on cuda alone.")
    return device_of(FsdpSettings(device=name))


def dtype_of(own: VerlSettings, device: torch.device) -> torch.dtype:
    """The dtype that the model computes in."""
    name = own.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    found: torch.dtype = getattr(torch, name)
    return found


def make_worker(
    context: WorkloadContext,
    settings: WorkloadSettings,
    optim: OptimSettings,
    own: VerlSettings,
    *,
    config: Path,
    weights: Path,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """The worker with its model, that of the folder `config`, with the weights of the folder `weights`. A call of all
    ranks, which are in a process group already. Raises ConfigError where verl cannot load it."""
    # verl reads its place from the environment, and uses nothing of it but the rank where there is a group.
    os.environ |= {
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.world_size),
        "MASTER_ADDR": context.master_addr or "127.0.0.1",
        "MASTER_PORT": str(context.master_port or 0),
    }
    try:
        worker = TinkerTrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=str(weights),
                    hf_config_path=str(config),
                    load_tokenizer=False,
                    use_remove_padding=own.use_remove_padding,
                    enable_gradient_checkpointing=own.enable_gradient_checkpointing,
                    override_config={"attn_implementation": _attention(own, device)},
                ),
                engine_config=_engine_config(own, dtype, settings.seed),
                optimizer_config=FSDPOptimizerConfig(
                    lr=optim.rate,
                    betas=(optim.beta1, optim.beta2),
                    weight_decay=optim.weight_decay,
                    clip_grad=optim.clip_norm,
                    override_optimizer_config={"eps": optim.eps},
                ),
                checkpoint_config=CheckpointConfig(),
            )
        )
        # What verl draws at `reset` must be the same in each incarnation.
        seed_everything(settings.seed)
        worker.reset()
    except _REFUSALS as error:
        problem = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"verl cannot load the model of {config}: {problem}",
            hint="Give config.model_path a causal language model that this version of transformers has.",
        ) from error
    return worker


def _engine_config(own: VerlSettings, dtype: torch.dtype, seed: int) -> FSDPEngineConfig:
    return FSDPEngineConfig(
        strategy=own.strategy,
        model_dtype="fp32",
        mixed_precision={"param_dtype": _VERLS_DTYPE[dtype], "reduce_dtype": "fp32"},
        use_dynamic_bsz=False,
        use_torch_compile=False,  # it compiles the entropy alone, at each new shape; Gyre's passes have many
        full_determinism=own.full_determinism,
        seed=seed & 0xFFFFFFFF,  # NumPy takes no more
    )


def _attention(own: VerlSettings, device: torch.device) -> str:
    if own.attn_implementation != "auto":
        return own.attn_implementation
    has_flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if has_flash else "sdpa"
