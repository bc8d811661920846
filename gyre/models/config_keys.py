"""The keys of a `config.json` beyond those that describe a decoder's shape: which are another name of a key, and which
would change the function.

transformers reads the keys of the family's own configuration, and leaves any other alone. Engines look for some of
the others too. So a key that would be read by one of them only is refused where it says something else.

Invariant *nothing is ignored*: see `gyre.models.architecture`. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.models.errors import ModelFolderError, NotComputed

AS_SAVED = "Copy or download config.json again, from where the weights are from."
ELSEWHERE = "FSDP2 trains others, and both engines serve them."
"""Hints: of a file that cannot be right, and of a model that Gyre's own decoder does not compute."""

_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_kv_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "head_dim": ("kv_channels", "attention_head_dim", "d_head"),
    "vocab_size": ("n_vocab", "padded_vocab_size"),
    "max_position_embeddings": (
        "n_positions",
        "n_ctx",
        "seq_length",
        "max_seq_len",
        "max_sequence_length",
        "model_max_length",
    ),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps"),
    "hidden_act": ("hidden_activation", "activation_function"),
    "rope_theta": ("rotary_emb_base", "rotary_base", "rope_base"),
    "tie_word_embeddings": ("tie_embeddings", "tied_embeddings", "tie_word_embedding"),
    "dtype": ("torch_dtype",),
}
"""Names that other families, and older files, have for a key."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "dim_model_base": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "layer_norm_type": ("rmsnorm", "rms_norm"),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "lm_head_bias": (False,),
    "lm_head_multiplier": (1,),
    "multi_query": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "norm_type": ("rmsnorm", "rms_norm"),
    "parallel_attn": (False,),
    "parallel_attention": (False,),
    "query_pre_attn_scalar": (),
    "qk_layernorm": (False,),
    "residual_multiplier": (1,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "scale_attention": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "use_alibi": (False,),
    "use_bidirectional_attention": (False,),
    "use_logn_attn": (False,),
    "use_dynamic_ntk": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (),
}
"""Keys that change the function, with the values that say that they do not. None is one of them for each."""

_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "moe_num_experts",
    "num_experts_per_tok",
)
_OTHER_INPUTS = ("vision_config", "audio_config", "visual", "vision_tower", "mm_vision_tower", "video_config")
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "auto")
_QUANTISED = ("quantization_config", "compression_config", "quantization")


def refuse_no_decoder(config: Mapping[str, Any], where: str) -> None:
    """Raises ModelFolderError, with the key, for quantized weights, and for a model that is more than a decoder of
    text. `where` names the file."""
    for key in _QUANTISED:
        if config.get(key):
            raise ModelFolderError(
                f"{where}: {key} is given: quantized weights are not supported.",
                hint="SGLang serves them; to train, take the folder of the model before it was quantized.",
            )
    for key in _OTHER_INPUTS:
        if config.get(key):
            raise ModelFolderError(
                f"{where}: {key} is given: models of images or sound are not supported.",
                hint="Save the language model alone, by its own save_pretrained.",
            )
    for key in _INNER:
        if config.get(key):
            raise ModelFolderError(
                f"{where}: {key} is given: the decoder is described inside of another model.",
                hint="Save the language model alone, by its own save_pretrained.",
            )


def refuse_what_changes(config: Mapping[str, Any], where: str, family: str) -> None:
    """Raises ModelFolderError, with the key, for what would change the function and is not computed here, and for two
    keys that contradict each other. `where` names the file."""
    refuse_no_decoder(config, where)
    for key in _EXPERTS:
        if config.get(key) not in (None, 0, 1):
            raise ModelFolderError(
                f"{where}: {key} is {config[key]!r}: mixtures of experts are not supported.",
                hint=f"A model_type of its own has them, such as qwen3_moe, and not {family}. {ELSEWHERE}",
            )
    if config.get("auto_map"):
        raise ModelFolderError(
            f"{where}: auto_map names code of the model's own, which is not run here.",
            hint="If the model computes what its model_type says, remove auto_map.",
        )
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            raise ModelFolderError(
                f"{where}: {key} is {value!r}, which is not supported.",
                hint=f"transformers does not read it in a {family}, and engines may: remove it if the model is one.",
            )
    refuse_no_dtype(config, where)
    _refuse_two_names(config, where)
    _refuse_activation(config, where)
    _refuse_windows(config, where, family)
    _refuse_other_class(config, where, family)


def refuse_no_dtype(config: Mapping[str, Any], where: str) -> None:
    """Raises ModelFolderError for a dtype that weights cannot have. What the tensors are, their files say."""
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if isinstance(value, str) and value.removeprefix("torch.") not in _DTYPES:
            raise ModelFolderError(
                f"{where}: {key} is {value!r}, and weights are read in {', '.join(_DTYPES[:-1])}.",
                hint="Write the dtype of its tensors.",
            )


def flag(config: Mapping[str, Any], key: str, where: str) -> bool:
    """A key that is true, false or absent. Raises ModelFolderError for anything else, such as the text "false"."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelFolderError(f"{where}: {key} must be true or false, not {value!r}.", hint=AS_SAVED)
    return bool(value)


def _refuse_two_names(config: Mapping[str, Any], where: str) -> None:
    for key, others in _OTHER_NAMES.items():
        for other in others:
            if config.get(other) is None or (key == "dtype" and config.get(key) is None):
                continue
            if config.get(key) is None:
                raise ModelFolderError(
                    f"{where}: {other} is given, and {key}, which is its name in this family, is not.",
                    hint=f"Write {key}.",
                )
            if config[other] != config[key]:
                raise ModelFolderError(
                    f"{where}: {key} is {config[key]!r} and {other} is {config[other]!r}, two names of one thing.",
                    hint=f"Keep {key} alone.",
                )


def _refuse_activation(config: Mapping[str, Any], where: str) -> None:
    if config.get("hidden_act") not in (None, "silu"):
        raise NotComputed(
            f"{where}: hidden_act {config['hidden_act']!r} is not supported; only silu is.", hint=ELSEWHERE
        )


def _refuse_windows(config: Mapping[str, Any], where: str, family: str) -> None:
    """Sliding windows, unless nothing slides: they are off, no layer has one, or none is shorter than the context."""
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise NotComputed(
            f"{where}: layer_types has other layers than full_attention, which are not supported.",
            hint=ELSEWHERE,
        )
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    given = flag(config, "use_sliding_window", where)
    if family == "llama" and window is not None:
        given = True
    if not given or ("sliding_window" in config and window is None):
        return
    if isinstance(window, int) and isinstance(longest, int) and window >= longest:
        return
    layers, first = config.get("num_hidden_layers"), config.get("max_window_layers")
    if family != "llama" and isinstance(first, int) and isinstance(layers, int) and first >= layers:
        return
    named = "use_sliding_window" if family != "llama" else "sliding_window"
    raise NotComputed(
        f"{where}: {named} is {config.get(named)!r}: sliding windows are not supported.",
        hint=ELSEWHERE,
    )


def _refuse_other_class(config: Mapping[str, Any], where: str, family: str) -> None:
    """transformers goes by `model_type`, engines by `architectures`."""
    classes = config.get("architectures")
    if classes is None:
        return
    if not isinstance(classes, list) or not all(isinstance(one, str) for one in classes):
        raise ModelFolderError(
            f"{where}: architectures must be a list of names, not {classes!r}.", hint=AS_SAVED
        )
    for one in classes:
        if not one.lower().startswith(f"{family}for") and not one.lower().startswith(f"{family}model"):
            raise ModelFolderError(
                f"{where}: architectures names {one}, and model_type is {family!r}, which is another model.",
                hint=AS_SAVED,
            )
