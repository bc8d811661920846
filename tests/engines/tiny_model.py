"""A folder with a Qwen3 of random weights: what an engine loads when only its behaviour is tested.

Written without transformers: `config.json` and `model.safetensors`, as the hub has them. The logits of these weights
are spread (a standard deviation of about 2), so that which token is likeliest does not hang on the last bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 512
CONTEXT = 4096
EOS = 511


def write_tiny_model(
    folder: Path,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    tied: bool = False,
) -> Path:
    """Write the model of this seed into `folder` and return it. Float32 by default: batches of another shape must
    not change what is drawn. `tied`: the output layer is the embedding."""
    intermediate = 2 * hidden
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
        "initializer_range": 0.02,
        "bos_token_id": EOS - 1,
        "eos_token_id": EOS,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))

    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    tensors = {
        "model.embed_tokens.weight": random(VOCAB, hidden, std=0.1 if tied else 1.0),
        "model.norm.weight": ones(hidden),
        "lm_head.weight": random(VOCAB, hidden, std=2.0 / hidden**0.5),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        inner = heads * head_dim
        tensors |= {
            f"{name}.input_layernorm.weight": ones(hidden),
            f"{name}.post_attention_layernorm.weight": ones(hidden),
            f"{name}.self_attn.q_proj.weight": random(inner, hidden, std=hidden**-0.5),
            f"{name}.self_attn.k_proj.weight": random(kv_heads * head_dim, hidden, std=hidden**-0.5),
            f"{name}.self_attn.v_proj.weight": random(kv_heads * head_dim, hidden, std=hidden**-0.5),
            f"{name}.self_attn.o_proj.weight": random(hidden, inner, std=inner**-0.5),
            f"{name}.self_attn.q_norm.weight": ones(head_dim),
            f"{name}.self_attn.k_norm.weight": ones(head_dim),
            f"{name}.mlp.gate_proj.weight": random(intermediate, hidden, std=hidden**-0.5),
            f"{name}.mlp.up_proj.weight": random(intermediate, hidden, std=hidden**-0.5),
            f"{name}.mlp.down_proj.weight": random(hidden, intermediate, std=intermediate**-0.5),
        }
    if tied:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
