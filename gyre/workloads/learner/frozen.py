"""A model that is asked and never trained, whatever computes it: the reference policy and the reward model.

Each is over `LearnerBackend.forward`, as the learners are; a back end has a subclass of each, whose `make_backend`
reads the weights. A vertex of such a role holds the whole model; several of them share the samples, not the model.

A reward model is a folder in Hugging Face's layout, as `…ForSequenceClassification` with one label saves it: the
decoder, and `score.weight` `[1, hidden]`. What it says of a sample is its number at the sample's last token, after the
prompt and everything before. It reads the policy's own tokens, so it must have the policy's tokenizer.

This module must not know how anything is computed, nor what log-probs and rewards are used for.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gyre.config.sections import RewardModelSettings, WorkloadSettings, read_section
from gyre.errors import ConfigError, UserCodeError
from gyre.models.support import refuse_no_folder
from gyre.rollouts.drawn import at_drawn
from gyre.rollouts.samples import Group
from gyre.workloads.base import BaseWorkload, WorkloadContext, operator
from gyre.workloads.learner.backend import LearnerBackend
from gyre.workloads.learner.packing import TrainingRow, pack
from gyre.workloads.tasks.same_tokenizer import refuse_other_tokenizer


class FrozenModel(BaseWorkload):
    """Holds a back end that does not train. A subclass says what it is asked, and its subclass by what it is computed:
    `make_backend`."""

    backend: LearnerBackend

    def make_backend(self) -> LearnerBackend:
        """With the settings in `self.settings`, alone in its gang: `self.own_context`. Raises ConfigError and
        ModelFolderError where there is no such model, or no weights of it."""
        raise NotImplementedError

    def setup(self) -> None:
        self.settings = WorkloadSettings.read(self.config)
        torch.set_num_threads(self.settings.threads)
        self.backend = self.make_backend()

    def teardown(self) -> None:
        if hasattr(self, "backend"):  # none before it is set up
            self.backend.close(keep=False)

    @property
    def own_context(self) -> WorkloadContext:
        """The vertex as the only rank of its model."""
        return replace(self.context, rank=0, world_size=1)

    def said_of(self, rows: Sequence[Sequence[TrainingRow]]) -> NDArray[np.float32]:
        """What the model says of each predicted token of each group's rows, one after the other, float32, with a tick
        after each pass. Rows of several groups share a pass where the back end has a size for it."""
        most = self.backend.pass_tokens
        together = rows if most is None else [[row for some in rows for row in some]]
        found = [np.zeros(0, np.float32)]
        for some in together:
            for part in pack(
                some,
                max_tokens=sys.maxsize if most is None else most,
                multiple=self.backend.width_multiple,
                prompts_once=self.backend.prompts_once,
            ):
                (said,) = self.backend.forward([part])
                found.append(said.numpy())
                self.report_progress()
        return np.concatenate(found)


class ReferenceModel(FrozenModel):
    """Adds `extras["ref_logprobs"]` to samples. It reads `config.model_path` by itself, or the weights of
    `config.first_weights`, which is what the actor begins with; so it takes no weights from anybody."""

    @operator
    def logprobs(self, groups: list[Group]) -> list[Group]:
        """The same groups, each sample with `extras["ref_logprobs"]`, float32 `[t]` at the sampling temperature, 0
        where a token was not drawn."""
        flat = self.said_of(
            [
                [
                    TrainingRow(group.prompt_ids, one.token_ids, mask=one.mask)
                    for one in group.samples
                    if one.drawn
                ]
                for group in groups
            ]
        )
        at = 0
        for sample in (sample for group in groups for sample in group.samples):
            sample.extras["ref_logprobs"] = at_drawn(sample, flat[at : at + sample.drawn].copy())
            at += sample.drawn
        return groups

    def refuse_small(self) -> None:
        """Raises ConfigError where the actor's model is no folder's."""
        if not self.settings.model_path:
            raise ConfigError(
                f"{type(self).__name__} has no model: config.model_path is not set.",
                hint="Without it the actor's model is the small decoder, whose reference is "
                "gyre.workloads.torch:TorchReference.",
            )


class RewardModel(FrozenModel):
    """Scores with the model in `config.reward_model.path`, whose values are a reward model's numbers. `make_backend`
    sets `vocab` too: how many tokens the model has."""

    vocab: int

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        """The same groups, with `reward` set on every sample, whether it ended by itself or was cut off.

        Raises ConfigError for a token that the model does not have.
        """
        rows = [self._ending_in_a_value(group) for group in groups]
        said = self.said_of(rows)
        ends = np.cumsum([len(row.token_ids) for some in rows for row in some], dtype=int) - 1
        return take_rewards(groups, said[ends].tolist())

    def _ending_in_a_value(self, group: Group) -> list[TrainingRow]:
        """A row for every sample whose last predicted token follows all of its own: the value before it is what the
        model says at the sample's end. Raises ConfigError for a token that the model does not have."""
        nothing = np.zeros(1, dtype=np.int32)  # what is predicted is of no interest; where it would be, is
        rows = []
        for sample in group.samples:
            tokens = np.concatenate([group.prompt_ids, sample.token_ids])
            if tokens.max(initial=0) >= self.vocab:
                raise ConfigError(
                    f"group {group.id} has token {tokens.max()}; the reward model has {self.vocab} tokens.",
                    hint="A reward model reads the policy's tokens: it must have the same tokenizer.",
                )
            rows.append(TrainingRow(group.prompt_ids, np.concatenate([sample.token_ids, nothing])))
        return rows


def reward_model_folder(config: Mapping[str, Any]) -> Path:
    """The folder in `config.reward_model.path`. Raises ConfigError where none is named, or it is no model's, or its
    tokenizer is not the policy's."""
    path = read_section(RewardModelSettings, config, "reward_model").path
    if not path:
        raise ConfigError(
            "config.reward_model.path is missing.",
            hint="Name the folder of a model for sequence classification with one label.",
        )
    folder = Path(path)
    refuse_no_folder(folder, "config.reward_model.path")
    refuse_other_tokenizer(config, folder, "config.reward_model.path")
    return folder


def take_rewards(groups: list[Group], found: Sequence[float]) -> list[Group]:
    """The groups, with the numbers found as rewards, in the order of groups and samples; rows of a rollout have that of
    its last one. Raises UserCodeError for what is no finite number."""
    rewards = iter(found)
    for group in groups:
        for sample in group.samples:
            reward = next(rewards)
            if not math.isfinite(reward):
                raise UserCodeError(
                    f"the reward model gave {reward} for a sample of group {group.id}, which is no reward.",
                    hint="Are its weights whole, and is its dtype wide enough?",
                )
            sample.reward = reward
        for rows in group.rollouts:
            for row in rows:
                group.samples[row].reward = group.samples[rows[-1]].reward
    return groups
