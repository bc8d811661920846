"""How much of everything a run of `rollouts_gpu.py` has, and the prompts that it asks for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_plane.model import QWEN3_0_6B, SMALL


@dataclass(frozen=True)
class Scale:
    """How much of everything; the same logic for both."""

    engine: str
    shape: dict[str, int]
    prompt: int
    new: int
    groups: int
    n: int
    running: int
    few: int
    rounds: int
    kv_tokens: int
    settle_s: float
    absent_s: float
    after_s: float
    total_s: float


GPU = Scale(
    engine="sglang",
    shape=QWEN3_0_6B,
    prompt=128,
    new=256,
    groups=128,
    n=8,
    running=256,
    few=64,
    rounds=2,
    kv_tokens=262_144,
    settle_s=10.0,
    absent_s=90.0,
    after_s=10.0,
    total_s=555.0,
)
DRY = Scale(
    engine="embedded",
    shape=SMALL,
    prompt=16,
    new=128,
    groups=16,
    n=4,
    running=16,
    few=4,
    rounds=1,
    kv_tokens=16_384,
    settle_s=4.0,
    absent_s=25.0,
    after_s=3.0,
    total_s=230.0,
)


@dataclass
class Ask:
    prompt: NDArray[np.int32]
    length: int


def workload(scale: Scale, seed: int, groups: int, *, varied: bool = False) -> list[Ask]:
    """Random prompts, none alike. Varied lengths have the same mean."""
    random = np.random.default_rng(seed)
    prompts = random.integers(3, scale.shape["vocab"] - 4, (groups, scale.prompt)).astype(np.int32)
    spread = scale.new * 5 // 8 if varied else 0
    lengths = random.integers(scale.new - spread, scale.new + spread + 1, groups)
    return [Ask(prompt, int(length)) for prompt, length in zip(prompts, lengths, strict=True)]
