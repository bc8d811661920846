"""Layers of transformers whose parts take one kernel each on a GPU: norms, gated units, rotary positions.

Transformers computes each as several passes over memory. A class is replaced if it looks like the usual one and, asked
with random numbers in float32, says what the replacement says; whatever else a model computes stays as it is. The
gradient is compared with the model's own by `small_check`, as the rest is.

This module must not know about ranks or steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY = "apply_rotary_pos_emb"
"""The function of transformers' modules, found by its name when it is called."""

TOLERANCE = 1e-5
"""Relative difference of results in float32."""

ROWS = 5
"""Of the random numbers that a class is asked with."""


def fusable(causal: nn.Module) -> frozenset[str]:
    """The classes and functions of a model, which has its weights in float32, that `fuse` may replace, by their full
    names."""
    found = set()
    with torch.no_grad():
        seen = {type(module): module for module in causal.modules()}
        for kind, module in seen.items():
            own = _replacement(module)
            if own is not None and _says_the_same(module, own):
                found.add(_name(kind))
        for place in _places(causal):
            if _rotates_the_same(getattr(place, ROTARY), next(causal.parameters()).device):
                found.add(f"{place.__name__}.{ROTARY}")
    return frozenset(found)


def fuse(causal: nn.Module, names: Collection[str]) -> Callable[[], None]:
    """Replace what `fusable` named; returns what undoes it. Functions are replaced for the whole process, and compute
    on a CPU as before."""
    changed: list[nn.Module] = []
    places: list[tuple[ModuleType, Any]] = []
    for module in causal.modules():
        if _name(type(module)) in names and (own := _replacement(module)) is not None:
            module.forward = own
            changed.append(module)
    for place in _places(causal):
        before = getattr(place, ROTARY)
        if f"{place.__name__}.{ROTARY}" in names and not isinstance(before, partial):
            setattr(place, ROTARY, partial(_rotary, before))
            places.append((place, before))

    def undo() -> None:
        for module in changed:
            del module.forward
        for place, before in places:
            setattr(place, ROTARY, before)

    return undo


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _places(causal: nn.Module) -> Iterator[ModuleType]:
    """The modules of Python that have the model's classes and a function for its rotary positions."""
    for name in sorted({type(module).__module__ for module in causal.modules()}):
        place = sys.modules.get(name)
        if name.startswith("transformers.") and callable(getattr(place, ROTARY, None)):
            assert place is not None
            yield place


# -- what replaces ------------------------------------------------------------------------------------


def _replacement(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The module's forward in few kernels; None where it does not look like one that is known."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    parts = {name for name, _ in module.named_children()}
    if type(module).__name__.endswith("RMSNorm") and own == {"weight"} and not parts:
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        return partial(_norm, module, float(eps)) if isinstance(eps, float) else None
    if parts - {"act_fn"} == {"gate_proj", "up_proj", "down_proj"} and not own:
        return partial(_gated, module) if _is_silu(getattr(module, "act_fn", None)) else None
    return None


def _is_silu(activation: Any) -> bool:
    return (
        isinstance(activation, nn.SiLU)
        or activation is F.silu
        or type(activation).__name__ == "SiLUActivation"
    )


def _norm(module: Any, eps: float, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, module.weight.to(hidden_states.dtype), eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _gated(module: Any, x: Tensor) -> Tensor:
    found: Tensor = module.down_proj(gated_unit(module.gate_proj(x), module.up_proj(x)))
    return found


def gated_unit(gate: Tensor, up: Tensor) -> Tensor:
    if not gate.is_cuda:
        return F.silu(gate) * up
    from gyre.workloads.learner.gpu_kernels import GatedUnit

    found: Tensor = GatedUnit.apply(gate, up)  # type: ignore[no-untyped-call]
    return found


def _rotary(
    before: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *others: Any,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    if others or more or not q.is_cuda or not _is_usual(q, k, cos, sin):
        return before(q, k, cos, sin, *others, **more)
    from gyre.workloads.learner.gpu_kernels import Rotated

    cos, sin = cos.contiguous(), sin.contiguous()
    return Rotated.apply(q, cos, sin), Rotated.apply(k, cos, sin)  # type: ignore[no-untyped-call]


def _is_usual(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Heads of one sequence, of which the whole is rotated."""
    return all(
        x.ndim == 4 and x.shape[0] == 1 and (1, *x.shape[2:]) == tuple(cos.shape) == tuple(sin.shape)
        for x in (q, k)
    )


# -- whether it is the same ---------------------------------------------------------------------------


def _says_the_same(module: nn.Module, own: Callable[[Tensor], Tensor]) -> bool:
    like = next(module.parameters())
    width = like.shape[-1]
    generator = _generator()
    x = _drawn((1, ROWS, width), generator, like.device)
    kept = {name: one.detach().clone() for name, one in module.named_parameters()}
    try:
        for one in module.parameters():
            one.copy_(_drawn(one.shape, generator, one.device))
        return _is_close(own(x), module(x))
    except Exception:  # it wants something else than a tensor, or has other widths
        return False
    finally:
        for name, one in module.named_parameters():
            one.copy_(kept[name])


def _rotates_the_same(before: Callable[..., Any], device: torch.device) -> bool:
    generator = _generator()
    q, k = (_drawn((1, heads, ROWS, 8), generator, device) for heads in (4, 2))
    cos, sin = (_drawn((1, ROWS, 8), generator, device) for _ in range(2))
    try:
        theirs = before(q, k, cos, sin)
        return all(_is_close(_rotated(x, cos, sin), one) for x, one in zip((q, k), theirs, strict=True))
    except Exception:  # another function by this name
        return False


def _generator() -> torch.Generator:
    """One of its own: what the process draws from later is as if nothing had been asked here."""
    return torch.Generator().manual_seed(0)


def _drawn(shape: Sequence[int], generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randn(tuple(shape), generator=generator).to(device)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What `gpu_kernels.Rotated` computes."""
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]


def _is_close(mine: Tensor, theirs: Tensor) -> bool:
    return mine.shape == theirs.shape and bool((mine - theirs).norm() <= TOLERANCE * theirs.norm())
