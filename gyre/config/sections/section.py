"""What every section of a job's `config` has in common.

Invariants:
- *no silent typo*: an unknown key fails with its path and the nearest known key;
- *typed*: a value of the wrong type or outside its range fails with its path; an integer is a fine float, a boolean
  is no number, and text is neither;
- *one default*: the default of a setting is the default of its field, and is written nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gyre.config.parse import config_error
from gyre.errors import ConfigError


class Section(BaseModel):
    """The base of a section: a frozen model that takes no key besides its fields.

    A workload of your own may derive its sections from it, and name them in `BaseWorkload.SECTIONS`.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


S = TypeVar("S", bound=BaseModel)


def read_section(kind: type[S], config: Mapping[str, Any], name: str) -> S:
    """The section `name` of a job's `config`; an absent section is an empty one. Raises ConfigError."""
    return read_mapping(kind, config.get(name, {}), f"config.{name}")


def read_mapping(kind: type[S], values: Any, path: str) -> S:
    """`values` as a `kind`. Raises ConfigError, one sentence for each mistake, with paths that begin with `path`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: {values!r} given, expected a mapping of keys to values.")
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise config_error(error, kind, path) from None
