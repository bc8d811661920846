"""The seam between Megatron-core, which is written for CUDA, and machines without it.

Megatron asks for `device="cuda"` and `torch.cuda.current_device()` where it means "this process's device". On a CPU
the seam gives it the CPU. It is all that differs: model, optimizer, schedules and collectives are the same code.

Invariants:
- *nothing on GPUs*: on a CUDA device the seam is empty;
- *opened by the thread that computes*: a `TorchFunctionMode` is a thread's own, so whatever calls Megatron does it
  inside `with seam():`.

This module must not know what is computed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

_KNOWN_WARNINGS = (
    "The .grad attribute of a Tensor that is not a leaf",  # Megatron asks its shards for theirs
    "Please use DTensor instead",  # of its checkpoints
    "`torch.distributed.",  # it calls collectives by the names that newer torch has renamed
)

UNUSED = ("flashinfer", "torch_memory_saver", "wandb")
"""What Megatron imports where it finds it, for its own inference and logs, which nothing here calls. flashinfer alone
takes seconds, and is there wherever SGLang is."""

_PLACED_ALREADY = (torch.Tensor.cuda, torch.Tensor.pin_memory)


class _CudaMeansCpu(TorchFunctionMode):
    """Tensors that are asked for on CUDA are made on the CPU, and say that they are CUDA's where their type is asked
    for by name: Megatron tells its parameters apart by it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in _PLACED_ALREADY:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not given:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = CPU
        return func(*args, **given)


def open_seam(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Prepare this process for Megatron on `device`, and return what its calls are made inside of.

    Call it before anything imports `megatron.core`: what Megatron imports and nobody uses is left out, and what it has
    torch compile is left as it is, for what a step needs of that is Gyre's own. Harmless when repeated.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    for said in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=said)
    with _without(UNUSED):
        _import_uncompiled()
    if device.type == "cuda":
        from gyre.workloads.megatron.model.swiglu import use_in_megatron

        use_in_megatron()
        return nullcontext
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    # What dropout draws from; recomputing activations saves and restores it.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    return _CudaMeansCpu


def _import_uncompiled() -> None:
    compile_ = torch.compile

    def unchanged(function: Any = None, **options: Any) -> Any:
        return function if function is not None else lambda inner: inner

    try:
        torch.compile = unchanged  # type: ignore[assignment]
        import megatron.core
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401
    finally:
        torch.compile = compile_


@contextmanager
def _without(packages: Collection[str]) -> Iterator[None]:
    """In the block whoever tries to import one of these packages is told that it is not installed, unless it is
    imported already."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is how Python marks what is not there
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
