"""What a real back end keeps in memory on a rank, on CPUs, counted by storages: what `gyre plan` foretells.

GPUs have kernels that CPUs lack: attention by bounds, a norm and a gated unit in one piece. Here each is a stand-in
that saves what the real one saves, and computes nothing of use.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
    backend = _made(rank, ranks, port, kind, shape, own, lora, values)
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

    made = FsdpBackend(context, settings, settings.optim, config_of_shape(shape), source, values=values)
    if settings.fsdp.fused_kernels:  # as on a GPU
        from gyre.models.small_model import small_model
        from gyre.workloads.fsdp.fused import fusable, fuse
        from gyre.workloads.fsdp.model import parsed_config

        small = small_model(parsed_config(config_of_shape(shape)), attention=None, seed=1)
        fuse(made._model.causal, fusable(small))
    return made


def config_of_shape(shape: Architecture) -> dict[str, Any]:
    kinds = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    config = config_of(shape, eos_id=0)
    return {**config, "architectures": [kinds[shape.family]], "model_type": shape.family}


def automatic(
    rank: int,
    ranks: int,
    port: int,
    kind: str,
    shape: Architecture,
    own: dict[str, Any],
    sizes: list[int | None],
) -> tuple[int, str, bool]:
    """How large passes are by `auto`, and what the back end's status says of it, where each rank's device has one of
    these `sizes`; at the end whether its layers are computed again."""
    from gyre.workloads.learner import memory_choice

    real, memory_choice.device_bytes = memory_choice.device_bytes, lambda device: sizes[rank]
    try:
        backend = _made(rank, ranks, port, kind, shape, {"pass_tokens": "auto", **own}, None, False)
        told = backend.pass_tokens, backend.status()["passes"], _computes_again(backend)
        backend.close(keep=False)
        return told
    finally:
        memory_choice.device_bytes = real


def _computes_again(backend: Any) -> bool:
    if hasattr(backend, "policy"):
        return bool(backend.policy.module.decoder.config.recompute_granularity == "full")
    return bool(backend._recomputation.on)


def _made(
    rank: int,
    ranks: int,
    port: int,
    kind: str,
    shape: Architecture,
    own: dict[str, Any],
    lora: dict[str, Any] | None,
    values: bool,
) -> Any:
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

    return (_megatron if kind == "megatron" else _fsdp)(context, settings, shape, source, values)


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


def _pass(backend: Any, shape: Architecture, length: int) -> Any:
    import numpy as np

    from gyre.workloads.learner.packing import TrainingRow, pack

    drawn = np.random.default_rng(5)
    rows = [
        TrainingRow(
            drawn.integers(0, shape.vocab, 4).astype(np.int32),
            drawn.integers(0, shape.vocab, length - 3).astype(np.int32),
        )
        for _ in range(SEQUENCES)
    ]
    (part,) = pack(rows, max_tokens=SEQUENCES * length, multiple=backend.width_multiple)
    return part


# -- what is saved ----------------------------------------------------------------------------------------


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Of the tensors that autograd saves in the block."""
    import torch

    found: list[int] = []

    def note(tensor: Any) -> Any:
        found.append(tensor.nbytes)
        return tensor.detach()  # a node that keeps its own output, graph and all, is never freed

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield found


def _saved_in_a_pass(backend: Any, shape: Architecture) -> int:
    import torch

    from gyre.workloads.algorithms.losses import LossSum

    part = _pass(backend, shape, LENGTH)
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


# -- what there is at most ---------------------------------------------------------------------------------


def most(
    rank: int,
    ranks: int,
    port: int,
    kind: str,
    shape: Architecture,
    own: dict[str, Any],
    lora: dict[str, Any] | None,
    length: int,
) -> int:
    """The most bytes of tensors that are there at once in two passes of `SEQUENCES * length` tokens and a step, by
    following every tensor that torch makes: what a GPU's allocator would say."""
    import gc
    import weakref

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from gyre.workloads.algorithms.losses import LossSum

    class Followed(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.there: dict[int, Any] = {}
            self.most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for one in tree_leaves(out):
                if isinstance(one, torch.Tensor):
                    storage = getattr(one, "_local_tensor", one).untyped_storage()
                    self.there.setdefault(storage._cdata, weakref.ref(storage, self._gone(storage._cdata)))
            found = [storage() for storage in list(self.there.values())]
            self.most = max(self.most, sum(one.nbytes() for one in found if one is not None))
            return out

        def _gone(self, key: int) -> Any:
            return lambda _: self.there.pop(key, None)

    def loss(part: Any, numbers: Any, entropies: Any) -> LossSum:
        return LossSum(numbers.sum(), torch.tensor(1.0), {})

    with Followed() as followed:
        backend = _made(rank, ranks, port, kind, shape, own, lora, False)
        try:
            part = _pass(backend, shape, length)
            with _as_on_gpus(backend):
                for _ in range(2):  # the optimizer has its states after the first one
                    gc.collect()
                    followed.most = 0
                    backend.zero()
                    backend.backward([part, part], loss)
                    backend.update(count=1.0, lr=1e-3)
            return followed.most
        finally:
            backend.close(keep=False)


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

        class Gated(torch.autograd.Function):
            """Saves what `gpu_kernels.GatedUnit` saves."""

            @staticmethod
            def forward(ctx: Any, gate: Any, up: Any) -> Any:
                ctx.save_for_backward(gate, up)
                return gate * up

            @staticmethod
            def backward(ctx: Any, given: Any) -> Any:
                return tuple(torch.empty_like(one).copy_(given) for one in ctx.saved_tensors)

        self.attention = lambda q, k, v, *_, **__: Attention.apply(q, k, v)
        self.gated = Gated.apply
        self.normed = Normed.apply
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
            from gyre.workloads.fsdp import fused, packed_attention

            self._set(fused, "rms_norm", lambda x, weight, eps: self.normed(x, weight))
            self._set(fused, "gated_unit", self.gated)
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
