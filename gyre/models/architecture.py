"""A Hugging Face `config.json` as the shape of a decoder: Qwen2, Qwen3 and Llama.

Invariant *nothing is ignored*: a field that would change the function (another activation, a sliding window, a rope
type that is not known here) is refused, never read as if it were not there. Of two keys for one thing neither is
passed over: they agree, or the file is refused. What is absent has the default of transformers.

This module must not import torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.models.config_keys import AS_SAVED, ELSEWHERE, flag, refuse_what_changes
from gyre.models.errors import ModelFolderError, NotComputed

FAMILIES = ("qwen2", "qwen3", "llama")
"""The values of `model_type` that are known here."""

_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The kinds of rotary positions that are computed, and what each needs."""
_ROPE_COMMON = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}

_QWENS_KV_HEADS, _QWEN3S_HEAD_DIM = 32, 128
"""What transformers takes where a Qwen's file does not have the key."""


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
    family = _family_of(config, where)

    def number(key: str) -> int:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelFolderError(
                f"{where}: {key} must be a positive integer, not {value!r}.", hint=AS_SAVED
            )
        return value

    refuse_what_changes(config, where, family)
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    if family != "llama" and "num_key_value_heads" not in config:
        kv_heads = _QWENS_KV_HEADS
    head_dim = number("head_dim") if config.get("head_dim") is not None else hidden // heads
    if family == "qwen3" and "head_dim" not in config:
        head_dim = _QWEN3S_HEAD_DIM
    if heads % kv_heads or head_dim % 2:
        raise ModelFolderError(
            f"{where}: {heads} heads must be a multiple of {kv_heads} key-value heads, and head_dim "
            f"{head_dim} even.",
            hint=AS_SAVED,
        )
    vocab, attention_bias = number("vocab_size"), flag(config, "attention_bias", where)
    return Architecture(
        family=family,
        vocab=vocab,
        hidden=hidden,
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=number("intermediate_size"),
        norm_eps=_number(config, "rms_norm_eps", where, 1e-6),
        rope=_read_rope(config, where),
        max_positions=number("max_position_embeddings"),
        tied=flag(config, "tie_word_embeddings", where),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and flag(config, "mlp_bias", where),
        qk_norm=family == "qwen3",
        eos_token_ids=_token_ids(config, where, vocab)
        | _token_ids(generation or {}, "generation_config.json", vocab),
    )


def _family_of(config: dict[str, Any], where: str) -> str:
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ModelFolderError(
            f"{where}: model_type must be a text, not {family!r}: it says which model this is.", hint=AS_SAVED
        )
    if family not in FAMILIES:
        raise NotComputed(
            f"{where}: model_type {family!r} is not supported.",
            hint=f"Torch and Megatron know {', '.join(FAMILIES)} without experts; FSDP2 trains others, and both "
            "engines serve them. `gyre models` has the table.",
        )
    return family


def read_eos_token_ids(folder: Path, config: dict[str, Any], vocab: int) -> frozenset[int]:
    """The tokens that end a sample, by `generation_config.json` and by the content of `config.json`. Raises
    ModelFolderError for one that is not in the vocabulary."""
    beside = folder / "generation_config.json"
    generation = _read_json(beside) if beside.exists() else {}
    return _token_ids(config, str(folder / "config.json"), vocab) | _token_ids(
        generation, "generation_config.json", vocab
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


def _read_rope(config: dict[str, Any], where: str) -> Rope:
    """Rotary positions of `rope_parameters` (transformers 5), or of `rope_theta` with `rope_scaling` (before it).
    Raises ModelFolderError where both are there and differ."""
    found = {
        key: _rope_in(config[key], config, f"{where}: {key}")
        for key in ("rope_parameters", "rope_scaling")
        if config.get(key)
    }
    if len(set(found.values())) > 1:
        raise ModelFolderError(
            f"{where}: rope_parameters and rope_scaling say different things.", hint="Keep one of them."
        )
    return next(iter(found.values()), None) or _rope_in({}, config, where)


def _rope_given(parameters: Any, config: dict[str, Any], where: str) -> dict[str, Any]:
    """What is given of the rotary positions, in `parameters` and beside them. Raises ModelFolderError where the two
    differ."""
    if isinstance(parameters, dict) and isinstance(parameters.get("full_attention"), dict):
        parameters = parameters["full_attention"]  # other layers are refused
    if not isinstance(parameters, dict):
        raise ModelFolderError(f"{where} must be an object, not {parameters!r}.", hint=AS_SAVED)
    given = {key: value for key, value in parameters.items() if value is not None}
    for outside, inside in (
        ("rope_theta", "rope_theta"),
        ("partial_rotary_factor", "partial_rotary_factor"),
        ("original_max_position_embeddings", "original_max_position_embeddings"),
    ):
        value = config.get(outside)
        if value is not None and given.setdefault(inside, value) != value:
            raise ModelFolderError(
                f"{where}: {inside} is {given[inside]!r}, and {outside} beside it is {value!r}.",
                hint="Keep one of them.",
            )
    return given


def _rope_in(parameters: Any, config: dict[str, Any], where: str) -> Rope:
    given = _rope_given(parameters, config, where)
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("type", kind) != kind:
        raise ModelFolderError(
            f"{where}: rope_type is {kind!r} and type is {given['type']!r}.", hint="Keep one of them."
        )
    if kind not in _ROPE_KEYS:
        raise NotComputed(
            f"{where}: rope type {kind!r} is not supported.",
            hint=f"{', '.join(_ROPE_KEYS)} are; {ELSEWHERE}",
        )
    if _number(given, "partial_rotary_factor", where, 1.0) != 1.0:
        raise NotComputed(f"{where}: a partial_rotary_factor other than 1 is not supported.", hint=ELSEWHERE)
    unread = given.keys() - _ROPE_KEYS[kind] - _ROPE_COMMON
    if kind == "default" and given.get("factor") == 1:
        unread -= {"factor"}
    if unread:
        raise ModelFolderError(
            f"{where}: rope type {kind!r} does not use {sorted(unread)[0]}.", hint=AS_SAVED
        )
    missing = [key for key in _ROPE_KEYS[kind] if key not in given]
    if missing:
        raise ModelFolderError(f"{where}: rope type {kind!r} needs {missing[0]!r}.", hint=AS_SAVED)
    theta = _number(given, "rope_theta", where, 10000.0)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, factor=_number(given, "factor", where))
    return Rope(
        theta,
        kind,
        factor=_number(given, "factor", where),
        low_freq_factor=_number(given, "low_freq_factor", where),
        high_freq_factor=_number(given, "high_freq_factor", where),
        original_positions=int(_number(given, "original_max_position_embeddings", where)),
    )


def _number(values: dict[str, Any], key: str, where: str, default: float | None = None) -> float:
    """A positive number. Raises ModelFolderError for anything else."""
    value = default if values.get(key) is None else values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelFolderError(f"{where}: {key} must be a positive number, not {value!r}.", hint=AS_SAVED)
    return float(value)


def _token_ids(values: dict[str, Any], where: str, vocab: int) -> frozenset[int]:
    value = values.get("eos_token_id")
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in found):
        raise ModelFolderError(
            f"{where}: eos_token_id must be a token's number or a list of them, not {value!r}.",
            hint="Write the numbers of the tokens that end an answer.",
        )
    strange = [one for one in found if not 0 <= one < vocab]
    if strange:
        raise ModelFolderError(
            f"{where}: eos_token_id {strange[0]} is not in the vocabulary, which has {vocab} tokens.",
            hint="Write the numbers of the tokens that end an answer.",
        )
    return frozenset(found)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ModelFolderError(
            f"{path} cannot be read: {error.strerror or error}.",
            hint="Name a folder in Hugging Face's layout, with config.json.",
        ) from None
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is not JSON: {error}.", hint=AS_SAVED) from None
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} must hold a JSON object.", hint=AS_SAVED)
    return value


def vocabulary_of(model_path: Path | str) -> int | None:
    """The number of tokens of the model in this folder; None where its `config.json` does not say."""
    try:
        config = read_config(Path(model_path))
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
        return int(size)
    except (ModelFolderError, ValueError, KeyError, TypeError):
        return None
