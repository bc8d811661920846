"""A causal language model of transformers from its `config.json`, its parameters sharded over the ranks.

Every layer is a group of parameters that are gathered for its computation and given up after it. What is outside of the
layers is one group: an output layer that is tied to the embedding is the same tensor.

Invariants:
- *never whole on a device*: parameters are made without memory, sharded, and only then have some;
- *nothing is drawn*: the model is in evaluation mode, so it drops nothing out, also while it is trained;
- *no code from a folder*: only classes that transformers brings are built.

This module must not know about steps, losses or files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from gyre.errors import ConfigError, nearest
from gyre.models.config_keys import AS_SAVED
from gyre.models.small_model import transformers_config
from gyre.workloads.fsdp import packed_attention
from gyre.workloads.fsdp.small_check import pattern_of
from gyre.workloads.fsdp.token_model import UNPACKED, TokenModel


def parsed_config(hugging_face_config: dict[str, Any]) -> Any:
    """The content of a `config.json` as transformers reads it. Raises ConfigError where transformers has no such model,
    or not with these weights."""
    kind = str(hugging_face_config.get("model_type", ""))
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"transformers has no model of the type {kind!r}; {nearest(kind, list(CONFIG_MAPPING))}",
            hint="A newer transformers may have it. Code that a folder brings is not run.",
        )
    if hugging_face_config.get("quantization_config"):
        raise ConfigError(
            "The model's weights are quantised: its config.json has a quantization_config.",
            hint="Train from a copy in bfloat16.",
        )
    try:
        return transformers_config(hugging_face_config)
    except Exception as error:  # each type of model checks its keys in its own way
        problem = " ".join(str(error).split())
        raise ConfigError(
            f"transformers does not read this config.json of a {kind}: {problem}", hint=AS_SAVED
        ) from error


def build_causal(hugging_face_config: dict[str, Any], attention: str) -> Any:
    """The model, with parameters in float32 that have no memory. `attention` is transformers' name of an
    implementation, or `auto`: `packed_attention` where the model lets attention be chosen. Raises ConfigError as
    `parsed_config`, and where the model is no causal one."""
    parsed = parsed_config(hugging_face_config)
    problems: list[str] = []
    for one in [packed_attention.NAME, *UNPACKED] if attention == "auto" else [attention]:
        try:
            causal = _constructed(deepcopy(parsed), one)  # some models note the attention in it
        except Exception as error:  # a model's code raises anything for an attention that it does not know
            problems.append(" ".join(f"{type(error).__name__}: {error}".split()))
            continue
        if one != packed_attention.NAME or causal.is_backend_compatible():
            return causal
    raise _not_built(parsed, problems[-1])


def _not_built(parsed: Any, problem: str) -> ConfigError:
    return ConfigError(
        f"transformers cannot build this {parsed.model_type}: {problem}", hint=f"Its config.json: {AS_SAVED}"
    )


def _constructed(config: Any, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    make: Any = AutoModelForCausalLM.from_config
    with _parameters_on_meta():
        causal = make(config, attn_implementation=attention, dtype=dtype, trust_remote_code=False)
    return causal.eval()


def take_buffers(causal: Any, hugging_face_config: dict[str, Any], dtype: torch.dtype) -> None:
    """Give the model the buffers that no file holds as transformers computes them for a model in `dtype`: its code
    multiplies some with what is in that."""
    attention = causal.config._attn_implementation
    other = _constructed(parsed_config(hugging_face_config), attention, dtype)
    for mine, theirs in zip(causal.modules(), other.modules(), strict=True):
        for name in mine._non_persistent_buffers_set:
            mine._buffers[name] = theirs._buffers[name]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that are registered in the block have no memory. Buffers, which are computed, are as always."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":  # a tied one stays the same object
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass
class Recomputation:
    """Whether layers are computed again for their gradient, from the next pass on."""

    on: bool

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's `forward`, whose activations are kept or computed again: the same bits."""

        def computed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return computed


def shard(
    model: TokenModel,
    mesh: DeviceMesh,
    *,
    device: torch.device,
    dtype: torch.dtype,
    trains: bool,
    recomputation: Recomputation | None,
    seldom: Collection[str] = (),
) -> None:
    """Shard the parameters over the mesh, and give the shards memory on the device: float32 of those that are trained,
    which of a model that `trains` are those that want a gradient, else `dtype`. The model computes in `dtype`, and sums
    gradients over ranks, undivided, in float32. With a `recomputation` its layers do as that says at each pass. Of
    parameters that only some sequences reach, `seldom` by the `pattern_of` their names, each pass gives a gradient:
    ranks that sum gradients must all have the same ones."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = _layers(model)
    if trains and seldom:
        _reach(model, layers, seldom)
    if recomputation is not None:
        for layer in layers:
            # Inside of the group: it gathers its parameters once for the layer's second computation and its gradient.
            layer.forward = recomputation.around(layer.forward)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo knows no other way to divide by nothing

    def placed(tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta":
            is_trained = trains and tensor.requires_grad
            return torch.empty_like(tensor, device=device, dtype=torch.float32 if is_trained else dtype)
        return tensor.to(device)

    model._apply(placed)  # type: ignore[no-untyped-call]


def _reach(model: TokenModel, layers: Sequence[nn.Module], seldom: Collection[str]) -> None:
    """Let what each group of parameters gives depend on all of those that are reached seldom, by nothing."""
    names = {module: name for name, module in model.named_modules()}
    left = {
        name for name, _ in model.named_parameters() if pattern_of(name.removeprefix("causal.")) in seldom
    }
    for module in [*layers, model]:
        prefix = f"{names[module]}." if names[module] else ""
        mine = sorted(name for name in left if name.startswith(prefix))
        left -= set(mine)
        if mine:
            own = [name.removeprefix(prefix) for name in mine]
            module.forward = partial(_reached, module, module.forward, own)


def _reached(module: nn.Module, forward: Any, names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    found = forward(*args, **kwargs)
    nothing = sum(module.get_parameter(name).flatten()[0] for name in names) * 0.0
    if isinstance(found, tuple):
        return (found[0] + nothing, *found[1:])
    return found + nothing


def _layers(model: TokenModel) -> list[nn.Module]:
    """The outermost modules that transformers would not split over devices. One that shares a parameter with what is
    outside of it is none: a parameter is of one group."""
    kinds = set(model.causal._no_split_modules or ())
    found: list[nn.Module] = []
    shared = _shared(model)

    def collect(module: nn.Module) -> None:
        for child in module.children():
            if type(child).__name__ in kinds and not shared & {id(one) for one in child.parameters()}:
                found.append(child)
            else:
                collect(child)

    collect(model)
    return found


def _shared(model: nn.Module) -> set[int]:
    """The identities of parameters that several modules have."""
    seen: set[int] = set()
    found: set[int] = set()
    for _, one in model.named_parameters(remove_duplicate=False):
        (found if id(one) in seen else seen).add(id(one))
    return found
