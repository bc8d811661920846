"""The task `rows`: prompts and answers of a small JSONL file, a token a character.

It is for trying a job and a reward before there is a model: `gyre init` writes such a job. A data set for a model is
prepared with the model's tokenizer, by `gyre data prepare`.

Invariants:
- *endless and resumable*: prompt `i` is a function of the file, the seed and `i` alone; see `gyre.data.order`;
- *held out stays out*: a prompt with the text of a held-out prompt is never drawn for training.

This module must not import torch, and must not know how answers are produced or rewarded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gyre.config.sections import WorkloadSettings
from gyre.data.order import EpochOrder
from gyre.data.readers import rows_of
from gyre.errors import ConfigError, nearest
from gyre.rollouts.samples import Group, Sample
from gyre.workloads.tasks.arithmetic import CharTokenizer

_KEY = "config.task.file"
_MOST_ROWS = 10_000
"""Every process of the job reads the whole file."""


class RowsTask:
    """The rows of `config.task.file`, shuffled anew in each epoch by `config.seed`. Raises ConfigError for a file that
    cannot be used."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        settings = WorkloadSettings.read(config)
        assert settings.task is not None
        self.file = Path(settings.task.file)
        self._rows = _read(self.file)
        texts = [text for prompt, meta in self._rows for text in (prompt, meta.get("answer", ""))]
        self.tokenizer = CharTokenizer("".join(sorted(set("".join(texts)))))
        self.stop_token_ids = (self.tokenizer.eos_id,)
        self._training, self._held_out = self._split(settings.task.held_out_every)
        self._order = EpochOrder(len(self._training), seed=settings.seed)

    @property
    def identity(self) -> str:
        """What prompt `i` is, for every `i`, besides the settings that a job keeps: the digest of the rows."""
        digest = hashlib.sha256(json.dumps(self._rows, sort_keys=True).encode()).hexdigest()
        return f"the rows {digest}"

    @property
    def held_out_count(self) -> int:
        """How many rows are held out."""
        return len(self._held_out)

    @property
    def count(self) -> int:
        """How many rows there are, held-out ones among them."""
        return len(self._rows)

    @property
    def columns(self) -> frozenset[str]:
        """The columns besides the prompt that every row has."""
        return frozenset.intersection(*(frozenset(meta) for _, meta in self._rows))

    @property
    def answers(self) -> list[str | None]:
        """Of each row its answer; None where it has none."""
        return [meta.get("answer") for _, meta in self._rows]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return 1 + max(len(prompt) for prompt, _ in self._rows)

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt, the mean over all rows."""
        return 1 + sum(len(prompt) for prompt, _ in self._rows) / len(self._rows)

    def prompt(self, index: int) -> Group:
        """Training prompt `index` ≥ 0; `meta` has the columns of its row, the row's number and the epoch."""
        row = self._training[self._order.row_at(index)]
        return self._group(index, row, {"epoch": self._order.epoch_of(index)})

    def held_out(self, count: int) -> list[Group]:
        """The first `count` held-out rows, with ids -1, -2, … Raises ConfigError if there are fewer."""
        if count > len(self._held_out):
            raise ConfigError(
                f"run.held_out: {count} given, but {self.file} has {len(self._held_out)} held-out rows.",
                hint="Lower run.held_out or config.task.held_out_every, or set run.evaluate_every to 0.",
            )
        return [self._group(-1 - k, row, {}) for k, row in enumerate(self._held_out[:count])]

    def held_out_at_most(self, count: int) -> int:
        """How many rows are held out, counted up to `count`."""
        return min(count, len(self._held_out))

    def prompt_text(self, group: Group) -> str:
        return self.tokenizer.decode(group.prompt_ids)

    def answer_of(self, sample: Sample) -> str:
        """What the sample answered, as text; everything up to the end token."""
        return self.tokenizer.decode(sample.token_ids)

    def _group(self, group_id: int, row: int, more: dict[str, Any]) -> Group:
        prompt, meta = self._rows[row]
        begin = np.array([self.tokenizer.bos_id], dtype=np.int32)
        ids = np.concatenate([begin, self.tokenizer.encode(prompt)])
        return Group(group_id, ids, {"prompt": prompt, **meta, "row": row, **more})

    def _split(self, every: int) -> tuple[list[int], list[int]]:
        """Rows to train on and rows held out: of the different prompts each `every`-th is held out."""
        numbers: dict[str, int] = {}
        for prompt, _ in self._rows:
            numbers.setdefault(prompt, len(numbers))
        training: list[int] = []
        held_out: list[int] = []
        for row, (prompt, _) in enumerate(self._rows):
            (held_out if numbers[prompt] % every == every - 1 else training).append(row)
        return training, held_out


def _read(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Prompt and other columns of each row, the answer as text."""
    if not file.is_file():
        looked = "" if file.is_absolute() else f", looked up in {Path.cwd()}"
        raise ConfigError(
            f"{_KEY}: {file}: no such file{looked}.",
            hint="Relative paths count from the folder that the command runs in.",
        )
    if not file.name.endswith(".jsonl"):
        raise ConfigError(
            f"{_KEY}: {file} is no .jsonl file.",
            hint="The task 'rows' reads one JSON mapping a line; `gyre data prepare` reads other kinds.",
        )
    found = []
    for number, row in enumerate(rows_of(file), start=1):
        if number > _MOST_ROWS:
            raise ConfigError(
                f"{_KEY}: {file} has more than {_MOST_ROWS} rows.",
                hint="Prepare them with `gyre data prepare`, and name that folder in config.data.path.",
            )
        found.append(_checked(file, number, row))
    if not found:
        raise ConfigError(f"{_KEY}: {file} has no row.")
    return found


def _checked(file: Path, number: int, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    meta = dict(row)
    prompt = meta.pop("prompt", None)
    if not isinstance(prompt, str) or not prompt:
        near = "" if "prompt" in row else nearest("prompt", sorted(map(str, row)))
        raise ConfigError(
            f"{_KEY}: row {number} of {file} has no text under 'prompt'" + (f"; {near}" if near else ".")
        )
    if (answer := meta.get("answer")) is not None:
        if not isinstance(answer, str | int | float) or isinstance(answer, bool):
            raise ConfigError(
                f"{_KEY}: row {number} of {file} has an 'answer' of type {type(answer).__name__}, expected text or "
                "a number."
            )
        meta["answer"] = str(answer)
    else:
        meta.pop("answer", None)
    return prompt, meta
