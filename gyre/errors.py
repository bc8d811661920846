"""Every error that Gyre raises on purpose.

    GyreError
    ├── ConfigError          what the user wrote cannot be a job            exit 2
    │   └── GraphError       the roles and edges cannot run                 exit 2
    ├── StoreError           the journal cannot be read or written          exit 3
    │   ├── SchemaTooNew     written by a newer Gyre                        exit 3
    │   ├── StoreCorrupt     not a database, or a damaged one               exit 3
    │   └── StoreFull        no space left                                  exit 3
    ├── Unreachable          no cluster, no master, no address              exit 3
    ├── Unauthorized         a token is missing or wrong                    exit 3
    ├── NotFound             no such job, vertex or role                    exit 4
    ├── Conflict             the job's state does not permit it             exit 5
    ├── JobFailed            the job ended, and not well                    exit 1
    ├── Fenced               the caller was replaced by a newer one
    ├── VertexDied           a vertex died while it was being called
    ├── RanksMissing         ranks of a gang did not meet in time
    └── UserCodeError        the user's own code raised

Each has a stable `code`, says what happened and to what, and what to do about it (`hint`). They cross
process boundaries, so each pickles from its own keyword arguments.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

NOT_FINITE, OUT_OF_MEMORY = "actor.not_finite", "out_of_memory"
"""Codes of failures that the coordinator has decisions of its own for: a gradient with NaN or infinity in it; an
allocation that a device or the host had no memory for, which no class of ours raises."""


NO_SPACE = "no_space"
"""Code of a write that failed because its disk, or the user's share of it, is full; no class of ours raises it."""

NO_SPACE_SAID = ("No space left on device", "Disk quota exceeded", "database or disk is full")
"""The words of a process, of a library or of the operating system for it."""


class GyreError(Exception):
    """The root. `code` is stable across releases; `exit_code` is what the command line returns."""

    code = "gyre"
    exit_code = 1
    http_status = 500

    def __init__(self, message: str, *, hint: str = "", details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: dict[str, Any] = details or {}

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.details))


def _rebuild(kind: type[GyreError], message: str, hint: str, details: dict[str, Any]) -> GyreError:
    return kind(message, hint=hint, details=details)


class ConfigError(GyreError):
    code = "config"
    exit_code = 2
    http_status = 422


class GraphError(ConfigError):
    code = "graph"


def is_configuration(code: str) -> bool:
    """Whether the code is of a ConfigError: a mistake in what the user wrote, which no retry changes."""
    return code in (ConfigError.code, GraphError.code) or code.startswith(f"{ConfigError.code}.")


def is_no_space(code: str) -> bool:
    """Whether the code is of a write that failed for want of room on a disk."""
    return code in NO_SPACE_CODES


def says_no_space(text: str) -> bool:
    """Whether the words of a process, of a library or of the operating system say that a disk has no room."""
    return any(sign in text for sign in NO_SPACE_SAID)


class StoreError(GyreError):
    code = "store"
    exit_code = 3
    http_status = 503


class SchemaTooNew(StoreError):
    code = "store.schema_too_new"


class StoreCorrupt(StoreError):
    code = "store.corrupt"


class StoreFull(StoreError):
    code = "store.full"


NO_SPACE_CODES = (NO_SPACE, StoreFull.code)


class StoreLost(StoreError):
    """The store is not where it was opened, or not the same any more. Nothing is committed until it is back."""

    code = "store.lost"


class Unreachable(GyreError):
    code = "unreachable"
    exit_code = 3
    http_status = 503


class Unauthorized(GyreError):
    code = "unauthorized"
    exit_code = 3
    http_status = 401


class NotFound(GyreError):
    code = "not_found"
    exit_code = 4
    http_status = 404


class Conflict(GyreError):
    code = "conflict"
    exit_code = 5
    http_status = 409


class JobFailed(GyreError):
    code = "job_failed"
    exit_code = 1


class Fenced(GyreError):
    """A newer epoch or term exists. The process that sees this stops: it has been replaced."""

    code = "fenced"
    http_status = 409


class VertexDied(GyreError):
    code = "vertex_lost"
    http_status = 503


class RanksMissing(GyreError):
    """Ranks of a gang did not meet in time. A symptom: why some did not come stands elsewhere."""

    code = "ranks_missing"


class UserCodeError(GyreError):
    """`details["traceback"]` is the user's own traceback, from the process where it was raised."""

    code = "user_code"

    @property
    def traceback(self) -> str:
        return str(self.details.get("traceback", ""))


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name closest to `name`, else the list of what is known."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not close:  # `GRPO` for `grpo`: to difflib these have nothing in common
        by_folded = {one.casefold(): one for one in names}
        close = [by_folded[one] for one in difflib.get_close_matches(name.casefold(), by_folded, 1, 0.6)]
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}." if names else ""
