"""The built-in classes of the reward role.

Invariants:
- *scores once, the same way*: see `gyre.workloads.rewards.functions`;
- *a failure is never a reward*: see `gyre.workloads.rewards.pool`.

This module must not import torch.
"""

from __future__ import annotations

from typing import Any

from gyre.config.sections import RewardSettings, read_section
from gyre.rollouts.samples import Group
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.rewards.functions import exact_match, load_function
from gyre.workloads.rewards.pool import RewardPool
from gyre.workloads.tasks.task import task_of


class ExactMatchReward(BaseWorkload):
    """Scores finished answers against `meta["answer"]`; a sample cut off by its length is wrong."""

    SCORES_EACH_SAMPLE = True

    def setup(self) -> None:
        self.task = task_of(self.config)

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
    """Scores with `config["reward"]["function"]`, in a pool of processes.

    The function takes the prompt's text, the completion's text and the group's meta, and returns a number. The meta
    also says how the sample ended, as `finish_reason`: `stop`, or `length` where it was cut off.
    """

    SCORES_EACH_SAMPLE = True

    def setup(self) -> None:
        self.task = task_of(self.config)
        settings = read_section(RewardSettings, self.config, "reward")
        load_function(settings.function)  # raises before the first sample
        self.pool = RewardPool(settings)

    def teardown(self) -> None:
        self.pool.close()

    def health(self) -> dict[str, Any]:
        return {**super().health(), "stuck_samples": self.pool.stuck}

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        """The same groups, with `reward` set on every sample. Raises UserCodeError; see `RewardPool.score`."""
        work = [
            (
                self.task.prompt_text(group),
                self.task.answer_of(sample),
                group.meta | {"finish_reason": sample.finish_reason},
            )
            for group in groups
            for sample in group.samples
        ]
        rewards = iter(self.pool.score(work, on_scored=self.report_progress))
        for group in groups:
            for sample in group.samples:
                sample.reward = next(rewards)
        return groups
