"""The sections `config.task` and `config.warm_start`: a task that needs no data set, and its supervised start."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from gyre.config.plugins import TASK, TaskName
from gyre.config.sections.section import Section

_KEYS_OF = {
    "arithmetic": {"digits", "operators", "held_out_every", "zero_padded", "reversed_answer"},
    "rows": {"file", "held_out_every"},
}
"""By built-in task, the keys that are its own."""


class TaskSettings(Section):
    """Arithmetic problems, such as `37+58=`; the rows of a small file; or a task of one's own."""

    name: TaskName = "arithmetic"
    """`arithmetic`; `rows`, the rows of `file`; or your own class, `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own class. The keys below are of the built-in tasks."""
    file: str = ""
    """Of `rows`: a JSONL file with `prompt` and, where there is one, `answer` in each row. Every character is a token,
    so it needs no tokenizer; it suits a small decoder of `model`."""
    digits: Annotated[int, Field(ge=1, le=9)] = 2
    """Of `arithmetic`: the most digits of an operand."""
    operators: Annotated[str, Field(min_length=1)] = "+"
    """Of `arithmetic`: some of the characters `+-*`."""
    held_out_every: Annotated[int, Field(ge=2)] = 8
    """One problem, or one row, in this many is never trained on."""
    zero_padded: bool = True
    """Of `arithmetic`: whether operands are written with all their digits."""
    reversed_answer: bool = True
    """Of `arithmetic`: whether the answer is written units first, which is easier to learn (arXiv 2307.03381)."""

    @model_validator(mode="after")
    def _each_task_has_its_own_settings(self) -> TaskSettings:
        given = sorted(self.model_fields_set - {"name", "options"} - _KEYS_OF.get(self.name, set()))
        if self.name not in TASK.built_in and given:
            raise ValueError(
                f"{given[0]} is a setting of a built-in task; give those of {self.name} as options"
            )
        if given:
            raise ValueError(f"the task {self.name!r} takes no {given[0]}")
        if self.name in TASK.built_in and self.options:
            raise ValueError(f"options are given, but the task {self.name!r} takes none")
        if self.name == "rows" and not self.file:
            raise ValueError("the task 'rows' needs a file: a JSONL file of rows with prompt and answer")
        return self

    @property
    def prompt_tokens(self) -> int:
        """Of `arithmetic`: tokens of the longest prompt: two operands, what is between and after them, and a start."""
        return 2 * self.digits + 3

    @property
    def own(self) -> dict[str, Any]:
        """The settings that the task reads, by key."""
        if self.name not in TASK.built_in:
            return {"name": self.name, "options": self.options}
        return {
            key: getattr(self, key)
            for key in type(self).model_fields
            if key in {"name", *_KEYS_OF[self.name]}
        }

    @field_validator("operators")
    @classmethod
    def _operators_are_known(cls, value: str) -> str:
        if not set(value) <= set("+-*"):
            raise ValueError("must be made of the characters +, - and *")
        return value


class WarmStartSettings(Section):
    """Supervised steps before the reinforcement learning, on what a forgetful pupil writes: of arithmetic, they often
    forget to carry (see `ArithmeticTask.demonstrations`); a task of your own may have `demonstrations`, too."""

    max_steps: Annotated[int, Field(ge=0)]
    """Supervised steps at most."""
    batch: Annotated[int, Field(ge=1)]
    """Problems in a supervised step."""
    lr: Annotated[float, Field(gt=0)]
    """Learning rate of the supervised steps."""
    stop_at: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The rate of exact agreement with the pupil at which the supervised start ends."""
    slips: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The part of the problems in which the pupil forgets: in arithmetic, to carry."""
