"""A model's configuration made small: the same kinds of layers, a few numbers of each.

A model of a small configuration computes by the same code as the large one, in milliseconds. What begins after a
number of tokens (a window, a chunk, a sparse choice, a scaling) begins in the small one after a few.

Invariants:
- *the same kinds*: of each kind of layer that the configuration names there is one, in their order, and what a layer
  may do otherwise (caps, biases, scalings, shared keys) stays as it is;
- *everything begins*: each number of tokens is far below `LENGTH`, or the copy says which is not.

This module must not import torch or transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

VOCAB, LENGTH = 96, 48
"""Tokens of a small model's vocabulary; and a length beyond each of its numbers of tokens."""

_HIDDEN, _HEADS, _HEAD_DIM = 32, 4, 8
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "decoder_layers",
    "num_decoder_layers",
)
"""Names of the number of layers, of which the first one that is there holds."""

_PATTERNS = ("block_types", "layers_block_type")
"""Names of kinds of layers that are repeated until there are enough."""
_INDEXES = re.compile(
    r".*layer_ids|.*layer_indices|.*_idxs|mlp_only_layers|moe_layers|.*cross_attention_layers"
)
"""Names of lists of layers, by their numbers."""

_SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size|vocab_size_per_layer_input|decoder_vocab_size", VOCAB),
    (
        r"hidden_size|n_embd|d_model|embedding_dim|emb_dim|embedding_size|lru_width|attention_hidden_size",
        _HIDDEN,
    ),
    (r"word_embed_proj_dim|input_embedding_size|output_embedding_size|ple_embed_dim", _HIDDEN),
    (
        r"num_attention_heads|n_head|n_heads|attention_heads|num_heads|.*_attention_heads|linear_num_heads",
        _HEADS,
    ),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads|linear_num_value_heads|num_query_groups", _HEADS),
    (r"mamba_d_head|mamba_headdim|mamba_head_dim", 2 * _HIDDEN // _HEADS),
    (r"mamba_d_ssm|d_inner", 2 * _HIDDEN),
    (r"index_n_heads|index_head_dim", 16),
    (r"qk_head_dim", 2 * _HEAD_DIM),
    (r".*head_dim|.*head_dim_.*|kv_channels|d_head|dim_head|attention_head_size|rotary_dim", _HEAD_DIM),
)
"""What sizes that depend on each other are in the copy: the first row whose names a number has holds."""
_OWN_VOCABULARIES = re.compile(r"type_vocab_size|.*_type_vocab_size|ngram_vocab_size_base")

_LARGEST: tuple[tuple[str, int], ...] = (
    (
        r"n_ctx|n_positions|max_position_embeddings|max_seq_len|model_max_length|max_target_positions|context_length",
        512,
    ),
    (r"original_max_position_embeddings", LENGTH),
    (r"floor_scale|log_scaling_n_floor", 10),
    (r"local_attention", 16),
    (r"index_topk_blocks", 2),
    (r"index_topk|index_block_size", 6),
    (r".*window_size|.*window_len|sliding_window.*|.*chunk_size|.*chunk_length|rel_extent|.*block_size", 8),
    (r"make_ngram_vocab_size_divisible_by|split_ngram_parts", 4),
    (r"block_multiple_of|ffn_round_up_to_multiple_of", 8),
    (r".*lora_rank|time_step_rank|mamba_dt_rank|.*_rank|hc_lowrank", 16),
    (r".*state_size|mamba_d_state|hidden_size_per_layer_input|d_rel|router_hidden_size", 8),
    (r".*moe.*intermediate_size|.*shared.*intermediate_size|expert_ffn_hidden_size", 16),
    (
        r".*intermediate_size.*|.*ffn_dim|.*ffn_hidden_size|dim_ff|dff|feed_forward_size|ngram_vocab_size_base",
        48,
    ),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|moe_top_k|n_group|num_expert_group", 2),
    (r"n_groups|mamba_n_groups|mamba_ngroups|n_shared_experts|num_shared_experts|o_groups", 2),
    (r"moe_num_shared_experts|H_cycles|L_cycles|num_mem_blocks|hc_mult|hc_count|heads_per_ngram", 2),
    (r"topk_group|zero_expert_num|first_k_dense_replace|moe_layer_start_index|num_dense_layers", 1),
    (r".*(_period|_interval|_pattern|_every_n_layers|_sparse_step|_layer_step|_group_size|_per_stack)", 2),
    (r"n_layers_per_attn_res_block", 2),
    (r"attn_layer_offset|expert_layer_offset|max_window_layers", 1),
    (r"num_random_blocks", 1),
    (r"rescale_every", 0),
)
"""The largest that other numbers are in the copy, in the same way."""

_EXACTLY, _AT_MOST = (
    tuple((re.compile(f"_?({names})"), number) for names, number in rows) for rows in (_SIZES, _LARGEST)
)
_KEPT = re.compile(
    r".*_token_id|.*conv.*|d_conv|mamba_d_conv|expand|mamba_expand|expansion_ratio|.*_multiplier|seed|.*_scalar|"
    r".*_scale|scale_.*|dim_model_base|.*_iters|.*_cycles|number_of_.*|ngram.*|altup_num_inputs|.*version|"
    r"query_pre_attn_scalar|alibi_bias_max|intermediate_multiple_size|cca_time.|num_buckets|start_n_top|end_n_top"
)
"""Numbers that are no sizes and no lengths, or are small ones."""

_FEW = 12
"""What a number gets that no row knows: it may be one of tokens."""


def small_configs(told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The content of a `config.json`, with the family's defaults in it, made small: several, of which the first that
    transformers builds is to be taken. Those after the first change what a family may want otherwise."""
    first = _small(dict(told))
    yield first
    same = {**first, "num_key_value_heads": first.get("num_attention_heads")}
    without = [{key: value for key, value in one.items() if key != "head_dim"} for one in (first, same)]
    if "num_key_value_heads" in first:
        yield same
    yield _small(dict(told), twice=True)  # layers that share what is theirs want another one of their kind
    if "head_dim" in first:
        yield {**first, "head_dim": 2 * _HIDDEN // _HEADS}  # of a state's heads, which are of twice the width
        yield from without


def _small(config: dict[str, Any], *, twice: bool = False) -> dict[str, Any]:
    config = _of_layers(config, twice=twice)
    found = {key: _value(key, value) for key, value in config.items()}
    for keys, heads in (
        ("num_key_value_heads", "num_attention_heads"),
        ("swa_num_key_value_heads", "swa_num_attention_heads"),
        ("num_kv_heads", "num_attention_heads"),
        ("kv_n_heads", "n_heads"),
        ("linear_num_key_heads", "linear_num_value_heads"),
    ):
        if isinstance(config.get(keys), int):
            found[keys] = _key_heads(config[keys], config.get(heads))
    ratio = _ratio(config, "attention_hidden_size", "hidden_size")
    if ratio > 1:  # layers that see two vectors of each token
        found |= {"attention_hidden_size": ratio * _HIDDEN, "attention_head_dim": ratio * _HIDDEN // _HEADS}
    for key, value in config.items():
        if key.endswith("token_id") and isinstance(value, int | list):
            found[key] = {"bos": 1, "eos": 2}.get(key.removesuffix("_token_id"), 0)
    return found


def _ratio(config: Mapping[str, Any], key: str, of: str) -> int:
    value, whole = config.get(key), config.get(of)
    return value // whole if isinstance(value, int) and isinstance(whole, int) else 0


def _key_heads(keys: int, heads: Any) -> int:
    return _HEADS if keys == heads else 1 if keys == 1 else 2


def _value(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _value(name if isinstance(name, str) else "", one) for name, one in value.items()}
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        return [_number(key, one) for one in value]
    if type(value) is int:
        return _number(key, value)
    return value


def _number(key: str, value: int) -> int:
    if key in _LAYERS:
        return value
    if not _OWN_VOCABULARIES.fullmatch(key):
        for names, size in _EXACTLY:
            if names.fullmatch(key):
                return size
    for names, largest in _AT_MOST:
        if names.fullmatch(key):
            return min(value, largest)
    return value if value <= _FEW or _KEPT.fullmatch(key) else _FEW


def _of_layers(config: dict[str, Any], *, twice: bool) -> dict[str, Any]:
    """The configuration with one layer of each kind, or two, and two at least."""
    key = next((one for one in _LAYERS if isinstance(config.get(one), int)), None)
    if key is None:
        return config
    count = int(config[key])
    for name in _PATTERNS:
        if config.get(name):
            config = {**config, name: [config[name][layer % len(config[name])] for layer in range(count)]}
    lists = {name: value for name, value in config.items() if isinstance(value, list) and len(value) == count}
    indexes = [
        name for name, one in config.items() if isinstance(one, list) and one and _INDEXES.fullmatch(name)
    ]
    own = config.get("per_layer_config")
    width = len(next(iter(own))) if own else 0

    def kind(layer: int) -> str:
        told = [one[layer] for name, one in sorted(lists.items()) if _tells_kinds(one)]
        told += [layer in config[name] for name in indexes]
        return str((told, own.get(str(layer).zfill(width)) if own else None))

    kept = list({kind(layer): layer for layer in reversed(range(count))}.values())[::-1]
    kept = sorted(kept[:_FEW])
    shared = config.get("num_kv_shared_layers") or 0
    kept = kept * 2 if shared or twice else kept
    if len(kept) == 1:
        kept = [kept[0], *(one for one in range(count) if one != kept[0])][:2]
    found = {**config, key: len(kept)}
    for name in _LAYERS:
        if config.get(name) == count:
            found[name] = len(kept)
    for name, value in lists.items():
        found[name] = [value[layer] for layer in kept]
    for name in indexes:
        found[name] = [new for new, old in enumerate(kept) if old in config[name]]
    if own:
        found["per_layer_config"] = {
            str(new).zfill(width): own[str(old).zfill(width)]
            for new, old in enumerate(kept)
            if str(old).zfill(width) in own
        }
    if shared:
        found["num_kv_shared_layers"] = len(kept) // 2
    return found


def _tells_kinds(values: Sequence[Any]) -> bool:
    """Whether a list by layers says of which kind each is, rather than a number of its own."""
    return len({str(one) for one in values}) <= _FEW // 2
