"""A prepared data set as the source of a job's prompts: `run.data: gyre.data.prepared:PreparedData`.

Invariants:
- *endless and resumable*: prompt `i` is a function of the folders, the seed and `i` alone; see `gyre.data.order`;
- *held out stays out*: a prompt with the same tokens as a held-out prompt is never drawn for training.

This module must not know how answers are produced or rewarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.config.sections import DataSettings, read_section
from gyre.data.folder import TOKENIZER, PreparedFolder
from gyre.data.order import EpochOrder
from gyre.data.tokenizer import TextTokenizer
from gyre.errors import ConfigError
from gyre.rollouts.samples import Group, Sample


class PreparedData:
    """Prompts by the job's `config`: its section `data`, and `seed`. Raises ConfigError if a folder cannot be used."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.settings = read_section(DataSettings, config, "data")
        self._folder = PreparedFolder(Path(self.settings.path))
        manifest = self._folder.manifest
        if self.settings.digest and manifest["digest"] != self.settings.digest:
            raise ConfigError(
                f"{self._folder.path} has the digest {manifest['digest']}, config.data.digest says "
                f"{self.settings.digest}.",
                hint="It is another data set than the job was made for.",
            )
        self._held_out_folder = (
            PreparedFolder(Path(self.settings.held_out)) if self.settings.held_out else None
        )
        if (
            self._held_out_folder is not None
            and self._held_out_folder.manifest["vocab_size"] != manifest["vocab_size"]
        ):
            raise ConfigError(
                f"{self._held_out_folder.path} was prepared with another tokenizer than {self._folder.path}."
            )
        self.stop_token_ids: tuple[int, ...] = tuple(manifest["stop_token_ids"])
        self._seed = int(config.get("seed", 0))

    @property
    def identity(self) -> str:
        """What prompt `i` is, for every `i`, besides the settings that a job keeps: the digests of the folders."""
        held_out = self._held_out_folder
        kept_out = f", without {held_out.manifest['digest']}" if held_out is not None else ""
        return f"the data set {self._folder.manifest['digest']}{kept_out}"

    # -- prompts ------------------------------------------------------------------------------------

    def prompt(self, index: int) -> Group:
        """Training prompt `index` ≥ 0; `meta` has its answer, its row and the epoch in which it is drawn."""
        row = int(self._training[self._order.row_at(index)])
        meta = {"row": row, "epoch": self._order.epoch_of(index)}
        return self._group(index, self._folder, row, meta)

    def held_out(self, count: int) -> list[Group]:
        """The first `count` held-out prompts, with ids -1, -2, … Raises ConfigError if there are fewer."""
        folder = self._held_out_folder or self._folder
        rows = (
            np.arange(folder.rows) if self._held_out_folder is not None else np.flatnonzero(self._is_held_out)
        )
        if len(rows) < count:
            raise ConfigError(
                f"{len(rows)} prompts are held out, fewer than the {count} of run.held_out.",
                hint="Lower run.held_out, or give config.data.held_out or held_out_every.",
            )
        return [
            self._group(-1 - k, folder, int(row), {"row": int(row)}) for k, row in enumerate(rows[:count])
        ]

    @staticmethod
    def _group(group_id: int, folder: PreparedFolder, row: int, meta: dict[str, Any]) -> Group:
        return Group(group_id, folder.prompt_ids(row), folder.meta(row) | meta)

    @cached_property
    def _is_held_out(self) -> NDArray[np.bool_]:
        """bool `[rows]`. Equal prompts are held out together."""
        if self._held_out_folder is not None:
            return np.isin(self._folder.hashes, self._held_out_folder.hashes)
        if not self.settings.held_out_every:
            return np.zeros(self._folder.rows, dtype=np.bool_)
        found: NDArray[np.bool_] = self._folder.hashes % np.uint64(self.settings.held_out_every) == 0
        return found

    @cached_property
    def _training(self) -> NDArray[np.int64]:
        rows = np.flatnonzero(~self._is_held_out)
        if not len(rows):
            raise ConfigError(f"every prompt of {self._folder.path} is held out.")
        return rows

    @cached_property
    def _order(self) -> EpochOrder:
        return EpochOrder(len(self._training), seed=self._seed, shuffle=self.settings.shuffle)

    @cached_property
    def largest_token(self) -> int:
        """The largest token of all prompts, held-out ones included, which the model's vocabulary must have. Reads every
        token once."""
        return max(
            folder.largest_token for folder in (self._folder, self._held_out_folder) if folder is not None
        )

    # -- texts --------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self._folder.path / TOKENIZER)

    def prompt_text(self, group: Group) -> str:
        return self.tokenizer.decode(group.prompt_ids.tolist())

    def answer_of(self, sample: Sample) -> str:
        """The sample's text, without special tokens."""
        return self.tokenizer.decode(sample.token_ids.tolist())
