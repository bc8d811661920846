"""How much of everything a run of `loop_gpu.py` has: on GPUs, and on CPUs as a dry run."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_plane.model import QWEN3_0_6B, SMALL
from training_loop.trainer import Shape


@dataclass(frozen=True)
class Scale:
    """How much of everything; the same logic for all."""

    engine: str
    model: dict[str, int]
    shape: Shape
    pass_tokens: int
    running: int
    kv_tokens: int
    steps: int


GPU = Scale(
    engine="sglang",
    model=QWEN3_0_6B,
    # As much to train as to generate: one GPU each. Passes hold 22 or 23 sequences, a micro-batch is six of them.
    shape=Shape(vocab=151_936, prompt=512, lengths=(256, 192, 320, 256), groups=32, n=8, micro=16),
    pass_tokens=17_408,
    running=256,
    kv_tokens=262_144,
    steps=22,
)
GPU_BIG = Scale(
    engine="sglang",
    model={**GPU.model, "hidden": 2048, "inner": 6144},
    shape=Shape(vocab=151_936, prompt=512, lengths=(256, 192, 320, 256), groups=16, n=8, micro=16),
    pass_tokens=9_216,  # half: its activations are twice as large
    running=128,
    kv_tokens=131_072,
    steps=6,
)
DRY = Scale(
    engine="embedded",
    model=SMALL,
    shape=Shape(vocab=512, prompt=24, lengths=(16, 12, 20, 16), groups=4, n=4, micro=2),
    pass_tokens=256,
    running=16,
    kv_tokens=16_384,
    steps=8,
)
DRY_BIG = Scale(
    engine="embedded",
    model={**DRY.model, "hidden": 128, "inner": 256, "head_dim": 32},
    shape=DRY.shape,
    pass_tokens=256,
    running=16,
    kv_tokens=16_384,
    steps=4,
)
