"""Import hooks for an unmodified SGLang on a CPU build of torch. Python runs this file first, by its name.

Each entry of `_AFTER` is run on a module once it is loaded; see `tests.sglang_cpu` for what they are for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_kept: list[Any] = []
"""Operator libraries: their operators go when they do."""


def _before_torchvision() -> None:
    """Its CUDA extension does not load here, and its Python part then registers fakes of operators not defined."""
    import torch

    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)  # type: ignore[no-untyped-call]
    _kept.append(library)


def _permit_torch_attention(choices: ModuleType) -> None:
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def _keep_torch_matrix_kernels(operators: ModuleType) -> None:
    """The batch-invariant ones are Triton's, for GPUs. Float32 on one core varies too little with the batch."""
    operators.enable_batch_invariant_mode = lambda *_, **__: None  # type: ignore[attr-defined]


def _before_adapters() -> None:
    """They copy from page-locked memory, which only a device has."""
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, pin_memory=False, **named: make(*given, **named)

    for name in ("tensor", "arange", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign, assignment]


_BEFORE: dict[str, Callable[[], None]] = {
    "torchvision": _before_torchvision,
    "sglang.srt.lora.layers": _before_adapters,
}
_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.arg_groups.choices": _permit_torch_attention,
    "sglang.srt.batch_invariant_ops": _keep_torch_matrix_kernels,
}


class _Hooks(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if before := _BEFORE.pop(fullname, None):
            before()
        after = _AFTER.pop(fullname, None)
        if after is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            after(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Hooks())
