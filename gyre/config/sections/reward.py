"""The sections `config.reward` and `config.reward_model`: how answers are scored."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from gyre.config.sections.section import Section

PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


MOST_FUNCTIONS = 16
"""Each is a number of every sample and of every step."""

Signature = Literal["auto", "sample", "batch", "verl", "trl", "openrlhf"]


class RewardPart(Section):
    """One of several reward functions, and what share of the reward it is."""

    function: str
    """`exact_match`, `math_verify`, `package.module:function` or `path/to/file.py:function`."""
    weight: FiniteFloat = 1.0
    """What its score is multiplied by; the reward is the sum. 0 shows a score that earns nothing."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,32}$")] = ""
    """What its score is called, in samples and metrics; "" takes the function's own name."""
    signature: Signature = "auto"
    """How it is called; `auto` knows it by the names of its parameters."""

    @property
    def called(self) -> str:
        """Its name, or else the function's own, as far as a metric can have it."""
        return self.name or re.sub(r"[^A-Za-z0-9_-]", "_", self.function.rpartition(":")[2])[:32]


class RewardSettings(Section):
    """What `PythonReward` calls, and how its processes are kept."""

    function: str = ""
    """`exact_match`, `math_verify`, `package.module:function` or `path/to/file.py:function`."""
    functions: Annotated[list[RewardPart], Field(max_length=MOST_FUNCTIONS)] = Field(default_factory=list)
    """Several instead: the reward is the weighted sum of their scores, and each score is kept and drawn."""
    signature: Signature = "auto"
    """How the function is called; `auto` knows it by the names of its parameters. Of several each has its own."""
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
    """Time for a process to import the function, or all of several."""

    @property
    def parts(self) -> tuple[RewardPart, ...]:
        """The functions; the one `function` as a list of one."""
        return tuple(self.functions) or (RewardPart(function=self.function, signature=self.signature),)

    def of(self, part: RewardPart) -> RewardSettings:
        """The settings of a pool that has this function alone."""
        own = {"function": part.function, "signature": part.signature, "functions": []}
        return self.model_copy(update=own)

    def in_place(self, place: int, text: str) -> str:
        """A text about the function at this place, which names its keys as those of the one `function`, with the keys
        that the job has for it: `config.reward.functions[1].function`."""
        if not self.functions:
            return text
        return re.sub(
            r"config\.reward\.(function|signature)\b", rf"config.reward.functions[{place}].\1", text
        )

    @model_validator(mode="after")
    def _functions_have_names_of_their_own(self) -> RewardSettings:
        if self.functions and self.function:
            raise ValueError("function and functions exclude each other: make it one of functions")
        if self.functions and self.signature != "auto":
            raise ValueError("signature is of one function: each of functions has a signature of its own")
        names = [part.called for part in self.functions]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two functions are called {twice!r}: give one of them a `name`")
        return self


class RewardModelSettings(Section):
    """Which model `TorchRewardModel` and `MegatronRewardModel` score with."""

    path: str = ""
    """The reward model's folder."""
