"""A prepared data set as the source of a job's prompts: `run.data: gyre.data.prepared:PreparedData`.

Invariants:
- *endless and resumable*: prompt `i` is a function of the folders, the seed and `i` alone; see `gyre.data.order`;
- *held out stays out*: a prompt with the same tokens as a held-out prompt is never drawn for training;
- *room for an answer*: a prompt and its longest answer together fit into the model. Where the job's `max_new_tokens` do
  not, the prompt has a lower limit of its own.

This module must not know how answers are produced or rewarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.config.sections import (
    HELD_OUT,
    DataSettings,
    EvaluationSettings,
    SamplingSettings,
    read_section,
)
from gyre.data.folder import TOKENIZER, PreparedFolder
from gyre.data.order import EpochOrder
from gyre.data.positions import positions_of
from gyre.data.tokenizer import TextTokenizer
from gyre.errors import ConfigError
from gyre.rollouts.samples import OWN_LIMIT, Group, Sample, checked_limit


class PreparedData:
    """Prompts by the job's `config`: its section `data`, and `seed`. Raises ConfigError if a folder cannot be used."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.settings = read_section(DataSettings, config, "data")
        self._folder = PreparedFolder(Path(self.settings.path))
        manifest = self._folder.manifest
        if self.settings.digest:
            self._folder.check_digest(self.settings.digest)
        self._held_out_folders = {
            name: PreparedFolder(Path(path)) for name, path in self.settings.held_out_sets.items()
        }
        for folder in self._held_out_folders.values():
            if folder.manifest["tokenizer"] != manifest["tokenizer"]:
                raise ConfigError(
                    f"{folder.path} was prepared with another tokenizer than {self._folder.path}."
                )
        self.stop_token_ids: tuple[int, ...] = tuple(manifest["stop_token_ids"])
        self._seed = int(config.get("seed", 0))
        self._positions = positions_of(config)
        self._longest = read_section(SamplingSettings, config, "sampling").max_new_tokens
        own = read_section(EvaluationSettings, config, "evaluation").max_new_tokens
        self._longest_held_out = own or self._longest

    @property
    def identity(self) -> str:
        """What prompt `i` is, for every `i`, besides the settings that a job keeps: the digests of the folders."""
        held_out = sorted({folder.manifest["digest"] for folder in self._held_out_folders.values()})
        kept_out = f", without {' and '.join(held_out)}" if held_out else ""
        return f"the data set {self._folder.manifest['digest']}{kept_out}"

    # -- prompts ------------------------------------------------------------------------------------

    def prompt(self, index: int) -> Group:
        """Training prompt `index` ≥ 0; `meta` has its answer, its row and the epoch in which it is drawn."""
        row = int(self._training[self._order.row_at(index)])
        meta = {"row": row, "epoch": self._order.epoch_of(index)}
        return self._group(index, self._folder, row, meta, self._longest)

    def held_out(self, count: int) -> list[Group]:
        """The first `count` prompts of the first held-out set, with ids -1, -2, … Raises ConfigError if there are
        fewer."""
        folder, rows = next(iter(self._held_out_folders.values()), self._folder), self._held_out_rows
        if len(rows) < count:
            raise ConfigError(
                f"{len(rows)} prompts are held out, fewer than the {count} of run.held_out.",
                hint="Lower run.held_out, or give config.data.held_out or held_out_every.",
            )
        return self._held_out_of(folder, rows[:count])

    def held_out_sets(self, count: int) -> dict[str, list[Group]]:
        """Of each held-out set the first `count` prompts, by its name. Where the job names its sets, one with fewer
        prompts gives them all; raises ConfigError where it does not, as `held_out`."""
        if isinstance(self.settings.held_out, str) or not self._held_out_folders:
            return {HELD_OUT: self.held_out(count)}
        return {
            name: self._held_out_of(folder, np.arange(min(count, folder.rows)))
            for name, folder in self._held_out_folders.items()
        }

    def held_out_at_most(self, count: int) -> int:
        """How many prompts are held out, counted up to `count`. Sets with names are cut each by itself."""
        named = self._held_out_folders and not isinstance(self.settings.held_out, str)
        return count if named else min(count, self.held_out_count)

    def _held_out_of(self, folder: PreparedFolder, rows: NDArray[np.intp]) -> list[Group]:
        return [
            self._group(-1 - k, folder, int(row), {"row": int(row)}, self._longest_held_out)
            for k, row in enumerate(rows)
        ]

    def _group(
        self, group_id: int, folder: PreparedFolder, row: int, meta: dict[str, Any], longest: int
    ) -> Group:
        """A prompt whose answer may have `longest` tokens by the job."""
        tokens, meta = folder.prompt_ids(row), folder.meta(row) | meta
        if self._positions is not None:
            room = self._positions.count - len(tokens)
            if room < 1:
                raise ConfigError(
                    f"row {row} of {folder.path} has {len(tokens)} tokens, which leave no room for an answer in "
                    f"{self._positions.where} ({self._positions.count}).",
                    hint="Prepare the data set with --max-prompt-tokens.",
                )
            own = meta.get(OWN_LIMIT)
            if room < (longest if own is None else min(longest, checked_limit(own, "the row"))):
                meta[OWN_LIMIT] = room
        return Group(group_id, tokens, meta)

    # -- counts -------------------------------------------------------------------------------------

    @property
    def folders(self) -> list[PreparedFolder]:
        """The folders that prompts come from."""
        return [self._folder, *self._held_out_folders.values()]

    @property
    def held_out_count(self) -> int:
        """How many prompts are held out: those of the first set, where there are several."""
        return len(self._held_out_rows)

    @property
    def training_count(self) -> int:
        """How many prompts are trained on: those that are not held out. Raises ConfigError if there is none."""
        return len(self._training)

    @property
    def never_trained(self) -> str:
        """A sentence on the rows that are never trained because held-out folders have their prompts, too; "" where
        there is none. Raises ConfigError as `training_count`."""
        rows = self._folder.rows
        if self.training_count == rows or not self._held_out_folders:
            return ""
        folders = [
            str(folder.path)
            for folder in self._held_out_folders.values()
            if np.isin(self._folder.hashes, folder.hashes).any()
        ]
        return (
            f"{rows - self.training_count} of the {rows} rows of {self._folder.path} are never trained: their prompts "
            f"are held out, too, in {' and '.join(folders)}"
        )

    @cached_property
    def _held_out_rows(self) -> NDArray[np.int64]:
        if self._held_out_folders:
            return np.arange(next(iter(self._held_out_folders.values())).rows)
        return np.flatnonzero(self._is_held_out)

    @cached_property
    def _is_held_out(self) -> NDArray[np.bool_]:
        """bool `[rows]`. Equal prompts are held out together."""
        if self._held_out_folders:
            held_out = np.concatenate([folder.hashes for folder in self._held_out_folders.values()])
            return np.isin(self._folder.hashes, held_out)
        if not self.settings.held_out_every:
            return np.zeros(self._folder.rows, dtype=np.bool_)
        found: NDArray[np.bool_] = self._folder.hashes % np.uint64(self.settings.held_out_every) == 0
        return found

    @cached_property
    def _training(self) -> NDArray[np.int64]:
        rows = np.flatnonzero(~self._is_held_out)
        if not len(rows):
            raise ConfigError(
                f"config.data: every prompt of {self._folder.path} is held out, so none is left to train on.",
                hint="Prepare other prompts for config.data.held_out, such as those of --split test; or give "
                "config.data.held_out_every, 2 or more, in its place.",
            )
        return rows

    @cached_property
    def _order(self) -> EpochOrder:
        return EpochOrder(len(self._training), seed=self._seed, shuffle=self.settings.shuffle)

    @cached_property
    def largest_token(self) -> int:
        """The largest token of all prompts, held-out ones included, which the model's vocabulary must have."""
        return max(folder.largest_token for folder in self.folders)

    @property
    def tokenizer_identity(self) -> str:
        """What the prompts' numbers stand for: `tokenizer_identity` of the tokenizer that they were prepared with."""
        return str(self._folder.manifest["tokenizer"])

    # -- texts --------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self._folder.path / TOKENIZER)

    def prompt_text(self, group: Group) -> str:
        return self.tokenizer.decode(group.prompt_ids.tolist())

    def answer_of(self, sample: Sample) -> str:
        """The sample's text, without special tokens, and without the end token that ended it: not every tokenizer calls
        its end token special."""
        ids = sample.token_ids.tolist()
        if sample.finish_reason == "stop" and ids and ids[-1] in self.stop_token_ids:
            del ids[-1]
        return self.tokenizer.decode(ids)
