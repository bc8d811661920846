"""The task of `gyre demo --agent`: products that a tiny model cannot compute, and a calculator that it may ask.

    12*34*5=    the problem
    [12*34]     the model asks for a product
    :0408:      the calculator answers, with as many digits as its factors have
    [0408*5]    the model asks again, with what it was told
    :02040:
    02040       the model answers

Half of the problems have two factors and need one call, half have three and need two. Every character is a token, in
the frame of `gyre.chat.plain`.

Invariants, as of arithmetic:
- *endless and resumable*: prompt `i` is a function of `(seed, i)` alone;
- *held out stays out*: whether a problem is held out is a property of the problem.

This module must not import torch, and must not know how turns are generated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gyre.agents.environments import Messages, arguments_of
from gyre.agents.outcomes import PolicyFault
from gyre.config.sections import WorkloadSettings
from gyre.philox import uniforms, words
from gyre.rollouts.samples import Group, Sample
from gyre.workloads.tasks.arithmetic import CharTokenizer
from gyre.workloads.tasks.task import Demonstration

ALPHABET = "0123456789*=[]:"
"""The digits, what a problem has besides, and the frame of `gyre.chat.plain.PlainFrame`."""

_STREAM_PROBLEM, _STREAM_HELD_OUT_DRAW, _STREAM_HELD_OUT, _STREAM_SLIP = 11, 12, 13, 14
_MAX_DRAWS = 1024

_LEAST, _PAIRS, _LAST = 2, 98, 8
"""Factors of two digits are 2 to 99, and the third, of one digit, is 2 to 9: with a factor of 1 what the pupil guesses
might be right."""

_CALL = re.compile(r"([0-9]{1,4})\*([0-9]{1,2})")


class CalculatorTask:
    """Problems, their tokens and their answers. One problem in `held_out_every` is never trained on."""

    def __init__(self, config: Mapping[str, Any], held_out_every: int = 8) -> None:
        self.seed = WorkloadSettings.read(config).seed
        self.held_out_every = held_out_every
        self.tokenizer = CharTokenizer(ALPHABET)
        self.stop_token_ids = (self.tokenizer.eos_id,)

    def prompt(self, index: int) -> Group:
        """Training prompt `index` ≥ 0. `meta` has `problem` and `answer`, as texts."""
        (group,) = self.prompts(index, 1)
        return group

    def prompts(self, start: int, count: int) -> list[Group]:
        """Training prompts `start .. start + count`."""
        indices = np.arange(start, start + count)
        problems = self._draw(indices, 0, _STREAM_PROBLEM)
        for attempt in range(1, _MAX_DRAWS):
            taken = self._is_held_out(problems)
            if not taken.any():
                break
            problems[taken] = self._draw(indices[taken], attempt, _STREAM_PROBLEM)
        return [self._group(start + i, row) for i, row in enumerate(problems.tolist())]

    def held_out(self, count: int) -> list[Group]:
        """`count` distinct problems that are never trained on, always the same ones. Their ids are -1, -2, …"""
        found: dict[tuple[int, ...], None] = {}
        block = 0
        while len(found) < count:
            problems = self._draw(np.arange(block, block + 4096), 0, _STREAM_HELD_OUT_DRAW)
            found |= dict.fromkeys(map(tuple, problems[self._is_held_out(problems)].tolist()))
            block += 4096
        return [self._group(-1 - k, row) for k, row in enumerate(list(found)[:count])]

    def prompt_text(self, group: Group) -> str:
        return self.tokenizer.decode(group.prompt_ids)

    def answer_of(self, sample: Sample) -> str:
        """What a sample has of the model and of the calculator, up to the end token."""
        return self.tokenizer.decode(sample.token_ids)

    def demonstrations(self, start: int, count: int, slips: float) -> list[Demonstration]:
        """Whole sessions of a forgetful pupil. Wherever a call is due they forget it in a fraction `slips` of the
        problems, drawn by the prompt's index, and answer with the digits that they see."""
        lots = np.stack(
            [uniforms(self.seed, _STREAM_SLIP, np.arange(start, start + count), 0, k) for k in range(2)]
        )
        return [
            self._demonstration(group, [bool(lot < slips) for lot in lots[:, at]])
            for at, group in enumerate(self.prompts(start, count))
        ]

    def _demonstration(self, group: Group, forgets: Sequence[bool]) -> Demonstration:
        parts = session_of(group.meta["problem"], forgets)
        ids = np.concatenate([self.tokenizer.encode(text) for text, _ in parts])
        mask = np.concatenate([np.full(len(text), is_pupil) for text, is_pupil in parts])
        end = np.array([self.tokenizer.eos_id], np.int32)
        return Demonstration(group.prompt_ids, np.concatenate([ids, end]), np.append(mask, True))

    def _draw(self, indices: NDArray[Any], attempt: int, stream: int) -> NDArray[np.int64]:
        """Problems int64 `[len(indices), 3]`: two factors of two digits, and one of one digit, 0 for none."""
        tries = np.full(len(indices), attempt, np.int64)
        lots = [words(self.seed, stream, indices, tries, word) for word in range(4)]
        left, right = ((lot % np.uint64(_PAIRS)).astype(np.int64) + _LEAST for lot in lots[:2])
        third = (lots[2] % np.uint64(_LAST)).astype(np.int64) + _LEAST
        return np.stack([left, right, np.where(lots[3] % np.uint64(2) == 0, 0, third)], axis=1)

    def _is_held_out(self, problems: NDArray[np.int64]) -> NDArray[np.bool_]:
        """By the problem, whatever the order of its first two factors and whether it has a third."""
        low, high = np.minimum(problems[:, 0], problems[:, 1]), np.maximum(problems[:, 0], problems[:, 1])
        lots = words(self.seed, _STREAM_HELD_OUT, low, high, 0)
        held_out: NDArray[np.bool_] = lots % np.uint64(self.held_out_every) == 0
        return held_out

    def _group(self, group_id: int, problem: Sequence[int]) -> Group:
        left, right, third = problem
        text = f"{left:02d}*{right:02d}" + (f"*{third}" if third else "") + "="
        ids = np.concatenate([np.array([self.tokenizer.bos_id], np.int32), self.tokenizer.encode(text)])
        return Group(group_id, ids, {"problem": text, "answer": answer_to(text)})


def product(left: str, right: str) -> str:
    """The product, with as many digits as both factors have together."""
    return f"{int(left) * int(right):0{len(left) + len(right)}d}"


def answer_to(problem: str) -> str:
    """The right answer of a problem such as `12*34*5=`."""
    first, *others = problem.removesuffix("=").split("*")
    for factor in others:
        first = product(first, factor)
    return first


def session_of(problem: str, forgets: Sequence[bool]) -> list[tuple[str, bool]]:
    """What follows a problem, as texts, and whether the pupil wrote each. `forgets[k]`: call `k` is forgotten, and the
    pupil answers with what they see: the digits of what they were told and of the factors that are left."""
    known, *factors = problem.removesuffix("=").split("*")
    said: list[tuple[str, bool]] = []
    for place, factor in enumerate(factors):
        if forgets[place]:
            return [*said, (known + "".join(factors[place:]), True)]
        told = product(known, factor)
        said += [(f"[{known}*{factor}]", True), (f":{told}:", False)]
        known = told
    return [*said, (known, True)]


class Calculator:
    """The environment: it answers calls, and scores the answer, 1 for the right one."""

    tools: ClassVar[list[Mapping[str, Any]]] = [
        {
            "type": "function",
            "function": {
                "name": "multiply",
                "description": "The product of two numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {"factors": {"type": "string", "description": "such as 12*34"}},
                    "required": ["factors"],
                },
            },
        }
    ]

    def __init__(self) -> None:
        self._answer = ""

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        self._answer = str(task["answer"])
        return str(task["problem"])

    async def step(self, message: Mapping[str, Any]) -> tuple[Messages, float, bool]:
        calls = message.get("tool_calls") or ()
        if not calls:
            return [], float(message.get("content") == self._answer), True
        return (
            [{"role": "tool", "tool_call_id": one["id"], "content": called(one)} for one in calls],
            0.0,
            False,
        )


def called(call: Mapping[str, Any]) -> str:
    """What the calculator answers. Raises PolicyFault for what is no product of two numbers."""
    factors = _CALL.fullmatch(str(arguments_of(call).get("factors")))
    if factors is None:
        raise PolicyFault("no product")
    return product(*factors.groups())
