"""What groups of runs are called: by what the names of their members begin with, and by the settings in which they
differ from each other.

Pure. This module must not know where a run's settings are kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gyre.api.runs.table import GroupedRuns
from gyre.observe.run_lines import NOT_THE_EXPERIMENT

NAMED = 100
"""Groups whose settings are looked at: a table of more is not read line by line, and each costs a read of its spec."""

SETTINGS = 3
"""Settings of a group that are named; the others are counted."""

LONGEST_VALUE = 28
LEAST_BEGINNING = 2
"""Characters: one letter names nothing."""

_BETWEEN = "[-_.: /]"
_OF_THE_SEED = re.compile(rf"(?:{_BETWEEN}+(?:s|seed)?{_BETWEEN}*)$", re.IGNORECASE)
"""What stands between the name of an experiment and the number of its seed."""
_WHOLE = re.compile(rf"{_BETWEEN}|\d|$")
_PARTS = re.compile(rf"^(.*){_BETWEEN}")


def named(groups: Sequence[GroupedRuns], specs: Mapping[str, Mapping[str, Any]]) -> list[GroupedRuns]:
    """The groups of runs that differ in their seed alone, with their titles and settings. `specs`: of the first member
    of each group, by its id, with every default; a group of which there is none keeps its key."""
    beginnings = [beginning_of(group.names) for group in groups]
    told = settings_of([specs.get(group.jobs[0]) for group in groups])
    times = Counter(beginnings)
    found = []
    for group, beginning, settings in zip(groups, beginnings, told, strict=True):
        title = beginning if times[beginning] == 1 else ""
        found.append(replace(group, title=title or settings or _listed(group.names), settings=settings))
    return found


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def beginning_of(names: Sequence[str]) -> str:
    """What names begin with, without a seed's number: of `lr-2e-4-s1` and `lr-2e-4-s2` it is `lr-2e-4`; "" where they
    share nothing."""
    shared = _common(names)
    if any(name != shared for name in names):
        if any(name[len(shared) :][:1].isdigit() for name in names):
            shared = shared.rstrip("0123456789")
        shared = _OF_THE_SEED.sub("", shared)
        if not all(_WHOLE.match(name[len(shared) :]) for name in names):  # they part within a word
            parts = _PARTS.match(shared)
            shared = parts[1] if parts else ""
    return shared if len(shared) >= LEAST_BEGINNING else ""


def _common(names: Sequence[str]) -> str:
    """The longest text that all names begin with."""
    first, last = min(names), max(names)
    return first[: next((at for at, char in enumerate(first) if last[at : at + 1] != char), len(first))]


def settings_of(specs: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Of each spec the settings that are not what most of them have, as `optim.lr 2e-4, run.steps 40`."""
    flat = [None if spec is None else _flat(spec) for spec in specs]
    known = [one for one in flat if one is not None]
    # The recipe sets others, and what is asked of the machine is seldom what a run is about.
    keys = sorted(
        dict.fromkeys(key for one in known for key in one),
        key=lambda key: (key != "recipe", not key.startswith("config.")),
    )
    usual = {key: Counter(one.get(key, "") for one in known).most_common(1)[0][0] for key in keys}
    found = []
    for one in flat:
        parts = [
            f"{key.removeprefix('config.')} {one.get(key) or 'none'}"
            for key in (keys if one is not None else ())
            if one is not None and one.get(key, "") != usual[key]
        ]
        more = f" and {len(parts) - SETTINGS} more" if len(parts) > SETTINGS else ""
        found.append(", ".join(parts[:SETTINGS]) + more)
    return found


def _flat(spec: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}

    def walk(value: Any, at: str) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(inner, f"{at}.{key}" if at else str(key))
        elif at != "config.seed":
            found[at] = value_text(value)

    walk({key: value for key, value in spec.items() if key not in NOT_THE_EXPERIMENT}, "")
    return found


def value_text(value: Any) -> str:
    """A setting's value, short: `2e-4`, `0.6`, `grpo`."""
    if isinstance(value, float) and value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.6e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    text = f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
