"""The class of the role `reward` in a job with agents: a session has its reward before its group is delivered.

This module must not import torch.
"""

from __future__ import annotations

from gyre.errors import UserCodeError
from gyre.rollouts.samples import Group
from gyre.workloads.base import BaseWorkload, operator


class SessionReward(BaseWorkload):
    """Keeps the rewards that sessions ended with. They come with whole groups."""

    SCORES_EACH_SAMPLE = False

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        """The same groups. Raises UserCodeError for a sample without a reward, which is none of a session."""
        for group in groups:
            if any(sample.reward is None for sample in group.samples):
                raise UserCodeError(
                    f"a sample of group {group.id} has no reward, so it is none of a session.",
                    hint="SessionReward keeps the rewards of agents; name another class for roles.reward.",
                )
            self.report_progress()
        return groups
