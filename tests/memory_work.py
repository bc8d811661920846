"""What a real back end keeps in memory on a rank, on CPUs, counted by storages: what `gyre plan` foretells.

GPUs have kernels that CPUs lack: attention by bounds, and a norm in one piece. Here each is a stand-in that saves what
the real one saves, and computes nothing of use.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre.config.sections import WorkloadSettings
from gyre.models.architecture import Architecture, config_of
from gyre.models.tensor_names import expected_shapes, value_shapes
from gyre.workloads.base import WorkloadContext

SEQUENCES, LENGTH = 4, 48
QWEN3 = Architecture.qwen3(
    vocab=320, layers=2, hidden=96, heads=6, kv_heads=2, mlp=160, max_positions=256, tied=True
)
SHAPES: dict[str, Architecture] = {
    "qwen3": QWEN3,
    "its own head": replace(QWEN3, tied=False),
    "qwen2": replace(QWEN3, family="qwen2", qk_norm=False, qkv_bias=True),
    "keys for each": replace(QWEN3, kv_heads=6),
}


def keeps(
    rank: int,
    ranks: int,
    port: int,
    kind: str,
    shape: Architecture,
    own: dict[str, Any],
    lora: dict[str, Any] | None = None,
    values: bool = False,
) -> dict[str, int]:
    """Bytes of this rank's weights, gradients and optimizer, and of what is saved for the gradient when the loss of a
    pass of `SEQUENCES * LENGTH` tokens is made."""
    import torch

    given: dict[str, Any] = {"optim": {"lr": 1e-3}, "collective_timeout_s": 30.0}
    given["megatron" if kind == "megatron" else "fsdp"] = {"device": "cpu", **own}
    if lora is not None:
        given["lora"] = lora
    settings = WorkloadSettings.read(given)
    context = WorkloadContext(
        "j",
        "actor",
        rank,
        ranks,
        directory=Path(tempfile.gettempdir()),
        master_addr="127.0.0.1",
        master_port=port,
    )
    shapes = value_shapes(shape) if values else expected_shapes(shape)
    drawn = torch.Generator().manual_seed(3)

    def source(name: str) -> torch.Tensor:
        return torch.randn(shapes[name], generator=drawn) * 0.02

    backend = (_megatron if kind == "megatron" else _fsdp)(context, settings, shape, source, values)
    try:
        saved = _saved_in_a_pass(backend, shape)
        told = (_megatron_states if kind == "megatron" else _fsdp_states)(backend)
        backend.update(count=1.0, lr=1e-3)
        told |= (_megatron_optimizer if kind == "megatron" else _fsdp_optimizer)(backend)
        return told | {"saved": saved}
    finally:
        backend.close(keep=False)


def _megatron(context: Any, settings: Any, shape: Architecture, source: Any, values: bool) -> Any:
    from gyre.workloads.learner.trained_model import TrainedModel
    from gyre.workloads.megatron.backend import MegatronBackend

    model = TrainedModel(shape, config_of_shape(shape), None)
    made = MegatronBackend(context, settings, settings.optim, model, lambda _: source, values=values)
    made.policy.config.bias_activation_fusion = True  # as on GPUs; the same autograd function, not compiled
    return made


def _fsdp(context: Any, settings: Any, shape: Architecture, source: Any, values: bool) -> Any:
    from gyre.workloads.fsdp.backend import FsdpBackend

    return FsdpBackend(context, settings, settings.optim, config_of_shape(shape), source, values=values)


def config_of_shape(shape: Architecture) -> dict[str, Any]:
    kinds = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    config = config_of(shape, eos_id=0)
    return {**config, "architectures": [kinds[shape.family]], "model_type": shape.family}


# -- states -----------------------------------------------------------------------------------------------


def _bytes(tensors: Iterable[Any]) -> int:
    """Of the storages behind the tensors, each once."""
    found = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(found.values())


def _megatron_states(backend: Any) -> dict[str, int]:
    parameters = list(backend.policy.module.parameters())
    return {
        "weights": sum(one.numel() * one.element_size() for one in parameters),
        "gradients": sum(one.main_grad.numel() * one.main_grad.element_size() for one in parameters),
        "buffers": _bytes(one.main_grad for one in parameters),
    }


def _megatron_optimizer(backend: Any) -> dict[str, int]:
    weights = {one.untyped_storage().data_ptr() for one in backend.policy.module.parameters()}
    found = []
    for one in backend.policy.optimizer.chained_optimizers:
        found += [main for group in one.optimizer.param_groups for main in group["params"]]
        found += [value for state in one.optimizer.state.values() for value in state.values() if value.dim()]
    own = [one for one in found if one.untyped_storage().data_ptr() not in weights]
    return {"optimizer": sum(one.numel() * one.element_size() for one in own)}


def _fsdp_states(backend: Any) -> dict[str, int]:
    from gyre.workloads.fsdp.shards import local_of, named_tensors

    model = backend._model
    every = [*named_tensors(model).values(), *named_tensors(model, adapter=True).values()]
    gradients = [local_of(one.grad) for one in model.parameters() if one.grad is not None]
    return {"weights": _bytes(map(local_of, every)), "gradients": sum(one.nbytes for one in gradients)}


def _fsdp_optimizer(backend: Any) -> dict[str, int]:
    states = backend._optimizer.state.values()
    return {"optimizer": sum(value.nbytes for state in states for value in state.values() if value.dim())}


# -- what is saved ----------------------------------------------------------------------------------------


def _saved_in_a_pass(backend: Any, shape: Architecture) -> int:
    import numpy as np
    import torch

    from gyre.workloads.algorithms.losses import LossSum
    from gyre.workloads.learner.packing import Row, pack

    drawn = np.random.default_rng(5)
    rows = [
        Row(
            drawn.integers(0, shape.vocab, 4).astype(np.int32),
            drawn.integers(0, shape.vocab, LENGTH - 3).astype(np.int32),
        )
        for _ in range(SEQUENCES)
    ]
    (part,) = pack(rows, max_tokens=SEQUENCES * LENGTH, multiple=backend.width_multiple)
    seen: dict[int, tuple[int, Any]] = {}
    found = [0]

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        seen.setdefault(
            storage._cdata, (storage.nbytes(), tensor)
        )  # by a place, memory that was freed would count
        return tensor

    def loss(part: Any, numbers: Any, entropies: Any) -> LossSum:
        not_saved = _weights_of(backend)
        found[0] = sum(
            size
            for size, tensor in seen.values()
            if tensor.untyped_storage().data_ptr() not in not_saved
            and tuple(tensor.shape) not in _shapes_of_weights(backend)
        )
        return LossSum(numbers.sum(), torch.tensor(1.0), {})

    backend.zero()
    with _as_on_gpus(backend), torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
        backend.backward([part], loss)
    return found[0]


def _parameters(backend: Any) -> list[Any]:
    model = backend.policy.module if hasattr(backend, "policy") else backend._model
    return list(model.parameters())


def _weights_of(backend: Any) -> set[int]:
    return {
        (one.to_local() if hasattr(one, "to_local") else one).untyped_storage().data_ptr()
        for one in _parameters(backend)
    }


def _shapes_of_weights(backend: Any) -> set[tuple[int, ...]]:
    """Gathered parameters have no place of their own; no activation has the shape of one."""
    shapes = {tuple(one.shape) for one in _parameters(backend)}
    return shapes | {shape[::-1] for shape in shapes}


class _as_on_gpus:
    def __init__(self, backend: Any) -> None:
        import torch

        self._backend = backend
        self._undo: list[tuple[Any, str, Any]] = []

        class Attention(torch.autograd.Function):
            """Saves what torch's `varlen_attn` saves."""

            @staticmethod
            def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
                out = torch.zeros(q.shape, dtype=q.dtype)
                ctx.save_for_backward(q, k, v, out, torch.zeros(q.shape[1], q.shape[0]))
                return out

            @staticmethod
            def backward(ctx: Any, given: Any) -> Any:
                q, k, v, *_ = ctx.saved_tensors
                return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

        class Normed(torch.autograd.Function):
            """Saves what torch's fused `rms_norm` saves."""

            @staticmethod
            def forward(ctx: Any, x: Any, weight: Any) -> Any:
                ctx.save_for_backward(x, weight, torch.zeros(*x.shape[:-1], 1))
                return torch.empty(x.shape, dtype=x.dtype).copy_(x)

            @staticmethod
            def backward(ctx: Any, given: Any) -> Any:
                _, weight, _ = ctx.saved_tensors
                return given.contiguous(), torch.zeros_like(weight)

        self.attention = lambda q, k, v, *_, **__: Attention.apply(q, k, v)
        self.norm = lambda own, x: Normed.apply(x, own.weight)

    def __enter__(self) -> None:
        if hasattr(self._backend, "policy"):
            from gyre.workloads.megatron.model import gpt

            def by_segment(q: Any, k: Any, v: Any, _: Any) -> Any:
                repeats = q.shape[1] // k.shape[1]
                if repeats > 1:
                    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
                return self.attention(q, k, v)

            self._set(gpt.Norm, "forward", self.norm)
            self._set(gpt, "_attend_by_segment", by_segment)
        else:
            from gyre.workloads.fsdp import packed_attention

            self._set(packed_attention, "_by_bounds", lambda query, value: True)
            self._set(packed_attention, "_takes_fewer_keys", lambda: True)
            self._set(packed_attention, "varlen_attn", self.attention_found)

    def attention_found(self, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
        return self.attention(q, k, v)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, value)

    def __exit__(self, *_: Any) -> None:
        for owner, name, value in reversed(self._undo):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
