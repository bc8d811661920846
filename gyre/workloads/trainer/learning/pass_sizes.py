"""How large the passes of each learner are: halved after one that did not fit into memory.

A trainer that is restarted begins with whole passes again, for nothing else remembers it. Steps that were trained are
replayed with whole passes, in which they fitted, so that they give the same bits.

This module must not know what a pass is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gyre.errors import OUT_OF_MEMORY
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.messages import Failure


class PassSizes:
    """Halves a learner's passes at most `most` times. `report` sends an event to the journal."""

    def __init__(self, most: int, *, report: Callable[..., None]) -> None:
        self._most = most
        self._report = report
        self._halved: dict[str, int] = {}
        self._why: dict[str, str] = {}
        """What failed, of the roles whose ranks have not begun with smaller passes yet."""

    def halved(self, role: str) -> int:
        """How often the passes of the role are halved."""
        return self._halved.get(role, 0)

    def failed(self, blamed: tuple[Member, str, Failure]) -> None:
        """A gang was lost by this failure of one of its ranks."""
        (vertex, _), _, failure = blamed
        role = vertex.rpartition("-")[0]
        if failure.code == OUT_OF_MEMORY and self.halved(role) < self._most:
            self._halved[role] = self.halved(role) + 1
            self._why[role] = failure.error

    def begun(self, role: str, results: Sequence[Any]) -> None:
        """The role's ranks have begun a step, with these results: tell it where their passes are smaller now."""
        first = results[0] if results and isinstance(results[0], dict) else {}
        told = {key: first[key] for key in ("pass_tokens", "passes") if isinstance(first.get(key), int)}
        if role in self._why and told:
            self._report("PassesHalved", role=role, error=self._why[role], **told)
        self._why.pop(role, None)
