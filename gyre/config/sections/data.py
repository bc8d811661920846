"""The section `config.data`: the prepared data set that a job draws its prompts from."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from gyre.config.sections.section import Section

HELD_OUT = "held_out"
"""The name of a job's only held-out set, where nothing else names it."""

SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""A held-out set's name; it is part of the names of requests and of metrics."""


class DataSettings(Section):
    """A prepared data set, and which of its prompts are held out."""

    path: Annotated[str, Field(min_length=1)]
    """A folder that `gyre data prepare` made."""
    held_out: str | dict[str, str] = ""
    """Another prepared folder, for evaluation; or several by name, `{math500: FOLDER, aime: FOLDER}`, each with results
    of its own; "" for none."""
    held_out_every: Annotated[int, Field(ge=0)] = 0
    """One prompt in this many of `path` is held out, by its hash. 0 holds none out."""
    shuffle: bool = True
    """Whether every epoch is drawn in an order of its own, by `seed`."""
    digest: str = ""
    """Digest that the folder `path` must have, so that no other data set is trained on; "" takes any."""

    @property
    def held_out_sets(self) -> dict[str, str]:
        """The folders of the held-out sets by name, in its order; that of a plain `held_out` is named `held_out`."""
        if isinstance(self.held_out, str):
            return {HELD_OUT: self.held_out} if self.held_out else {}
        return dict(sorted(self.held_out.items()))

    @property
    def held_out_keys(self) -> dict[str, str]:
        """The same folders by the configuration's key."""
        if isinstance(self.held_out, str):
            return {"config.data.held_out": self.held_out} if self.held_out else {}
        return {f"config.data.held_out.{name}": folder for name, folder in self.held_out.items()}

    @field_validator("held_out", mode="before", json_schema_input_type=str | dict[str, str])
    @classmethod
    def _sets_have_names_and_folders(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            if not isinstance(value, str):
                raise ValueError("must be a folder, or a mapping of names to folders")
            return value
        for name, folder in value.items():
            if not isinstance(name, str) or not SET_NAME.fullmatch(name):
                raise ValueError(f"names a set {name!r}; a name is of letters, digits, '_', '-' and '.'")
            if not isinstance(folder, str) or not folder:
                raise ValueError(f"gives {folder!r} for {name}, expected a folder")
        return value

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
