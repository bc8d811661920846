"""What goes with a trainer's call to a vertex besides the arguments that the caller chose.

A user's method says by the names of its parameters what it wants of it; see `gyre.workloads.protocols`. This module
must not know which methods there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gyre.workloads.vertex.returns import Expected


@dataclass(frozen=True, slots=True)
class CallInfo:
    """Sent with every call. The fields up to `background` are offered to the method, those that are not None; the
    others are for the host alone."""

    step: int | None = None
    index: int | None = None
    indices: int | None = None
    group_ids: Sequence[int] | None = None
    halved: int | None = None
    skip: bool | None = None
    background: bool | None = None

    gang_call: tuple[int, int] | None = None
    """The numbers of the gang and of the call in it, of a call that every rank gets."""
    added_only: bool = False
    """Whether the answer is not the groups that the method returns but what it added to them."""
    expected: Expected | None = None
    """What the method must return: something else fails the call. None where nothing is checked."""

    def wanted_by(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The keyword arguments that the function gets: of what is offered, what its signature names."""
        offered = {
            "step": self.step,
            "index": self.index,
            "indices": self.indices,
            "group_ids": self.group_ids,
            "halved": self.halved,
            "skip": self.skip,
            "background": self.background,
        }
        offered = {name: value for name, value in offered.items() if value is not None}
        if not offered:
            return {}  # what has no signature, such as a builtin, can still be called
        parameters = inspect.signature(function).parameters
        return {name: value for name, value in offered.items() if name in parameters}


NOTHING_OFFERED = CallInfo()
