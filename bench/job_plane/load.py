"""What the job of `job_gpu.py` is about: random prompts, lengths of three kinds, a reward by tokens, an agent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from gyre.agents import Session
from gyre.rollouts.samples import Group, Sample

MEDIAN, SIGMA, LONGEST = 482.0, 0.8, 2048
"""Of prompts' own limits, which are log-normal. With the stop tokens on top of them the median of lengths is 400."""


class Tokens:
    """A tokenizer's numbers, without texts."""

    def __init__(self, vocab: int) -> None:
        self.vocab_size, self.eos_id = vocab, vocab - 1


class RandomPrompts:
    """A task (`task.name`): prompts of `prompt_tokens` random tokens. A sample ends at any of `stop_token_ids`; without
    any, at its limit. With `longest` each prompt brings a limit of its own, log-normal and at most `longest`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        vocab: int,
        prompt_tokens: int,
        stop_token_ids: list[int],
        longest: int = 0,
    ) -> None:
        self.tokenizer = Tokens(vocab)
        self.stop_token_ids = tuple(stop_token_ids)
        self._vocab, self._length, self._longest = vocab, prompt_tokens, longest
        self._seed = int(config.get("seed", 0))

    def prompt(self, index: int) -> Group:
        generator = np.random.default_rng((self._seed, index + (1 << 32)))
        ids = generator.integers(0, self._vocab // 2, self._length, dtype=np.int32)
        return Group(
            index, ids, {"max_new_tokens": own_limit(generator, self._longest)} if self._longest else {}
        )

    def held_out(self, count: int) -> list[Group]:
        return [self.prompt(-1 - at) for at in range(count)]

    def prompt_text(self, group: Group) -> str:
        return ""

    def answer_of(self, sample: Sample) -> str:
        return " ".join(map(str, sample.token_ids))


def own_limit(generator: np.random.Generator, longest: int) -> int:
    drawn = MEDIAN / LONGEST * longest * float(np.exp(SIGMA * generator.standard_normal()))
    return min(max(round(drawn), 1), longest)


def even_share(prompt: str, completion: str, meta: Mapping[str, Any]) -> float:
    """The share of even tokens: there is something to learn."""
    tokens = [int(token) for token in completion.split()]
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


TOOL_TOKENS, TOOL_S, TOOL_SIGMA = 64, 0.5, 0.8
"""Of what a tool answers, and how long it takes: log-normal, with this median."""


async def random_turns(session: Session, *, turns: int, vocab: int) -> float:
    """An agent (`config.agent.function`): between two turns a tool answers random tokens. Rewarded is the share of even
    tokens among those that were drawn."""
    ids, drawn = list(session.prompt_ids), 0
    even = 0
    for turn in range(turns):
        if turn:
            await session.tool(asyncio.sleep, TOOL_S * session.rng.lognormvariate(0.0, TOOL_SIGMA))
            ids += [session.rng.randrange(vocab // 2) for _ in range(TOOL_TOKENS)]
        told = (await session.generate(ids)).token_ids
        ids += told
        drawn, even = drawn + len(told), even + sum(token % 2 == 0 for token in told)
    return even / max(drawn, 1)
