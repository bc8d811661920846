"""What a GPU computes is what a CPU computes: its kernels for attention, norms and activations are others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.megatron.work import config_of, gradient_and_step, random_groups
from tests.rank_pool import RankPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HEADS = {
    "heads of 32": {"hidden": 128, "heads": 4, "kv_heads": 2},
    "heads of 128": {"hidden": 256, "heads": 2, "kv_heads": 1},
}
AGREES = {"float32": 0.9999, "bfloat16": 0.98}
"""Cosine of a parameter's gradient to that in float32 on a CPU; bfloat16 on a CPU has at least 0.99."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(1, preload=None)
    yield made
    made.close()


@pytest.fixture(scope="module")
def another_pool() -> Iterator[RankPool]:
    """For the CPU's half: a process that has told Megatron to use a CPU does so for good."""
    made = RankPool(1, preload=None)
    yield made
    made.close()


def config(device: str, dtype: str, heads: dict[str, int]) -> dict[str, Any]:
    made = config_of("alone")
    made["model"] = made["model"] | heads
    made["megatron"] = {"pass_tokens": 4096, "device": device, "dtype": dtype}
    return made


@pytest.mark.parametrize("prompt_tokens", [1, 20])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", AGREES)
def test_its_gradient_is_the_cpus(
    pool: RankPool, another_pool: RankPool, dtype: str, heads: str, prompt_tokens: int
) -> None:
    """Of sequences side by side, and of trees: groups whose prompt is computed once."""
    groups = random_groups(0, 16, n=8, prompt_tokens=prompt_tokens)
    ((on_gpu, _, _),) = pool.run(gradient_and_step, 1, config("cuda", dtype, HEADS[heads]), groups)
    ((on_cpu, _, _),) = another_pool.run(gradient_and_step, 1, config("cpu", "float32", HEADS[heads]), groups)
    found = {name: cosine(on_cpu[name], on_gpu[name]) for name in on_cpu}
    wrong = {name: round(cos, 4) for name, cos in found.items() if not cos > AGREES[dtype]}
    assert not wrong
    for name in on_cpu:
        assert np.linalg.norm(on_gpu[name]) == pytest.approx(np.linalg.norm(on_cpu[name]), rel=0.03), name


@pytest.mark.parametrize("dtype", AGREES)
def test_a_prompt_computed_once_has_the_gradient_of_its_copies_and_the_same_bits_again(
    pool: RankPool, dtype: str
) -> None:
    """On the GPU itself: nothing there is added up in another order."""
    groups, made = random_groups(0, 16, n=8, prompt_tokens=20), config("cuda", dtype, HEADS["heads of 128"])
    ((once, _, _),) = pool.run(gradient_and_step, 1, made, groups)
    ((again, _, _),) = pool.run(gradient_and_step, 1, made, groups)
    made["megatron"]["prompts_once"] = False
    ((each, _, _),) = pool.run(gradient_and_step, 1, made, groups)
    wrong = {name: cosine(each[name], once[name]) for name in each}
    assert not {name: cos for name, cos in wrong.items() if not cos > AGREES[dtype]}
    for name in once:
        assert np.array_equal(once[name], again[name]), name


def test_its_step_is_the_cpus(pool: RankPool, another_pool: RankPool) -> None:
    groups, heads = random_groups(0, 16, n=8), HEADS["heads of 32"]
    ((_, on_gpu, told),) = pool.run(gradient_and_step, 1, config("cuda", "float32", heads), groups)
    ((_, on_cpu, expected),) = another_pool.run(gradient_and_step, 1, config("cpu", "float32", heads), groups)
    assert told["loss"] == pytest.approx(expected["loss"], rel=0.02)
    for name in on_cpu:  # Adam's first step has the gradient's signs alone
        assert cosine(on_cpu[name], on_gpu[name]) > 0.9, name


def cosine(one: Any, other: Any) -> float:
    lengths = np.linalg.norm(one) * np.linalg.norm(other)
    return float((one * other).sum() / lengths) if lengths else 0.0
