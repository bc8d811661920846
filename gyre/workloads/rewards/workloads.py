"""The built-in classes of the reward role.

Invariants:
- *scores once, the same way*: see `gyre.workloads.rewards.functions`;
- *a failure is never a reward*: see `gyre.workloads.rewards.pool`.

This module must not import torch.
"""

from __future__ import annotations

from typing import Any

from gyre.config.sections import RewardSettings, read_section
from gyre.rollouts.samples import MORE, Group, Sample
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.rewards.calls import Texts
from gyre.workloads.rewards.functions import exact_match, tells_unreadable
from gyre.workloads.rewards.pool import RewardPool
from gyre.workloads.tasks.task import task_of


class ExactMatchReward(BaseWorkload):
    """Scores finished answers against `meta["answer"]`; a sample that was cut off at its length limit is wrong."""

    SCORES_EACH_SAMPLE = True

    def setup(self) -> None:
        self.task = task_of(self.config)

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        """The same groups, with `reward` set to 1.0 or 0.0 on every sample."""
        for group in groups:
            for sample in group.samples:
                right = exact_match("", self.task.answer_of(sample), group.meta)
                sample.reward = right if sample.finish_reason == "stop" else 0.0
            self.report_progress()
        return groups


class PythonReward(BaseWorkload):
    """Scores with `config["reward"]["function"]`, or with the weighted sum of several `functions`, in a pool of
    processes.

    Each function has one of the forms of `gyre.workloads.rewards.forms`. A sample's meta is the group's; it also says
    how the sample ended, as `finish_reason`: `stop`, or `length` where it was cut off.
    """

    SCORES_EACH_SAMPLE = True

    def setup(self) -> None:
        self.task = task_of(self.config)
        self.pool = RewardPool(read_section(RewardSettings, self.config, "reward"))
        self.unreadable = 0
        try:
            self.pool.begin()  # raises before the first sample
        except BaseException:
            self.pool.close()
            raise

    def teardown(self) -> None:
        self.pool.close()

    def health(self) -> dict[str, Any]:
        return {**super().health(), "stuck_samples": self.pool.stuck, "unreadable_golds": self.unreadable}

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        """The same groups, with `reward` set on every sample, and in `extras` what else the functions returned of
        it; all rows of a rollout have what they returned of its last one. Raises UserCodeError, ConfigError; see
        `RewardPool.scored`."""
        rollouts = [
            (group, [group.samples[at] for at in rows]) for group in groups for rows in group.rollouts
        ]
        work = [self._texts(group, rows[-1]) for group, rows in rollouts]
        scored = self.pool.scored(work, on_scored=self.report_progress, on_wait=self.report_progress)
        for (_, rows), (reward, more) in zip(rollouts, scored, strict=True):
            self.unreadable += tells_unreadable(more)
            for sample in rows:
                sample.reward = reward
                sample.extras |= {f"{MORE}{name}": value for name, value in more.items()}
        return groups

    def _texts(self, group: Group, sample: Sample) -> Texts:
        meta = group.meta | {"finish_reason": sample.finish_reason}
        tokens = {name for form in self.pool.forms for name in form.tokens}
        if "prompt_ids" in tokens:
            meta["prompt_ids"] = group.prompt_ids.tolist()
        if "completion_ids" in tokens:
            meta["completion_ids"] = sample.token_ids.tolist()
        return self.task.prompt_text(group), self.task.answer_of(sample), meta


class PythonGroupReward(PythonReward):
    """`PythonReward` for a function of a batch that compares the samples of a prompt: it gets whole groups."""

    SCORES_EACH_SAMPLE = False
