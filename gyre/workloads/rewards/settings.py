"""The section `config.reward`. This module must not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gyre.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """What `PythonReward` calls, and how its processes are kept."""

    function: str = ""
    """`exact_match`, `math_verify`, `package.module:function` or `path/to/file.py:function`."""
    processes: int = 2
    """Of each reward vertex."""
    timeout_s: float = 10.0
    """For one sample; a process that takes longer is ended."""
    attempts: int = 2
    """How often a sample whose process hung or died is tried, each time in a new process."""
    stuck_score: float | None = None
    """What a sample earns whose process hung or died in every attempt; none: the call fails. An answer that nobody can
    check, such as 9^(9^(9^9)), is an answer of the policy's, which a job should live through."""
    start_timeout_s: float = 60.0
    """For a process to import the function."""

    def check(self) -> None:
        """Raises ConfigError for a value outside its range."""
        if min(self.processes, self.attempts) < 1 or min(self.timeout_s, self.start_timeout_s) <= 0:
            raise ConfigError(
                "config.reward: processes and attempts must be at least 1, timeout_s and start_timeout_s positive."
            )
        if self.stuck_score is not None and not math.isfinite(self.stuck_score):
            raise ConfigError(f"config.reward.stuck_score must be a finite number, not {self.stuck_score}.")
