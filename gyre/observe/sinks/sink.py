"""What a sink is: a class that receives steps, evaluations and warnings, in the order in which they came.

    class Printed:
        def __init__(self, job: SinkJob, **options): ...
        def step(self, step: int, at: float, numbers: dict[str, float]) -> None: ...
        def evaluation(self, evaluation: SinkEvaluation) -> None: ...
        def warning(self, warning: SinkWarning) -> None: ...
        def flush(self) -> None: ...
        def close(self) -> None: ...

One that has the methods of `IncidentSink` too receives incidents and the job's end. They are no events but what
the events lead to, so that only such a sink pays for folding the journal.

Invariants:
- *at least once*: what was told when `flush` returned is not told again, but after a death what came since is: steps
  have numbers, evaluations versions, the rest the number `seq` of its event, by which a sink can tell;
- *in order*: steps by their numbers, everything else by its events.

A sink may take as long as it likes, raise, or end its process: it has one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # a job is planned with the names of the sinks, and without a store
    from gyre.observe.timeline import Timeline


@dataclass(frozen=True, slots=True)
class SinkJob:
    """The job, as a sink knows it. `to` is where the sink is to write, "" for a place of its choice in `directory`,
    which is the sink's own and is there. `number` distinguishes the sinks of one job."""

    job_id: str
    name: str
    spec: dict[str, Any]
    directory: Path
    to: str = ""
    number: int = 0
    timeline: Callable[[float, float], Timeline] | None = None
    """Who did what between two times, in seconds since 1970; None where there is no store to ask."""


@dataclass(frozen=True, slots=True)
class SinkEvaluation:
    """What a policy version's answers to a held-out set earned. `step` is the last step that was delivered before."""

    set: str
    version: int
    step: int
    at: float
    numbers: dict[str, float]


@dataclass(frozen=True, slots=True)
class SinkWarning:
    """The job does not learn as it should, from `step` on; with `holds` False it says so no longer."""

    code: str
    message: str
    step: int
    at: float
    holds: bool
    seq: int = 0


@dataclass(frozen=True, slots=True)
class SinkIncident:
    """Something went wrong, or (`is_new` False) an incident that was delivered has another outcome since: `recovered`,
    `gave up`, `scaled away`, `left alone`, `job ended`. `at` is when, in seconds since 1970, and `error` a sentence,
    or "". `vertex` is "" for one of the whole job."""

    id: str
    vertex: str
    cause: str
    decision: str
    outcome: str
    at: float
    seq: int
    is_new: bool = True
    error: str = ""
    user_code: bool = False
    recovery_s: float | None = None


@dataclass(frozen=True, slots=True)
class SinkEnd:
    """The job has ended: `phase` is `succeeded`, `failed` or `stopped`. It may go on, and end again."""

    phase: str
    reason: str
    message: str
    at: float
    seq: int


class Sink(Protocol):
    def step(self, step: int, at: float, numbers: dict[str, float]) -> None:
        """The metrics of an optimizer step that ended at `at` (seconds since 1970), named as in docs/training.md."""
        ...

    def evaluation(self, evaluation: SinkEvaluation) -> None: ...

    def warning(self, warning: SinkWarning) -> None: ...

    def flush(self) -> None:
        """Make what was delivered so far lasting: when it has returned, it is not delivered again."""
        ...

    def close(self) -> None:
        """The job has ended, and all of it was delivered."""
        ...


@runtime_checkable
class IncidentSink(Protocol):
    def incident(self, incident: SinkIncident) -> None: ...

    def ended(self, end: SinkEnd) -> None: ...
