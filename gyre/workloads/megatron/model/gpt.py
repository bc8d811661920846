"""The decoder as Megatron's GPTModel, with the parts that Megatron only has in Transformer Engine.

Invariants:
- *packed is padded is alone*: a sequence's log-probs do not depend on what it is packed with, nor on whether it shares
  the tokens that it begins with;
- *positions by token*: rotary angles are looked up by each token's own position, so a packed batch costs no more
  kernels than one long sequence.

Right-padded rows and packed sequences both go in without an attention mask. This module must not know about ranks, and
must not be imported before `seam.open_seam`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from gyre.models.architecture import Architecture
from gyre.workloads.learner.packing import on_device
from gyre.workloads.learner.path_keys import PathKeys
from gyre.workloads.megatron.model.config import padded_vocab
from gyre.workloads.megatron.model.rotary import Rotary

try:  # torch 2.10 and newer, and a kernel for GPUs alone
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

_VARLEN_OPTIONS: dict[str, Any] = {}
_TAKES_FEWER_KEYS = False
"""Whether the kernel takes fewer heads of keys than of queries."""
if varlen_attn is not None:  # how to say "causal" has changed between versions
    _KNOWN = inspect.signature(varlen_attn).parameters
    _VARLEN_OPTIONS = {"is_causal": True} if "is_causal" in _KNOWN else {"window_size": (-1, 0)}
    _TAKES_FEWER_KEYS = "enable_gqa" in _KNOWN


@dataclass
class SegmentParams(PackedSeqParams):  # type: ignore[misc]
    """Nodes side by side in one row of tokens: `lengths` on the host, their bounds int32 `[n + 1]` on the device, and
    the keys of their `paths`, None where each attends to itself.

    Its `qkv_format` is not Megatron's `thd`, for which Megatron would split and rotate sequence by sequence.
    """

    lengths: tuple[int, ...] = ()
    bounds: Tensor | None = None
    paths: PathKeys | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, parents: Sequence[int] = ()) -> SegmentParams:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        paths = PathKeys.of(lengths, parents, device)
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths if paths is None else paths.lengths),
            lengths=tuple(lengths),
            bounds=on_device(ends, device),
            paths=paths,
        )


class Norm(nn.RMSNorm):
    """RMSNorm whose weight says that its gradient is partial where activations are sharded by sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ValueHead(nn.Module):
    """In the place of the output layer: one float32 number a token. Every tensor-parallel rank has all of it, and gives
    the same values."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        self.sequence_parallel: bool = config.sequence_parallel
        for parameter in self.parameters():  # as `Norm`'s
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """`[tokens, rows, 1]` of hidden states `[tokens, rows, hidden]`, which are this rank's part of the tokens where
        they are sharded by sequence."""
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            # Every rank goes on with all of them, so what comes back to it is whole, and not a part of a sum.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def residual_adder(training: bool, fused: bool) -> Callable[..., Tensor]:
    """What Megatron asks for to add a part's output, and its bias, to the residual. Its own drops some of the output,
    which nobody wants here, and is compiled for it."""

    def add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropped: float) -> Tensor:
        assert not dropped
        states, bias = output
        return residual + (states if bias is None else states + bias)

    return add


class CausalAttention(nn.Module):
    """Megatron's slot for core attention, filled with torch's own kernels: dense, or by `SegmentParams`."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: SegmentParams | None = None,
    ) -> Tensor:
        """`[tokens, rows, heads * d]` of queries `[tokens, rows, heads, d]`; keys and values have `kv` heads."""
        tokens, rows = query.shape[:2]
        if packed_seq_params is None:
            mixed = _attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value))).permute(2, 0, 1, 3)
        else:
            q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
            mixed = _attend_by_segment(q, k, v, packed_seq_params)
        return mixed.reshape(tokens, rows, -1)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last query sees the last key."""
    gqa, before = q.shape[1] != k.shape[1], k.shape[2] - q.shape[2]
    if not before:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=gqa)


def _attend_by_segment(q: Tensor, k: Tensor, v: Tensor, segments: SegmentParams) -> Tensor:
    """`[tokens, heads, d]` of queries `[tokens, heads, d]`, keys and values `[tokens, kv, d]`."""
    if varlen_attn is not None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return _attend_by_bounds(q, k, v, segments)
    paths = segments.paths
    if paths is not None:
        k, v = paths.gather(k), paths.gather(v)
    keys = segments.lengths if paths is None else paths.lengths
    parts = zip(
        *(
            torch.split(x.transpose(0, 1)[None], list(lengths), dim=2)
            for x, lengths in ((q, segments.lengths), (k, keys), (v, keys))
        ),
        strict=True,
    )
    return torch.cat([_attend(*part)[0].transpose(0, 1) for part in parts])


def _attend_by_bounds(q: Tensor, k: Tensor, v: Tensor, segments: SegmentParams) -> Tensor:
    paths = segments.paths
    bounds = segments.bounds if paths is None else paths.bounds
    options, repeats = _VARLEN_OPTIONS, q.shape[1] // k.shape[1]
    if repeats > 1 and _TAKES_FEWER_KEYS:
        options, repeats = {**options, "enable_gqa": True}, 1

    def attention(keys: Tensor, values: Tensor) -> Tensor:
        assert segments.bounds is not None
        longest, longest_path = segments.max_seqlen_q, segments.max_seqlen_kv
        mixed = varlen_attn(q, keys, values, segments.bounds, bounds, longest, longest_path, **options)
        assert isinstance(mixed, Tensor)
        return mixed

    if paths is not None:
        return paths.attend(attention, k, v, repeats=repeats)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    return attention(k, v)


def build_model(
    architecture: Architecture,
    config: TransformerConfig,
    *,
    first_stage: bool,
    last_stage: bool,
    device: torch.device,
    values: bool = False,
) -> GPTModel:
    """This rank's part of the decoder, on `device`, its weights not yet set. With `values` its last stage has a value
    head instead of an output layer; its embedding must then not be tied."""
    assert not (values and architecture.tied), "a value head shares nothing with the embedding"
    layer = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    ).submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    layer.self_attn_bda = layer.mlp_bda = residual_adder
    attention = layer.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    with torch.device(device):
        model = GPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=_repeated(layer, config), layer_norm=Norm),
            vocab_size=padded_vocab(architecture.vocab, config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_positions,
            pre_process=first_stage,
            post_process=last_stage,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope",
            parallel_output=True,
        )
    if values and last_stage:
        model.output_layer = ValueHead(config).to(device)
    model.rotary_pos_emb = Rotary(architecture.rope.frequencies(architecture.head_dim), device)
    _mark_shards(model)
    return model.to(device=device, dtype=config.params_dtype)


def _mark_shards(model: GPTModel) -> None:
    """Say of each weight along which dimension it is split. Megatron does so when it draws a weight, which it does not
    here; an unmarked one would count as a copy of the first rank's, and be left out of the gradient's norm."""
    for module in model.modules():
        for kind, dimension in (
            (ColumnParallelLinear, 0),
            (VocabParallelEmbedding, 0),
            (RowParallelLinear, 1),
        ):
            if isinstance(module, kind) and module.weight is not None:
                set_tensor_model_parallel_attributes(module.weight, True, dimension, 1)


def _repeated(layer: Any, config: TransformerConfig) -> list[ModuleSpec]:
    count = config.num_layers // config.pipeline_model_parallel_size
    return [ModuleSpec(module=TransformerLayer, submodules=layer)] * count
