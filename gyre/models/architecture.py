"""A Hugging Face `config.json` as the shape of a decoder: Qwen2, Qwen3 and Llama.

Invariant *nothing is ignored*: a field that would change the function (another activation, a sliding window, a rope
type that is not known here) is refused, never read as if it were not there.

This module must not import torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.models.errors import ModelFolderError

_FAMILIES = ("qwen2", "qwen3", "llama")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: `theta`, and Llama 3's or linear scaling of the frequencies where `kind` says so."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def frequencies(self, head_dim: int) -> list[float]:
        """Radians per position, one for each of the `head_dim / 2` pairs."""
        plain = [self.theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in plain]
        if self.kind == "llama3":
            return [self._llama3(frequency) for frequency in plain]
        return plain

    def _llama3(self, frequency: float) -> float:
        turns = self.original_positions * frequency / (2 * math.pi)
        if turns < self.low_freq_factor:
            return frequency / self.factor
        if turns > self.high_freq_factor:
            return frequency
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True, slots=True)
class Architecture:
    """The decoder's shape. `heads` is a multiple of `kv_heads`, `head_dim` is even."""

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    norm_eps: float
    rope: Rope
    max_positions: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def qwen3(
        cls,
        *,
        vocab: int,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        mlp: int,
        max_positions: int,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-6,
        tied: bool = True,
    ) -> Architecture:
        """A Qwen3 whose heads share the hidden size."""
        return cls(
            family="qwen3",
            vocab=vocab,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden // heads,
            mlp=mlp,
            norm_eps=norm_eps,
            rope=Rope(rope_theta),
            max_positions=max_positions,
            tied=tied,
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            qk_norm=True,
        )

    @property
    def group(self) -> int:
        """Query heads to a key-value head."""
        return self.heads // self.kv_heads


def read_config(folder: Path) -> dict[str, Any]:
    """The content of the folder's `config.json`. Raises ModelFolderError."""
    return _read_json(folder / "config.json")


def read_architecture(folder: Path) -> Architecture:
    """The shape of the folder's model. Raises ModelFolderError, which says what is wrong."""
    beside = folder / "generation_config.json"
    generation = _read_json(beside) if beside.exists() else {}
    return architecture_of(read_config(folder), str(folder / "config.json"), generation)


def architecture_of(
    config: dict[str, Any], where: str, generation: dict[str, Any] | None = None
) -> Architecture:
    """The shape that the content of a `config.json` describes, and of a `generation_config.json` beside it. `where`
    names it in errors. Raises ModelFolderError."""
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ModelFolderError(
            f"{where}: model_type {family!r} is not supported.",
            hint=f"The embedded engine and the trainers know {', '.join(_FAMILIES)}; SGLang serves others.",
        )

    def number(key: str) -> int:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelFolderError(f"{where}: {key} must be a positive integer, not {value!r}.")
        return value

    _refuse_unsupported(config, where)
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    head_dim = number("head_dim") if config.get("head_dim") is not None else hidden // heads
    if heads % kv_heads or head_dim % 2:
        raise ModelFolderError(
            f"{where}: {heads} heads must be a multiple of {kv_heads} key-value heads, and head_dim "
            f"{head_dim} even."
        )
    attention_bias = bool(config.get("attention_bias", False))
    return Architecture(
        family=family,
        vocab=number("vocab_size"),
        hidden=hidden,
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=number("intermediate_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_read_rope(config, where),
        max_positions=number("max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        eos_token_ids=_token_ids(config.get("eos_token_id"))
        | _token_ids((generation or {}).get("eos_token_id")),
    )


def config_of(architecture: Architecture, *, eos_id: int) -> dict[str, Any]:
    """The content of `config.json` of a model that `Architecture.qwen3` describes."""
    a = architecture
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": a.vocab,
        "hidden_size": a.hidden,
        "intermediate_size": a.mlp,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": a.max_positions,
        "tie_word_embeddings": a.tied,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": a.layers,
        "initializer_range": 0.02,
        "eos_token_id": eos_id,
        "torch_dtype": "float32",
    }


def _refuse_unsupported(config: dict[str, Any], where: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelFolderError(
            f"{where}: hidden_act {config['hidden_act']!r} is not supported; only silu is."
        )
    if config.get("use_sliding_window"):
        raise ModelFolderError(f"{where}: use_sliding_window is not supported; SGLang serves it.")
    if config.get("quantization_config"):
        raise ModelFolderError(f"{where}: quantized weights are not supported; SGLang serves them.")


def _read_rope(config: dict[str, Any], where: str) -> Rope:
    """Rotary positions of `rope_parameters` (transformers 5), or of `rope_theta` with `rope_scaling` (before it)."""
    parameters: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(parameters.get("full_attention"), dict):
        parameters = parameters["full_attention"]
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelFolderError(f"{where}: a partial_rotary_factor other than 1 is not supported.")
    try:
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            return Rope(theta, kind, factor=float(parameters["factor"]))
        if kind == "llama3":
            return Rope(
                theta,
                kind,
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_positions=int(parameters["original_max_position_embeddings"]),
            )
    except KeyError as missing:
        raise ModelFolderError(f"{where}: rope type {kind!r} needs {missing}.") from None
    raise ModelFolderError(
        f"{where}: rope type {kind!r} is not supported.",
        hint="default, linear and llama3 are; SGLang serves others.",
    )


def _token_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset((int(value),))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ModelFolderError(
            f"{path} cannot be read: {error.strerror or error}.",
            hint="Name a folder in Hugging Face's layout, with config.json.",
        ) from None
    except ValueError as error:
        raise ModelFolderError(f"{path} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} must hold a JSON object.")
    return value
