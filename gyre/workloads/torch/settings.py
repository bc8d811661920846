"""The settings of the torch workloads and of the arithmetic task, with every default in this one place.

They are read from the job's `config`, section by section. Invariants:
- *no silent typo*: an unknown key within a section fails with its path and the nearest known key; so does a
  top-level key that is nearly one of ours. Other top-level keys belong to other workloads.
- *typed*: a value of the wrong type, or outside its range, fails with its path.

The defaults are tuned together: from the warm start, at about a third of the held-out problems, GRPO with
`SCHEDULE` takes the model beyond 90 %. This module must not import torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gyre.errors import ConfigError, nearest
from gyre.workloads.algorithms.settings import LossSettings
from gyre.workloads.rewards.settings import RewardSettings
from gyre.workloads.settings import read_settings


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The decoder's shape. The vocabulary's size comes from the task's tokenizer."""

    layers: int = 2
    hidden: int = 96
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 256
    max_positions: int = 32
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = True


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Arithmetic problems. `digits` bounds both operands, `operators` is a subset of `+-*`.

    One problem in `held_out_every` is never trained on. With `zero_padded`, operands have `digits` digits each;
    with `reversed_answer`, the answer is written units first, which is easier to learn (arXiv 2307.03381).
    """

    digits: int = 2
    operators: str = "+"
    held_out_every: int = 8
    zero_padded: bool = True
    reversed_answer: bool = True


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """`n` samples a prompt. `temperature` 0 is greedy. `max_rows` bounds the rows decoded at once.
    `max_new_tokens` must hold the longest answer and the end token."""

    n: int = 8
    temperature: float = 1.0
    max_new_tokens: int = 4
    max_rows: int = 1024


@dataclass(frozen=True, slots=True)
class OptimSettings:
    """AdamW. The rate rises linearly over `warmup_steps`, and falls linearly to `final_lr_ratio` of `lr` at
    `decay_steps`, where it stays; 0 `decay_steps` leaves it constant. It depends on the step's number alone."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    warmup_steps: int = 5
    decay_steps: int = 0
    final_lr_ratio: float = 0.1
    epochs: int = 1
    """Passes over the groups of a step, …"""
    mini_batches: int = 1
    """… and optimizer steps in each pass. All of them are one step of the job: one rate, one policy version."""

    @property
    def updates(self) -> int:
        """Optimizer steps in a step of the job."""
        return self.epochs * self.mini_batches


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """The critic's own optimizer; its model has the actor's shape."""

    optim: OptimSettings = field(default_factory=OptimSettings)


@dataclass(frozen=True, slots=True)
class WarmStartSettings:
    """Supervised steps on fresh problems and a forgetful pupil's answers, who slips in `slips` of the problems
    (see `ArithmeticTask.demonstrations`), until the rate of exact agreement with the pupil reaches `stop_at`."""

    max_steps: int = 250
    batch: int = 256
    lr: float = 3e-3
    stop_at: float = 0.68
    slips: float = 0.62


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Everything that the torch workloads read. `threads` is torch's intra-op thread count in each process."""

    seed: int = 0
    threads: int = 1
    collective_timeout_s: float = 120.0
    model: ModelSettings = field(default_factory=ModelSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)

    @property
    def norm_length(self) -> float:
        """The constant of `loss_agg_mode: seq-mean-token-sum-norm`."""
        return self.loss.loss_scale_factor or float(self.sampling.max_new_tokens)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> TorchSettings:
        """The settings that `config` asks for, defaults elsewhere. Raises ConfigError."""
        known = [entry.name for entry in fields(cls)]
        for key in config:
            if key not in known and difflib.get_close_matches(key, known, n=1, cutoff=0.75):
                raise ConfigError(f"config.{key} is not a setting.", hint=nearest(key, known))
        settings = read_settings(cls, {key: config[key] for key in config if key in known}, "config")
        _check(settings)
        return settings


def _check(settings: TorchSettings) -> None:
    model, task, sampling = settings.model, settings.task, settings.sampling
    rules = [
        (settings.threads >= 1, "config.threads must be at least 1"),
        (settings.collective_timeout_s > 0, "config.collective_timeout_s must be positive"),
        (
            min(model.layers, model.heads, model.kv_heads, model.mlp) >= 1,
            "config.model sizes must be positive",
        ),
        (
            model.hidden % (2 * model.heads) == 0,
            "config.model.hidden must be an even multiple of model.heads",
        ),
        (model.heads % model.kv_heads == 0, "config.model.heads must be a multiple of model.kv_heads"),
        (1 <= task.digits <= 9, "config.task.digits must be in 1..9"),
        (
            bool(task.operators) and set(task.operators) <= set("+-*"),
            "config.task.operators must be characters of '+-*'",
        ),
        (task.held_out_every >= 2, "config.task.held_out_every must be at least 2"),
        (
            min(sampling.n, sampling.max_new_tokens, sampling.max_rows) >= 1,
            "config.sampling counts must be positive",
        ),
        (sampling.temperature >= 0, "config.sampling.temperature must not be negative"),
    ]
    for path, optim in (("config.optim", settings.optim), ("config.critic.optim", settings.critic.optim)):
        rules += [
            (optim.lr > 0 and optim.clip_norm > 0, f"{path}.lr and clip_norm must be positive"),
            (
                min(optim.epochs, optim.mini_batches) >= 1,
                f"{path}.epochs and mini_batches must be at least 1",
            ),
        ]
    for holds, sentence in rules:
        if not holds:
            raise ConfigError(f"{sentence}.")
    settings.loss.check()
    settings.reward.check()


@dataclass(frozen=True, slots=True)
class Schedule:
    """How many optimizer steps of how many prompts the defaults above were tuned for."""

    steps: int = 120
    prompts_per_step: int = 128


SCHEDULE = Schedule()
