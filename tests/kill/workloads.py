"""Workloads of the kill tests: the real ones, slowed down so that there is something to interrupt."""

from __future__ import annotations

import time

from gyre.rollouts import Group
from gyre.workloads import operator
from gyre.workloads.torch import TorchRollout


class PacedRollout(TorchRollout):
    """Generates as ever, and takes at least `config["pace_s"]` for it."""

    @operator
    def generate(self, groups: list[Group], *, step: int) -> list[Group]:
        time.sleep(self.config["pace_s"])
        return super().generate(groups, step=step)
