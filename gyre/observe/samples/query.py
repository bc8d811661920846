"""Which samples are asked for, and what whoever answers can say of them. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gyre.errors import ConfigError

Order = Literal["step", "worst", "best"]

_ONE = r"\s*(?:(<=|>=|!=|==|<|>|=)\s*)?([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*"
_CONDITION = re.compile(_ONE)
CONDITIONS_PATTERN = f"^{_ONE}(,{_ONE})*$"
"""What `conditions_in` takes, as a regular expression."""

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """`sign` is one of `<`, `<=`, `>`, `>=`, `=`, `==` and `!=`."""

    sign: str
    number: float

    def __str__(self) -> str:
        return f"{self.sign}{self.number!r}"

    def holds(self, values: Any) -> Any:
        """Of a number a bool, of an array of them an array."""
        return _OPERATORS[self.sign](values, self.number)


def conditions_in(text: str, of: str = "reward") -> tuple[Condition, ...]:
    """`<0.2`, `=1`, or several, all of which hold: `>=0.2,<0.4`. Raises ConfigError, which names what they are `of`."""
    found = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"{of}: {text!r:.80} is no condition.",
                hint='Write "<0.2", ">=0.5", "=1" or "!=0", several with a comma between them.',
            )
        found.append(Condition(match[1] or "=", float(match[2])))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """What all samples of an answer have. None: whatever it is."""

    step: int | None = None
    group: int | None = None
    reward: tuple[Condition, ...] = ()
    tokens: tuple[Condition, ...] = ()
    """Of how many tokens the answer has."""
    outcome: str | None = None
    """An outcome, a finish reason, or the end of a session: `trained`, `stale`, `length`, `policy_fault`, …"""
    instance: str | None = None
    """An instance that generated some of its tokens."""
    version: int | None = None
    """A policy version that generated some of its tokens."""
    quarantined: bool | None = None


class SampleReader(Protocol):
    """What can be asked of a job's samples: of its files (`SampleFiles`), or of its master."""

    def steps(self) -> dict[str, Any]:
        """`steps`: of each step that is kept its number, `samples`, `groups` and `bytes`; `quarantined`: how many
        groups are."""
        ...

    def find(
        self, wanted: SampleFilter, *, order: Order = "step", limit: int = 50, offset: int = 0
    ) -> dict[str, Any]:
        """`samples`: a page of those that the filter lets through, with texts that are cut; `total` of them; and the
        `histogram` of all their rewards: `edges`, one more than there are `counts`."""
        ...

    def sample(self, step: int, group: int, sample: int) -> dict[str, Any]:
        """One sample with all that is kept of it. Raises NotFound."""
        ...

    def held_out_sets(self) -> dict[str, Any]:
        """`sets`: of each held-out set its name as `set` and the `versions` whose answers are kept."""
        ...

    def held_out(
        self,
        name: str,
        *,
        version: int | None = None,
        against: int | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> dict[str, Any]:
        """A page of what a version answered to a held-out set, the newest if none is named, and what the version
        `against` did beside it: see `gyre.observe.samples.held_out`. Raises NotFound."""
        ...
