"""Which reward an answer must earn to be right, where the job does not say it: that of Gyre's own rewards of right and
wrong. Of any other reward nobody knows, for 1 may stand for a format that was kept.

This module must not know how answers are scored.
"""

from __future__ import annotations

from gyre.config import JobSpec
from gyre.config.sections import EvaluationSettings, RewardSettings, read_section

RIGHT = 1.0
_REWARDS = "gyre.workloads.rewards"
_EXACT = "ExactMatchReward"
_FUNCTIONS = ("exact_match", "math_verify")
"""The functions of Gyre's own, which return 1.0 for a right answer and else 0.0."""


def evaluation_of(spec: JobSpec) -> EvaluationSettings:
    """The section `evaluation`, with `threshold` where the job's rewards are of right and wrong. Raises ConfigError."""
    settings = read_section(EvaluationSettings, spec.config, "evaluation")
    if settings.threshold is None and tells_right(spec):
        return settings.model_copy(update={"threshold": RIGHT})
    return settings


def tells_right(spec: JobSpec) -> bool:
    """Whether a reward of Gyre's own says of each answer that it is right or wrong."""
    entrypoints = [role.entrypoint for role in spec.roles.values() if role.entrypoint is not None]
    own = {entrypoint.name for entrypoint in entrypoints if entrypoint.module == _REWARDS}
    function = read_section(RewardSettings, spec.config, "reward").function
    return _EXACT in own or ("PythonReward" in own and function in _FUNCTIONS)
