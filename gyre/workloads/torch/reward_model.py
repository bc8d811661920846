"""A reward model in plain torch: a decoder with one number at the end of a conversation instead of logits.

It is a folder in Hugging Face's layout, as `…ForSequenceClassification` with one label saves it: the decoder, and
`score.weight` `[1, hidden]`. What it says of a sample is its number at the sample's last token, after the prompt and
everything before. It reads the policy's own tokens, so it must have the policy's tokenizer.

This module must not know what the rewards are used for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gyre.config.sections import RewardModelSettings, WorkloadSettings, read_section
from gyre.errors import ConfigError, UserCodeError
from gyre.models.architecture import read_architecture
from gyre.models.first_weights import score_weights
from gyre.models.modules import ValueModel
from gyre.models.support import refuse_no_folder
from gyre.models.tensor_names import VALUE_BIAS, VALUE_WEIGHT
from gyre.rollouts.samples import Group
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.learner.padded import TokenRow, pad_rows, token_values
from gyre.workloads.learner.trained_model import own_parameters
from gyre.workloads.tasks.same_tokenizer import refuse_other_tokenizer
from gyre.workloads.torch.served_policy import load_parameters


class TorchRewardModel(BaseWorkload):
    """Scores with the model in `config.reward_model.path`, in float32 on the CPU."""

    def setup(self) -> None:
        self.settings = WorkloadSettings.read(self.config)
        torch.set_num_threads(self.settings.threads)
        folder = reward_model_folder(self.config)
        self.architecture = replace(read_architecture(folder), tied=True)  # a policy's head is of no interest
        source = score_weights(folder, self.architecture)
        own = own_parameters(source, self.architecture)
        tensors = {f"decoder.{name}": tensor for name, tensor in own.items()}
        self.model = ValueModel(self.architecture)
        load_parameters(
            self.model, tensors | {name: source(name).float() for name in (VALUE_WEIGHT, VALUE_BIAS)}
        )
        self.model.eval().requires_grad_(False)

    @operator
    @torch.no_grad()
    def score(self, groups: list[Group]) -> list[Group]:
        """The same groups, with `reward` set on every sample, whether it ended by itself or was cut off.

        Raises ConfigError for a token that the model does not have.
        """
        found: list[float] = []
        for group in groups:
            rows = scored_tokens([group], self.architecture.vocab)
            if rows:
                batch = pad_rows(rows)
                found += ends_of(rows, token_values(self.model, batch)[batch.mask].tolist())
            self.report_progress()
        return take_rewards(groups, found)


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


def scored_tokens(groups: Sequence[Group], vocab: int) -> list[TokenRow]:
    """A row for every sample, in the order of groups and samples, whose last predicted token follows all of its own:
    see `ends_of`. Rows of a group have the same prompt.

    Raises ConfigError for a token beyond the `vocab` tokens of the reward model.
    """
    nothing = np.zeros(1, dtype=np.int32)  # what is predicted is of no interest; where it would be, is
    rows = []
    for group in groups:
        for sample in group.samples:
            tokens = np.concatenate([group.prompt_ids, sample.token_ids])
            if tokens.max(initial=0) >= vocab:
                raise ConfigError(
                    f"group {group.id} has token {tokens.max()}; the reward model has {vocab} tokens.",
                    hint="A reward model reads the policy's tokens: it must have the same tokenizer.",
                )
            rows.append(TokenRow(group.prompt_ids, np.concatenate([sample.token_ids, nothing])))
    return rows


def ends_of(rows: Sequence[TokenRow], values: Sequence[float]) -> list[float]:
    """Of the values before each predicted token of the rows, one row's after the other's, each row's last: what the
    model says at its end."""
    ends = np.cumsum([len(row.token_ids) for row in rows], dtype=int) - 1
    return [values[end] for end in ends]


def take_rewards(groups: list[Group], found: Sequence[float]) -> list[Group]:
    """Raises UserCodeError for what is no finite number."""
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
    return groups
