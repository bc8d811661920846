"""From a Hugging Face `config.json` to Megatron's configuration: Qwen2, Qwen3 and Llama.

Invariant *nothing is ignored*: what would change the function and is not computed here is refused, by the same reading
of the file as the embedded engine's (`gyre.models.architecture`).

This module must not know about ranks beyond their numbers, and must not be imported before `seam.open_seam`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from gyre.config.sections import MegatronSettings
from gyre.errors import ConfigError
from gyre.models.architecture import Architecture, architecture_of
from gyre.workloads.megatron.kind import layout_problems, unfit
from gyre.workloads.megatron.model.rotary import use_in_megatron

_VOCAB_MULTIPLE = 8


def architecture_from(config: dict[str, Any], where: str) -> Architecture:
    """The decoder that `config`, the content of a `config.json`, describes. Raises ConfigError."""
    found = architecture_of(config, where)
    if problem := unfit(found):
        raise ConfigError(f"{where}: {problem}.", hint="Plain torch trains it: backend: torch.")
    return found


def padded_vocab(vocab: int, tensor_parallel: int) -> int:
    """The rows of the embedding: a multiple of 8, whatever the tensor-parallel size if it divides 8, so that a
    checkpoint of one layout has the shapes of another's."""
    multiple = math.lcm(_VOCAB_MULTIPLE, tensor_parallel)
    return -(-vocab // multiple) * multiple


def transformer_config(
    architecture: Architecture, settings: MegatronSettings, *, device: torch.device, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's configuration of the decoder for this layout. Raises ConfigError where the layout does not fit it."""
    tp, pp = settings.tensor_parallel, settings.pipeline_parallel
    for problem in layout_problems(architecture, tensor_parallel=tp, pipeline_parallel=pp):
        raise ConfigError(problem)
    gpu = device.type == "cuda"
    use_in_megatron()
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        ffn_hidden_size=architecture.mlp,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        add_qkv_bias=architecture.qkv_bias,
        add_bias_linear=architecture.mlp_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=settings.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Micro-batches have as many tokens as came; Megatron then asks for this dispatcher, though nothing is routed.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_sync=False,
        # Weights are loaded, never drawn by Megatron, whose draws depend on the layout.
        use_cpu_initialization=not gpu,
        perform_initialization=False,
        # A step's loss is a sum, and is divided once all its micro-batches are in.
        calculate_per_token_loss=True,
        # These are Gyre's own.
        bias_activation_fusion=gpu,
        apply_rope_fusion=True,
        # These need Transformer Engine or Apex.
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def recompute_layers(config: TransformerConfig, *, on: bool) -> None:
    """Have Megatron compute each layer's activations again in the backward pass, or keep them, from the next pass on:
    it reads its configuration in each."""
    config.recompute_granularity = "full" if on else None
    config.recompute_method = "uniform" if on else None
    config.recompute_num_layers = 1 if on else None
