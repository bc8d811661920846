"""The sections `config.task` and `config.warm_start`: a task that needs no data set, and its supervised start."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from gyre.config.sections.section import Section


class TaskSettings(Section):
    """Arithmetic problems, such as `37+58=`."""

    digits: Annotated[int, Field(ge=1, le=9)] = 2
    """The most digits of an operand."""
    operators: Annotated[str, Field(min_length=1)] = "+"
    """Some of the characters `+-*`."""
    held_out_every: Annotated[int, Field(ge=2)] = 8
    """One problem in this many is never trained on."""
    zero_padded: bool = True
    """Whether operands are written with all their digits."""
    reversed_answer: bool = True
    """Whether the answer is written units first, which is easier to learn (arXiv 2307.03381)."""

    @field_validator("operators")
    @classmethod
    def _operators_are_known(cls, value: str) -> str:
        if not set(value) <= set("+-*"):
            raise ValueError("must be made of the characters +, - and *")
        return value


class WarmStartSettings(Section):
    """Supervised steps before the reinforcement learning, on the answers of a pupil who often forgets to carry (see
    `ArithmeticTask.demonstrations`)."""

    max_steps: Annotated[int, Field(ge=0)]
    """Supervised steps at most."""
    batch: Annotated[int, Field(ge=1)]
    """Problems in a supervised step."""
    lr: Annotated[float, Field(gt=0)]
    """Learning rate of the supervised steps."""
    stop_at: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The rate of exact agreement with the pupil at which the supervised start ends."""
    slips: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The part of the problems in which the pupil forgets to carry."""
