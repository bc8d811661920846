"""The sections `config.reward` and `config.reward_model`: how answers are scored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gyre.config.sections.section import Section

PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class RewardSettings(Section):
    """What `PythonReward` calls, and how its processes are kept."""

    function: str = ""
    """`exact_match`, `math_verify`, `package.module:function` or `path/to/file.py:function`."""
    signature: Literal["auto", "sample", "batch", "verl", "trl", "openrlhf"] = "auto"
    """How the function is called; `auto` knows it by the names of its parameters."""
    processes: PositiveInt = 2
    """Processes of each reward vertex."""
    timeout_s: Seconds = 10.0
    """Time for one sample; a process that takes longer is ended. A batch has the time of all its samples."""
    attempts: PositiveInt = 2
    """How often a sample whose process hung or died is tried, each time in a new process."""
    stuck_score: float | None = None
    """What a sample earns whose process hung or died in every attempt; without it the call fails. Some answers of a
    policy cannot be checked, such as 9^(9^(9^9)), and should not end a job."""
    start_timeout_s: Seconds = 60.0
    """Time for a process to import the function."""


class RewardModelSettings(Section):
    """Which model `TorchRewardModel` and `MegatronRewardModel` score with."""

    path: str = ""
    """The reward model's folder."""
