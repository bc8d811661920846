"""What a reward function returned, as a number for each sample.

Invariant *a failure is never a reward*: whatever is not a finite number, or a mapping with one, is refused, and the
sentence says what it was.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence, Set
from typing import Any

SCORE = ("score", "reward")
"""The keys of a mapping that may hold the reward of a sample; the first that is there counts."""
SCORES = ("rewards", "scores", "score", "reward")
"""The same for a whole batch."""
MOST_MORE, LONGEST_NAME = 32, 64
"""So many further numbers of a sample are kept, with names of so many characters."""

Scored = tuple[float, dict[str, float]]
"""A sample's reward, and the further numbers that its function returned by name."""


class NoReward(ValueError):
    """The function returned something that is no reward. `index` is the sample's in its batch, None where it is the
    whole batch's fault."""

    def __init__(self, why: str, index: int | None = None) -> None:
        super().__init__(why)
        self.index = index


def read_one(returned: Any) -> Scored:
    """What a function of one sample returned: a number, or a mapping or dataclass with `score`. Raises NoReward."""
    returned = _as_mapping(returned)
    if isinstance(returned, Mapping):
        key = next((key for key in SCORE if key in returned), None)
        if key is None:
            raise NoReward(f"it returned a mapping with {_keys(returned)} and without 'score'")
        return _number(returned[key], f"it returned {key!r}: "), _more(returned, key)
    return _number(returned, "it returned "), {}


def read_batch(returned: Any, count: int) -> list[Scored]:
    """What a function of `count` samples returned: a list, a tensor, or a mapping or dataclass with `rewards`. Raises
    NoReward."""
    returned = _as_mapping(returned)
    more: list[dict[str, float]] = [{} for _ in range(count)]
    if isinstance(returned, Mapping):
        key = next((key for key in SCORES if key in returned), None)
        if key is None:
            raise NoReward(f"it returned a mapping with {_keys(returned)} and without 'rewards'")
        logs = returned.get("extra_logs")
        columns = {name: value for name, value in returned.items() if name not in (key, "extra_logs")}
        for name, values in {**columns, **(logs if isinstance(logs, Mapping) else {})}.items():
            _add(more, str(name), _listed(values))
        returned = returned[key]
    values = _listed(returned)
    if values is None:
        raise NoReward(f"it returned {_shown(returned)}, expected a list of {count} rewards")
    if len(values) != count:
        raise NoReward(f"it returned {len(values)} rewards for {count} samples")
    read = []
    for index, value in enumerate(values):
        try:
            reward, its = read_one(value)
        except NoReward as error:
            raise NoReward(str(error), index) from None
        read.append((reward, more[index] | its))
    return read


def combined(parts: Sequence[tuple[str, float]], scored: Sequence[Scored]) -> Scored:
    """The weighted sum of what several functions returned of a sample, by each one's name and weight. Kept beside it
    are each one's own score, under its name, and its further numbers, under `NAME.NUMBER`."""
    more = {name: score for (name, _), (score, _) in zip(parts, scored, strict=True)}
    most = len(more) + MOST_MORE
    for (name, _), (_, its) in zip(parts, scored, strict=True):
        for key, value in its.items():
            if len(more) < most:
                more[f"{name}.{key}"] = value
    return sum(weight * score for (_, weight), (score, _) in zip(parts, scored, strict=True)), more


def _as_mapping(returned: Any) -> Any:
    """A dataclass as a mapping of its fields; anything else as it is."""
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    return returned


def _number(value: Any, said: str) -> float:
    """A finite number: Python's, NumPy's, torch's of one element, a Decimal, a bool."""
    if isinstance(value, str | bytes) or value is None:
        raise NoReward(f"{said}{_shown(value)}, which is no number")
    if not isinstance(value, numbers.Number) and hasattr(value, "tolist"):
        value = value.tolist()  # NumPy's and torch's
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
    try:
        if isinstance(value, str | bytes):  # of an array of texts
            raise TypeError
        found = float(value)
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        raise NoReward(f"{said}{_shown(value)}, which is no number") from None
    if not math.isfinite(found):
        raise NoReward(f"{said}{found}, which is no reward")
    return found


def _more(returned: Mapping[Any, Any], key: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in returned.items():
        if name == key or len(found) == MOST_MORE:
            continue
        try:
            found[as_utf8(str(name)[:LONGEST_NAME])] = _number(value, "")
        except NoReward:
            continue  # texts and lists are not kept
    return found


def _add(more: list[dict[str, float]], name: str, values: list[Any] | None) -> None:
    if values is None or len(values) != len(more):
        return
    for its, value in zip(more, values, strict=True):
        if len(its) < MOST_MORE:
            its |= _more({name: value}, "")


def _listed(value: Any) -> list[Any] | None:
    if hasattr(value, "tolist"):
        value = value.tolist()
        return value if isinstance(value, list) else None
    # A set has an order, and not that of the samples.
    if isinstance(value, str | bytes | Mapping | Set) or not hasattr(value, "__iter__"):
        return None
    return list(value)


def as_utf8(text: str) -> str:
    """The text with half characters written out, which no frame can carry."""
    return text.encode(errors="backslashreplace").decode()


def _keys(returned: Mapping[Any, Any]) -> str:
    return f"the keys {', '.join(map(repr, list(returned)[:8]))}" if returned else "no keys"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:80]}… ({type(value).__name__})" if len(text) > 80 else f"{text} ({type(value).__name__})"
