"""Tiny random checkpoints of each family, a plain forward to compare with, and short ways to run a core."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from gyre.engines.embedded.core import EngineCore, Limits
from gyre.engines.embedded.decoder_model import DecoderModel
from gyre.engines.embedded.engine_requests import EngineRequest, RequestUpdate
from gyre.engines.embedded.token_sampling import Sampling
from gyre.models.architecture import read_architecture
from gyre.models.decoder import load_weights
from gyre.models.tensor_names import expected_shapes

_SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "pad_token_id": None,
    "bos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**_SHAPE, "model_type": "qwen3", "rope_theta": 10000.0},
    "qwen3-bias": {**_SHAPE, "model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True},
    # Seven heads to a key-value head: a group whose products MKL cuts.
    "qwen2": {
        **_SHAPE,
        "model_type": "qwen2",
        "hidden_size": 56,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "llama": {**_SHAPE, "model_type": "llama", "rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 4},
    "llama-bias": {
        **_SHAPE,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
    },
}


def write_checkpoint(
    folder: Path, config: dict[str, Any] | str = "qwen3", *, seed: int = 0, shards: int = 1
) -> Path:
    """A folder with a model of this configuration (or name in CONFIGS) and seed. Logits are spread by about 1."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = CONFIGS[config] if isinstance(config, str) else config
    (folder / "config.json").write_text(json.dumps(chosen))
    architecture = read_architecture(folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(architecture).items():
        random = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * random
        elif name.endswith("bias"):
            tensors[name] = 0.1 * random
        else:
            tensors[name] = random * shape[-1] ** -0.5
    if architecture.tied:
        tensors["model.embed_tokens.weight"] *= 2
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{shard + 1:05}-of-{shards:05}.safetensors" for shard in range(shards)]
    where = {tensor: names[index % shards] for index, tensor in enumerate(tensors)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor in tensors if where[tensor] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@dataclass
class Model:
    """What cores are made of, over one checkpoint."""

    path: Path
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.architecture = read_architecture(self.path)
        self.weights = load_weights(self.path, self.architecture, self.dtype)

    def core(
        self,
        max_running: int = 16,
        max_tokens: int = 100_000,
        context_length: int = 1024,
        prefill_tokens: int = 32,
    ) -> EngineCore:
        limits = Limits(max_running, max_tokens, context_length, prefill_tokens)
        return EngineCore(DecoderModel(self.architecture), self.weights, limits, weight_version="1")


@dataclass
class Asked:
    """A request with everything that was said about it."""

    request: EngineRequest
    updates: list[RequestUpdate]

    @property
    def tokens(self) -> list[int]:
        return [token for update in self.updates for token in update.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for update in self.updates for logprob in update.logprobs]

    @property
    def bits(self) -> list[tuple[int, str]]:
        return [(token, logprob.hex()) for token, logprob in zip(self.tokens, self.logprobs, strict=True)]


def ask(
    tokens: Sequence[int], new: int = 8, *, seed: int = 0, rid: str = "r", interval: int = 1, **sampling: Any
) -> Asked:
    updates: list[RequestUpdate] = []
    chosen = Sampling(**{"max_new_tokens": new, "ignore_eos": True, **sampling})
    return Asked(EngineRequest(rid, list(tokens), chosen, seed, interval, updates.append), updates)


def run(core: EngineCore, *asked: Asked, steps: int = 100_000) -> None:
    """Submit, and step until nothing is left or the steps are done."""
    core.submit(*(each.request for each in asked))
    go_on(core, steps)


def go_on(core: EngineCore, steps: int = 100_000) -> None:
    with torch.inference_mode():
        while core.can_step and steps > 0:
            core.step()
            steps -= 1
    for update in core.take_updates():
        update.request.deliver(update)


def plain_logits(path: Path, tokens: Sequence[int]) -> Tensor:
    """Float32 logits `[len(tokens), vocab]` by a whole forward, written down without any of the engine's code but its
    reading of `config.json`."""
    a = read_architecture(path)
    tensors = load_file(path / "model.safetensors")
    count, d = len(tokens), a.head_dim

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + a.norm_eps)
        return scaled * tensors[f"{name}.weight"] if f"{name}.weight" in tensors else x

    angles = torch.outer(torch.arange(count).float(), torch.tensor(a.rope.frequencies(d)))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    x = tensors["model.embed_tokens.weight"][torch.tensor(tokens)]
    for layer in range(a.layers):
        prefix = f"model.layers.{layer}."
        h = norm(x, prefix + "input_layernorm")
        q, k, v = (
            linear(h, f"{prefix}self_attn.{part}_proj").view(count, heads, d)
            for part, heads in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads))
        )
        q, k = (
            rotated(norm(q, prefix + "self_attn.q_norm")),
            rotated(norm(k, prefix + "self_attn.k_norm")),
        )
        k, v = k.repeat_interleave(a.group, dim=1), v.repeat_interleave(a.group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
        x = x + linear(mixed, prefix + "self_attn.o_proj")
        h = norm(x, prefix + "post_attention_layernorm")
        gated = F.silu(linear(h, prefix + "mlp.gate_proj")) * linear(h, prefix + "mlp.up_proj")
        x = x + linear(gated, prefix + "mlp.down_proj")
    x = norm(x, "model.norm")
    return F.linear(x, tensors["model.embed_tokens.weight" if a.tied else "lm_head.weight"])
