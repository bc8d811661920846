"""Megatron's parameters in Hugging Face's names, both ways, one tensor at a time.

| Megatron, on one rank | Hugging Face |
| --- | --- |
| `linear_qkv`: for each key-value head its queries' rows, its key's, its value's | `q_proj`, `k_proj`, `v_proj` |
| `linear_fc1`: this rank's gate rows, then its up rows | `gate_proj`, `up_proj` |
| embedding and output layer: this rank's rows of the padded vocabulary | `embed_tokens`, `lm_head` |
| a critic's output layer, whole on every rank of the last stage | `value_head` |

Invariants:
- *lossless*: what was imported is exported again bit by bit, in any layout, where the dtypes agree;
- *tied tensors once*: a tied model exports no `lm_head`, though the last stage of a pipeline holds a copy;
- *one tensor at a time*: never more than one whole tensor beside the model, and none in a wider dtype than the model.

This module must not know where tensors come from or go to, and must not be imported before `seam.open_seam`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from gyre.models.architecture import Architecture
from gyre.models.finite import is_finite, refuse_not_finite
from gyre.models.safetensors_folder import TensorSource
from gyre.models.tensor_names import EMBEDDING, HEAD, VALUE_BIAS, VALUE_WEIGHT, expected_shapes, value_shapes
from gyre.weights.version.manifest import WeightMismatch
from gyre.workloads.megatron.model.parallel import MegatronRanks, Reader


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One of Megatron's parameters: where it is, how it is split over tensor-parallel ranks, what it is made of.

    `kind`: `whole` is on every rank; `vocab` and `column` are split by rows, `row` by columns; `qkv` and `gate_up`
    are several tensors in one, split by rows.
    """

    name: str
    stage: int
    kind: str
    shape: tuple[int, ...]
    """The shape over all ranks together, the vocabulary padded."""
    parts: tuple[str, ...]


def import_weights(
    model: GPTModel,
    architecture: Architecture,
    ranks: MegatronRanks,
    source: TensorSource,
    *,
    values: bool = False,
) -> None:
    """Set this rank's parameters from whole tensors. Raises WeightMismatch for a tensor of another shape, and, on all
    ranks together, ModelFolderError for one that is not finite. A collective of all ranks.

    Every rank asks `source` for what it holds a piece of, and for nothing else. With `values` the model has a value
    head.
    """
    state = dict(model.named_parameters())
    broken: list[str] = []
    shapes = value_shapes(architecture) if values else expected_shapes(architecture)
    for parameter in _parameters(architecture, ranks.pipeline, model.vocab_size, values=values):
        if parameter.stage != _stage(ranks):
            continue
        target = state.pop(parameter.name)
        parts = [_checked(source, part, shapes) for part in parameter.parts]
        whole = _joined(parameter, architecture, ranks.tensor, parts)
        with torch.no_grad():
            target.copy_(_slice(parameter, whole, ranks))
        if not is_finite(target):
            broken.append(parameter.parts[0])
    if HEAD_PARAMETER in state and architecture.tied:  # the last stage's copy of the embedding
        copy = state.pop(HEAD_PARAMETER)
        shape = (model.vocab_size, architecture.hidden)
        parameter = _Parameter(HEAD_PARAMETER, _stage(ranks), "vocab", shape, (EMBEDDING,))
        parts = [_checked(source, EMBEDDING, shapes)]
        with torch.no_grad():
            copy.copy_(_slice(parameter, _joined(parameter, architecture, ranks.tensor, parts), ranks))
    if state:
        raise WeightMismatch(f"Megatron has parameters that nothing was loaded into: {sorted(state)}.")
    if ranks.sum([float(bool(broken))])[0]:
        refuse_not_finite(broken)
        raise WeightMismatch("another rank cannot take the weights; its log says why.")


def export_weights(
    model: GPTModel,
    architecture: Architecture,
    ranks: MegatronRanks,
    *,
    dtype: torch.dtype | None = None,
    values: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face's names with whole tensors on the model's device, in the order of the layers; `dtype` None keeps
    the model's.

    A collective of each replica: all its ranks iterate to the end, and all get the same. A tensor may be a view of
    memory that later ones do not use.
    """
    state = dict(model.named_parameters())
    for parameter in _parameters(architecture, ranks.pipeline, model.vocab_size, values=values):
        whole = _gathered(parameter, state, model, ranks, dtype)
        yield from _split(parameter, whole, architecture, ranks.tensor)


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter of this rank, as states of any layout know it: `key` is the same on every rank that holds a part."""

    parameter: _Parameter
    is_copy: bool
    """Whether it is the last stage's copy of the embedding, which has the embedding's key."""

    @property
    def key(self) -> str:
        return self.parameter.parts[0]


def held_parameters(
    model: GPTModel, architecture: Architecture, ranks: MegatronRanks, *, values: bool = False
) -> dict[str, HeldParameter]:
    """The parameters of this rank, by Megatron's names for them."""
    names = {name for name, _ in model.named_parameters()}
    found = {
        parameter.name: HeldParameter(parameter, is_copy=False)
        for parameter in _parameters(architecture, ranks.pipeline, model.vocab_size, values=values)
        if parameter.stage == _stage(ranks)
    }
    if HEAD_PARAMETER in names - found.keys():
        shape = (model.vocab_size, architecture.hidden)
        copy = _Parameter(HEAD_PARAMETER, _stage(ranks), "vocab", shape, (EMBEDDING,))
        found[HEAD_PARAMETER] = HeldParameter(copy, is_copy=True)
    return found


def whole_parameters(architecture: Architecture, padded: int) -> Iterator[HeldParameter]:
    """The parameters of a policy, as one rank holds them that has all; the vocabulary is `padded` to so many rows."""
    for parameter in _parameters(architecture, 1, padded, values=False):
        yield HeldParameter(parameter, is_copy=False)


def taken_apart(held: HeldParameter, whole: Tensor, architecture: Architecture) -> dict[str, Tensor]:
    """The tensors of a whole parameter by Hugging Face's names; they may be views of it."""
    return dict(_split(held.parameter, whole, architecture, 1))


def resharded(held: HeldParameter, shards: list[Tensor], architecture: Architecture, ranks: Reader) -> Tensor:
    """This rank's shard of a tensor in a parameter's shape, out of the shards of as many tensor-parallel ranks as there
    were. What is padding becomes zeros."""
    parameter = held.parameter
    whole = shards[0]
    if parameter.kind != "whole" and len(shards) > 1:
        whole = torch.cat(shards, dim=1 if parameter.kind == "row" else 0)
    parts = [part for _, part in _split(parameter, whole, architecture, len(shards))]
    return _slice(parameter, _joined(parameter, architecture, ranks.tensor, parts), ranks)


HEAD_PARAMETER = "output_layer.weight"
_VALUE_BIAS_PARAMETER = "output_layer.bias"
_LAYER = "decoder.layers.{}."


def _parameters(a: Architecture, stages: int, padded: int, *, values: bool) -> Iterator[_Parameter]:
    width = (a.heads + 2 * a.kv_heads) * a.head_dim
    yield _Parameter("embedding.word_embeddings.weight", 0, "vocab", (padded, a.hidden), (EMBEDDING,))
    per_stage = a.layers // stages
    for layer in range(a.layers):
        stage, local = divmod(layer, per_stage)
        mine, theirs = _LAYER.format(local), f"model.layers.{layer}."

        def one(
            name: str,
            kind: str,
            shape: tuple[int, ...],
            *parts: str,
            stage: int = stage,
            mine: str = mine,
            theirs: str = theirs,
        ) -> _Parameter:
            return _Parameter(mine + name, stage, kind, shape, tuple(theirs + part for part in parts))

        qkv = [f"self_attn.{letter}_proj" for letter in "qkv"]
        yield one("input_layernorm.weight", "whole", (a.hidden,), "input_layernorm.weight")
        yield one(
            "self_attention.linear_qkv.weight", "qkv", (width, a.hidden), *(f"{name}.weight" for name in qkv)
        )
        if a.qkv_bias:
            yield one("self_attention.linear_qkv.bias", "qkv", (width,), *(f"{name}.bias" for name in qkv))
        if a.qk_norm:
            for letter in "qk":
                name = f"self_attention.{letter}_layernorm.weight"
                yield one(name, "whole", (a.head_dim,), f"self_attn.{letter}_norm.weight")
        out = (a.hidden, a.heads * a.head_dim)
        yield one("self_attention.linear_proj.weight", "row", out, "self_attn.o_proj.weight")
        if a.out_bias:
            yield one("self_attention.linear_proj.bias", "whole", (a.hidden,), "self_attn.o_proj.bias")
        yield one("pre_mlp_layernorm.weight", "whole", (a.hidden,), "post_attention_layernorm.weight")
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        yield one(
            "mlp.linear_fc1.weight", "gate_up", (2 * a.mlp, a.hidden), *(f"{n}.weight" for n in gate_up)
        )
        if a.mlp_bias:
            yield one("mlp.linear_fc1.bias", "gate_up", (2 * a.mlp,), *(f"{n}.bias" for n in gate_up))
        yield one("mlp.linear_fc2.weight", "row", (a.hidden, a.mlp), "mlp.down_proj.weight")
        if a.mlp_bias:
            yield one("mlp.linear_fc2.bias", "whole", (a.hidden,), "mlp.down_proj.bias")
    last = stages - 1
    yield _Parameter("decoder.final_layernorm.weight", last, "whole", (a.hidden,), ("model.norm.weight",))
    if values:
        yield _Parameter(HEAD_PARAMETER, last, "whole", (1, a.hidden), (VALUE_WEIGHT,))
        yield _Parameter(_VALUE_BIAS_PARAMETER, last, "whole", (1,), (VALUE_BIAS,))
    elif not a.tied:
        yield _Parameter(HEAD_PARAMETER, last, "vocab", (padded, a.hidden), (HEAD,))


# -- in -----------------------------------------------------------------------------------------------


def _checked(source: TensorSource, name: str, shapes: dict[str, tuple[int, ...]]) -> Tensor:
    tensor, wanted = source(name), shapes[name]
    if tuple(tensor.shape) != wanted:
        raise WeightMismatch(f"tensor {name} is {tuple(tensor.shape)}, the model's is {wanted}.")
    return tensor


def _joined(parameter: _Parameter, a: Architecture, tensor_parallel: int, parts: list[Tensor]) -> Tensor:
    """The parameter of all ranks together, in the order in which they hold it."""
    if parameter.kind == "qkv":
        by_head = [part.reshape(a.kv_heads, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_head, dim=1).reshape(parameter.shape)
    if parameter.kind == "gate_up":
        by_rank = [part.reshape(tensor_parallel, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_rank, dim=1).reshape(parameter.shape)
    (whole,) = parts
    if parameter.kind == "vocab" and parameter.shape[0] > whole.shape[0]:
        padding = whole.new_zeros(parameter.shape[0] - whole.shape[0], whole.shape[1])
        return torch.cat([whole, padding])
    return whole


def _slice(parameter: _Parameter, whole: Tensor, ranks: Reader) -> Tensor:
    if parameter.kind == "whole" or ranks.tensor == 1:
        return whole
    return whole.chunk(ranks.tensor, dim=1 if parameter.kind == "row" else 0)[ranks.tensor_rank]


# -- out ----------------------------------------------------------------------------------------------


def _gathered(
    parameter: _Parameter,
    state: dict[str, Tensor],
    model: GPTModel,
    ranks: MegatronRanks,
    dtype: torch.dtype | None,
) -> Tensor:
    """The parameter of all tensor-parallel ranks, on every rank of the replica."""
    own = next(iter(state.values()))
    wanted = dtype or own.dtype
    if parameter.stage == _stage(ranks):
        shard = state[parameter.name].detach().to(wanted).contiguous()
        if parameter.kind == "whole" or ranks.tensor == 1:
            whole = shard
        else:
            shards = [torch.empty_like(shard) for _ in range(ranks.tensor)]
            dist.all_gather(shards, shard, group=ranks.tensor_group)
            whole = torch.cat(shards, dim=1 if parameter.kind == "row" else 0)
    else:
        whole = torch.empty(parameter.shape, dtype=wanted, device=own.device)
    if ranks.pipeline > 1:
        source = dist.get_global_rank(ranks.pipeline_group, parameter.stage)
        dist.broadcast(whole, src=source, group=ranks.pipeline_group)
    return whole


def _split(
    parameter: _Parameter, whole: Tensor, a: Architecture, tensor_parallel: int
) -> Iterator[tuple[str, Tensor]]:
    rest = whole.shape[1:]
    if parameter.kind == "qkv":
        by_head = whole.view(a.kv_heads, -1, *rest)
        rows = [a.group * a.head_dim, a.head_dim, a.head_dim]
        pieces = [piece.reshape(-1, *rest) for piece in torch.split(by_head, rows, dim=1)]
    elif parameter.kind == "gate_up":
        by_rank = whole.view(tensor_parallel, 2, -1, *rest)
        pieces = [by_rank[:, half].reshape(-1, *rest) for half in range(2)]
    elif parameter.kind == "vocab":
        pieces = [whole[: a.vocab]]
    else:
        pieces = [whole]
    yield from zip(parameter.parts, pieces, strict=True)


def _stage(ranks: MegatronRanks) -> int:
    return dist.get_rank(ranks.pipeline_group)
