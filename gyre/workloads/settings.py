"""Sections of the job's `config` read into frozen dataclasses, which hold every default in one place.

Invariants:
- *no silent typo*: an unknown key fails with its path and the nearest known key;
- *typed*: a value of the wrong type fails with its path; an integer is a fine float, a boolean is no number.

This module must not import torch, and must not know what any setting means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gyre.errors import ConfigError, nearest

T = TypeVar("T")


def read_settings(kind: type[T], values: Any, path: str) -> T:
    """`kind(**values)`, nested dataclasses from nested mappings, defaults where nothing is said. Raises ConfigError."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must be a mapping, not {values!r}.")
    hints = get_type_hints(kind)
    taken: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"{path}.{key} is not a setting.", hint=nearest(str(key), hints))
        taken[key] = _value(hints[key], value, f"{path}.{key}")
    return kind(**taken)


def _value(kind: Any, value: Any, path: str) -> Any:
    if is_dataclass(kind):
        return read_settings(kind, value, path)  # type: ignore[arg-type]
    if get_origin(kind) is UnionType:  # `float | None`: null in YAML
        if value is None:
            return None
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if get_origin(kind) is tuple:  # `tuple[str, ...]`: a list in YAML
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise ConfigError(f"{path} must be a list, not {value!r}.")
        return tuple(_value(get_args(kind)[0], one, f"{path}[{at}]") for at, one in enumerate(value))
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{path} must be {kind.__name__}, not {value!r}.")
    return value
