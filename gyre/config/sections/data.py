"""The section `config.data`: the prepared data set that a job draws its prompts from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from gyre.config.sections.section import Section


class DataSettings(Section):
    """A prepared data set, and which of its prompts are held out."""

    path: Annotated[str, Field(min_length=1)]
    """A folder that `gyre data prepare` made."""
    held_out: str = ""
    """Another prepared folder, for evaluation; "" for none."""
    held_out_every: Annotated[int, Field(ge=0)] = 0
    """One prompt in this many of `path` is held out, by its hash. 0 holds none out."""
    shuffle: bool = True
    """Whether every epoch is drawn in an order of its own, by `seed`."""
    digest: str = ""
    """What the manifest of `path` must say, so that nobody trains on another data set; "" takes any."""

    @field_validator("held_out_every")
    @classmethod
    def _something_is_left_to_train_on(cls, value: int) -> int:
        if value == 1:
            raise ValueError("must be 0, or at least 2: else every prompt is held out")
        return value

    @model_validator(mode="after")
    def _held_out_one_way(self) -> DataSettings:
        if self.held_out and self.held_out_every:
            raise ValueError("held_out and held_out_every are both given; keep one of them")
        return self
