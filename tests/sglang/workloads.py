"""The reward of the jobs on SGLang."""

from __future__ import annotations

import time

from gyre.rollouts import Group
from gyre.workloads import BaseWorkload, operator


class LengthReward(BaseWorkload):
    """The longer the better: there is a gradient from the first step, and samples long enough to be interrupted.

    While the file `hold` is in the job's directory nothing is scored: the job waits, and generates what it may.
    """

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        while (self.context.directory / "hold").exists():
            self.report_progress()
            time.sleep(0.05)
        longest = self.config["sampling"]["max_new_tokens"]
        for group in groups:
            for sample in group.samples:
                sample.reward = len(sample.token_ids) / longest
        return groups
