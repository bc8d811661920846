"""The reward of the jobs on engines of others."""

from __future__ import annotations

import time

from gyre.rollouts import Group
from gyre.workloads import BaseWorkload, operator

PROMPTS = 8
"""Of a step."""


class LengthReward(BaseWorkload):
    """The longer the better: there is a gradient from the first step, and samples long enough to be interrupted.

    It scores as many steps as the file `steps` in the job's directory allows. At the next one the job waits, however
    fast the machine, and generates what it may.
    """

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        step = groups[0].id // PROMPTS
        while step >= self._allowed():
            self.report_progress()
            time.sleep(0.05)
        longest = self.config["sampling"]["max_new_tokens"]
        for group in groups:
            for sample in group.samples:
                sample.reward = len(sample.token_ids) / longest
        return groups

    def _allowed(self) -> int:
        try:
            return int((self.context.directory / "steps").read_text())
        except FileNotFoundError:  # nobody has allowed any
            return 0
