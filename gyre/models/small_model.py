"""Models of transformers by their configuration, and a small copy of one to try things on.

A small copy (see `small_config`) has drawn weights, and none of the model's: what is right or wrong by the code that
computes shows in it, in float32, within a second.

Invariants:
- *no code from a folder*: only classes that transformers brings are built;
- *nothing else is drawn*: random numbers of the process are as before.

This module must not know who tries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from gyre.models.errors import NoSmallCopy
from gyre.models.small_config import LENGTH, VOCAB, small_configs

_SPREAD = 0.1
"""What is added to vectors, which a model begins at one or zero: there a wrong one would not show."""


def transformers_config(told: Mapping[str, Any]) -> Any:
    """The content of a `config.json` as `from_pretrained` reads it: numbers that JSON does not have stand in it in a
    form of transformers' own, and an older name of a family may mean another one. Raises KeyError where transformers
    has no such type, and whatever the type's own class raises."""
    config = PreTrainedConfig._decode_special_floats(dict(told))
    kind = config["model_type"]
    if kind == "mistral" and "layer_types" in config:
        kind = config["model_type"] = "ministral"
    return CONFIG_MAPPING[kind].from_dict(config)


def small_model(config: Any, *, attention: str | None = None, seed: int = 0) -> Any:
    """A small causal model of the kind of `config`, transformers' own of a large one, in float32 on the CPU, in
    evaluation mode. `attention` is transformers' name of an implementation. Raises NoSmallCopy."""
    problem = ""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for told in small_configs(config.to_dict()):
            try:
                small = type(config).from_dict(deepcopy(told))
                causal = _built(small, attention)
                _draw(causal, seed)
                if bool(plain_logits(causal, tokens_of(LENGTH, seed)).isfinite().all()):
                    return causal
                problem = problem or "its logits are not finite"
            except Exception as error:  # a model's own code raises anything for what it does not know
                problem = problem or " ".join(f"{type(error).__name__}: {error}".split())
    raise NoSmallCopy(f"A small {config.model_type} cannot be built: {problem}")


@contextmanager
def on_one_thread() -> Iterator[None]:
    """In the block no threads wait for each other over tensors of a few elements, which on a busy machine takes many
    times as long as the work. It is said to the whole process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def plain_logits(causal: Any, tokens: Tensor) -> Tensor:
    """Logits `[n, vocab]` of tokens int64 `[n]`, as anybody asks transformers for them."""
    with torch.no_grad():
        logits: Tensor = causal(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


def tokens_of(length: int, seed: int) -> Tensor:
    """Drawn tokens of a small model, none of them special: int64 `[length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator)


def _built(config: Any, attention: str | None) -> Any:
    wanted = {} if attention is None else {"attn_implementation": attention}
    make: Any = AutoModelForCausalLM.from_config
    return make(config, dtype=torch.float32, trust_remote_code=False, **wanted).eval()


def _draw(causal: Any, seed: int) -> None:
    """Weights whose products are as large as what they are of, so that each token's context shows in its logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in causal.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(drawn, alpha=_SPREAD)
            else:
                parameter.copy_(drawn / parameter.shape[-1] ** 0.5)
