"""A model of a given shape with random weights, in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def model_main(options: Row) -> None:
    """Write one version of the model, in Hugging Face's layout with Gyre's listing.

    It has no end token: samples end at the stop tokens of the task. `rare` tokens have an embedding of zero, tied, so
    that each comes with a probability of about 1 / 7.4 of the others' mean, whatever was before.
    """
    import torch
    from safetensors.torch import save_file

    from gyre.weights.version.model_folder import list_model_folder

    torch.set_num_threads(options["threads"])
    folder, s = Path(options["folder"]), options["shape"]
    hidden, inner, heads = s["hidden"], s["inner"], s["heads"] * s["head_dim"]
    kv = s["kv_heads"] * s["head_dim"]
    dtype = torch.bfloat16 if options["bf16"] else torch.float32

    def numbers(part: int) -> Callable[..., torch.Tensor]:
        """Random tensors of a part of the model, which has a generator of its own: parts are made beside each other."""
        generator = torch.Generator().manual_seed(1000 * options["seed"] + part)

        def random(*shape: int, std: float) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * std).to(dtype)

        return random

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    tensors = {
        "model.embed_tokens.weight": numbers(0)(s["vocab"], hidden, std=2.0 / hidden**0.5),
        "model.norm.weight": ones(hidden),
    }
    for token in options.get("rare", ()):
        tensors["model.embed_tokens.weight"][token] = 0.0

    def made(layer: int) -> Row:
        name, random = f"model.layers.{layer}", numbers(1 + layer)
        return {
            f"{name}.input_layernorm.weight": ones(hidden),
            f"{name}.post_attention_layernorm.weight": ones(hidden),
            f"{name}.self_attn.q_proj.weight": random(heads, hidden, std=hidden**-0.5),
            f"{name}.self_attn.k_proj.weight": random(kv, hidden, std=hidden**-0.5),
            f"{name}.self_attn.v_proj.weight": random(kv, hidden, std=hidden**-0.5),
            f"{name}.self_attn.o_proj.weight": random(hidden, heads, std=heads**-0.5),
            f"{name}.self_attn.q_norm.weight": ones(s["head_dim"]),
            f"{name}.self_attn.k_norm.weight": ones(s["head_dim"]),
            f"{name}.mlp.gate_proj.weight": random(inner, hidden, std=hidden**-0.5),
            f"{name}.mlp.up_proj.weight": random(inner, hidden, std=hidden**-0.5),
            f"{name}.mlp.down_proj.weight": random(hidden, inner, std=inner**-0.5),
        }

    with ThreadPoolExecutor(options["threads"]) as pool:  # torch draws without the interpreter's lock
        for layer in pool.map(made, range(s["layers"])):
            tensors |= layer
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": s["vocab"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv_heads"],
        "head_dim": s["head_dim"],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": s["layers"],
        "initializer_range": 0.02,
        "bos_token_id": s["vocab"] - 2,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    list_model_folder(folder, version=0)
