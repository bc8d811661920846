"""The demo's task: sums such as `37+58=`, whose answer 95 a tiny character-level model has to write.

By default the answer is written units first, `59`, in the order in which it is computed.

Invariants:
- *endless and resumable*: prompt `i` is a function of `(seed, i)` and the task's settings alone;
- *held out stays out*: whether a problem is held out is a property of the problem, so no training prompt is ever
  a held-out problem, nor its mirror image where the operator commutes.

This module must not import torch, and must not know how answers are produced or rewarded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.config.sections import TaskSettings, WorkloadSettings
from gyre.errors import ConfigError
from gyre.philox import uniforms, words
from gyre.rollouts.samples import Group, Sample
from gyre.workloads.tasks.task import Demonstration

_STREAM_PROBLEM = 1
_STREAM_HELD_OUT_DRAW = 2
_STREAM_HELD_OUT = 3
_STREAM_SLIP = 4
_MAX_DRAWS = 1024
_BLOCK = 256


class CharTokenizer:
    """One token a character, after three specials: `pad` 0, `bos` 1, `eos` 2."""

    pad_id = 0
    bos_id = 1
    eos_id = 2

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self._ids = {character: index + 3 for index, character in enumerate(alphabet)}

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet) + 3

    def encode(self, text: str) -> NDArray[np.int32]:
        """int32 `[len(text)]`, without specials. Raises ValueError for a character outside the alphabet."""
        unknown = sorted(set(text) - set(self._ids))
        if unknown:
            raise ValueError(f"characters {unknown} are not in the alphabet {self.alphabet!r}")
        return np.array([self._ids[character] for character in text], dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | NDArray[Any]) -> str:
        """The text up to the first `eos`; `pad` and `bos` are left out, unknown ids become `?`."""
        text, alphabet, known = [], self.alphabet, len(self.alphabet)
        for token in np.asarray(token_ids).tolist():
            if token == self.eos_id:
                break
            if token > self.eos_id:
                text.append(alphabet[token - 3] if token - 3 < known else "?")
        return "".join(text)

    def piece(self, token_id: int) -> str:
        """The character of a token; of a special one its name in angle brackets."""
        names = {self.pad_id: "<pad>", self.bos_id: "<bos>", self.eos_id: "<eos>"}
        return names.get(token_id) or self.decode([token_id])


class ArithmeticTask:
    """Problems, their tokens and their answers, by the job's `config` (`seed` and the `task` section)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        settings = WorkloadSettings.read(config)
        self.settings = settings.task or TaskSettings()
        self.seed = settings.seed
        self.tokenizer = CharTokenizer("0123456789+-*=")
        self.stop_token_ids = (self.tokenizer.eos_id,)
        self._block: tuple[int | None, NDArray[np.int64]] = None, np.zeros((0, 3), dtype=np.int64)
        """The newest block of problems that `prompt` has drawn, and its number."""

    def prompt(self, index: int) -> Group:
        """Training prompt `index` ≥ 0: `id` is the index, `meta["answer"]` the text that is right."""
        number, row = divmod(index, _BLOCK)
        known, problems = self._block
        if number != known:  # a block takes little longer than a problem
            problems = self._problems(number * _BLOCK, _BLOCK)
            self._block = number, problems
        return self._group(index, problems[row])

    def prompts(self, start: int, count: int) -> list[Group]:
        """Training prompts `start .. start + count`; the same as as many calls of `prompt`."""
        problems = self._problems(start, count)
        return [self._group(start + i, row) for i, row in enumerate(problems)]

    def _problems(self, start: int, count: int) -> NDArray[np.int64]:
        """int64 `[count, 3]`, as `_draw` has them, none of them held out."""
        if start < 0:
            raise ValueError(f"prompt {start}: training prompts are numbered from 0")
        indices = np.arange(start, start + count)
        problems = self._draw(indices, np.zeros(count, dtype=np.int64), _STREAM_PROBLEM)
        for attempt in range(1, _MAX_DRAWS):
            taken = self._is_held_out(problems)
            if not taken.any():
                break
            draws = np.full(int(taken.sum()), attempt)
            problems[taken] = self._draw(indices[taken], draws, _STREAM_PROBLEM)
        else:
            raise ConfigError(
                "Nearly every problem of this task is held out.",
                hint="Raise task.digits or task.held_out_every.",
            )
        return problems

    def demonstrations(self, start: int, count: int, slips: float) -> list[Demonstration]:
        """Training prompts with the answers that a forgetful pupil wrote beside them.

        In a fraction `slips` of the problems, drawn by the prompt's index, the pupil forgets every carry: of
        `37+58=` they make `85`. Where there is nothing to carry, the answer is right all the same.
        """
        lots = uniforms(self.seed, _STREAM_SLIP, np.arange(start, start + count), 0, 0)
        return [
            self._demonstration(group, self._forgetful(group) if lot < slips else group.meta["answer"])
            for group, lot in zip(self.prompts(start, count), lots.tolist(), strict=True)
        ]

    def _demonstration(self, group: Group, answer: str) -> Demonstration:
        ids = np.append(self.tokenizer.encode(answer), np.int32(self.tokenizer.eos_id))
        return Demonstration(group.prompt_ids, ids, np.ones(len(ids), bool))

    def held_out(self, count: int) -> list[Group]:
        """`count` distinct problems that are never trained on, always the same ones. Their ids are -1, -2, …

        Raises ConfigError where the task does not have that many.
        """
        found = self._held_out(count)
        if len(found) < count:
            raise ConfigError(
                f"The task holds out about {len(found)} problems, fewer than the {count} asked for.",
                hint="Raise task.digits or lower task.held_out_every.",
            )
        return [self._group(-1 - k, row) for k, row in enumerate(found)]

    def held_out_at_most(self, count: int) -> int:
        """How many problems are held out, counted up to `count`."""
        return len(self._held_out(count))

    def _held_out(self, count: int) -> list[tuple[int, ...]]:
        """The first `count` problems that are held out, or those that many draws find: always the same ones."""
        found: dict[tuple[int, ...], None] = {}
        block = 4096
        for attempt in range(64):
            indices = np.arange(attempt * block, (attempt + 1) * block)
            problems = self._draw(indices, np.zeros(block, dtype=np.int64), _STREAM_HELD_OUT_DRAW)
            for row in problems[self._is_held_out(problems)].tolist():
                found.setdefault(tuple(row))
            if len(found) >= count:
                break
        return list(found)[:count]

    def answer_of(self, sample: Sample) -> str:
        """What the sample answered, as text; everything up to the end token."""
        return self.tokenizer.decode(sample.token_ids)

    def prompt_text(self, group: Group) -> str:
        return self.tokenizer.decode(group.prompt_ids)

    def _forgetful(self, group: Group) -> str:
        """The answer without carries (or borrows); a product's is right."""
        text = self.prompt_text(group).removesuffix("=")
        operator = next(character for character in "*+-" if character in text)
        left, right = text.split(operator)
        if operator == "*":
            return str(group.meta["answer"])
        sign = 1 if operator == "+" else -1
        width = max(len(left), len(right))
        pairs = zip(left.zfill(width), right.zfill(width), strict=True)
        digits = "".join(str((int(a) + sign * int(b)) % 10) for a, b in pairs)
        digits = digits.lstrip("0") or "0"
        return digits[::-1] if self.settings.reversed_answer else digits

    def _draw(self, a: NDArray[Any], b: NDArray[Any], stream: int) -> NDArray[np.int64]:
        """Problems int64 `[len(a), 3]`: operator index, left operand, right operand."""
        span = 10**self.settings.digits
        operators = self.settings.operators
        columns = [words(self.seed, stream, a, b, word) for word in range(3)]
        kind = (columns[0] % np.uint64(len(operators))).astype(np.int64)
        left = (columns[1] % np.uint64(span)).astype(np.int64)
        right = (columns[2] % np.uint64(span)).astype(np.int64)
        minus = np.array([operator == "-" for operator in operators])[kind]
        low, high = np.minimum(left, right), np.maximum(left, right)
        return np.stack([kind, np.where(minus, high, left), np.where(minus, low, right)], axis=1)

    def _is_held_out(self, problems: NDArray[np.int64]) -> NDArray[np.bool_]:
        low = np.minimum(problems[:, 1], problems[:, 2])
        high = np.maximum(problems[:, 1], problems[:, 2])
        lots = words(self.seed, _STREAM_HELD_OUT, problems[:, 0], low, high)
        held_out: NDArray[np.bool_] = lots % np.uint64(self.settings.held_out_every) == 0
        return held_out

    def _group(self, group_id: int, problem: Sequence[int] | NDArray[np.int64]) -> Group:
        kind, left, right = (int(value) for value in problem)
        operator = self.settings.operators[kind]
        width = self.settings.digits if self.settings.zero_padded else 0
        value = {"+": left + right, "-": left - right, "*": left * right}[operator]
        answer = str(value)[::-1] if self.settings.reversed_answer else str(value)
        prompt = self.tokenizer.encode(f"{left:0{width}d}{operator}{right:0{width}d}=")
        return Group(
            id=group_id,
            prompt_ids=np.concatenate([np.array([self.tokenizer.bos_id], dtype=np.int32), prompt]),
            meta={"answer": answer},
        )
