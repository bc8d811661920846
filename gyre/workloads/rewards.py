"""Rewards that need no model: exact match, and any Python function of texts.

Invariant *scores once, the same way*: a reward depends on the sample's tokens and the group's meta alone, so a
repeated call gives the same rewards. This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from gyre.errors import ConfigError
from gyre.rollouts.samples import Group
from gyre.workloads.arithmetic import ArithmeticTask
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.torch.settings import TorchSettings

RewardFunction = Callable[[str, str, Mapping[str, Any]], float]


def exact_match(prompt_text: str, completion_text: str, meta: Mapping[str, Any]) -> float:
    """1.0 where the completion is `meta["answer"]` to the character, else 0.0."""
    return 1.0 if completion_text == meta["answer"] else 0.0


class ExactMatchReward(BaseWorkload):
    """Scores finished answers against `meta["answer"]`; a sample cut off by its length is wrong."""

    def setup(self) -> None:
        self.task = ArithmeticTask(self.config)

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        """The same groups, with `reward` set to 1.0 or 0.0 on every sample."""
        for group in groups:
            for sample in group.samples:
                right = sample.finish_reason == "stop" and exact_match(
                    "", self.task.answer_of(sample), group.meta
                )
                sample.reward = 1.0 if right else 0.0
            self.report_progress()
        return groups


class PythonReward(BaseWorkload):
    """Scores with the user's `config["reward"]["function"]`, written `package.module:function`.

    The function takes the prompt's text, the completion's text and the group's meta, and returns a float.
    """

    def setup(self) -> None:
        self.task = ArithmeticTask(self.config)
        self.function = load_function(TorchSettings.read(self.config).reward.function)

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        """The same groups, with `reward` set on every sample."""
        for group in groups:
            prompt_text = self.task.prompt_text(group)
            for sample in group.samples:
                sample.reward = float(self.function(prompt_text, self.task.answer_of(sample), group.meta))
                self.report_progress()
        return groups


def load_function(path: str) -> RewardFunction:
    """The function at `package.module:function`. Raises ConfigError naming what cannot be found."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(
            f"config.reward.function is {path!r}.", hint="Write it as 'package.module:function'."
        )
    try:
        function: RewardFunction = getattr(import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"config.reward.function {path!r} cannot be loaded: {error}.") from error
    if not callable(function):
        raise ConfigError(f"config.reward.function {path!r} is not callable.")
    return function
