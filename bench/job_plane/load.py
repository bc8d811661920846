"""What the job of `job_gpu.py` is about: random prompts, answers that end anywhere, a reward by tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gyre.rollouts.samples import Group, Sample


class Tokens:
    """A tokenizer's numbers, without texts."""

    def __init__(self, vocab: int) -> None:
        self.vocab_size, self.eos_id = vocab, vocab - 1


class RandomPrompts:
    """A task (`task.name`): prompts of `prompt_tokens` random tokens. A sample ends at any of `stop_tokens` tokens
    which is anywhere with random weights: about one token in `vocab / stop_tokens`. With 0 all are equally long."""

    def __init__(
        self, config: Mapping[str, Any], *, vocab: int, prompt_tokens: int, stop_tokens: int = 1
    ) -> None:
        self.tokenizer = Tokens(vocab)
        self.stop_token_ids = tuple(range(vocab - stop_tokens, vocab))
        self._vocab, self._length = vocab, prompt_tokens
        self._seed = int(config.get("seed", 0))

    def prompt(self, index: int) -> Group:
        generator = np.random.default_rng((self._seed, index + (1 << 32)))
        return Group(index, generator.integers(0, self._vocab // 2, self._length, dtype=np.int32), {})

    def held_out(self, count: int) -> list[Group]:
        return [self.prompt(-1 - at) for at in range(count)]

    def prompt_text(self, group: Group) -> str:
        return ""

    def answer_of(self, sample: Sample) -> str:
        return " ".join(map(str, sample.token_ids))


def even_share(prompt: str, completion: str, meta: Mapping[str, Any]) -> float:
    """The share of even tokens: there is something to learn."""
    tokens = [int(token) for token in completion.split()]
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)
