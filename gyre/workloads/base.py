"""What users subclass: `BaseWorkload` for a role's worker, `BaseTrainer` for the role that drives them.

A workload is an ordinary class. Gyre constructs it without arguments in a process of its own, binds its
`context` (role, rank, world, config, directories), calls `setup()`, and from then on calls its methods. A
class that inherits nothing but has the methods also works; it then has no hooks and no `self.config`.

The lifecycle, each hook optional:

    __init__() → bound → setup() → [restore(path)] → methods … [checkpoint(path)] → teardown()

Invariants that a workload may rely on:
- *one at a time*: methods of one vertex never run concurrently, except those marked `@operator(control=True)`;
- *whole firings*: an operator's call is repeated as a whole or not at all; a repeated call has the same
  arguments, so an operator that keeps state must be idempotent by its step and index arguments.

This module must not import Ray or torch: a workload may need neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, overload

from pydantic import BaseModel

from gyre.workloads.plain_data import PLAIN_LIMIT, measured

F = TypeVar("F", bound=Callable[..., Any])

OPERATOR_ATTRIBUTE = "__gyre_operator__"


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """What `@operator` records of a method. `kind` names what it yields on its edge: samples, weights, control."""

    name: str
    kind: str = "samples"
    control: bool = False


@overload
def operator(method: F, /) -> F: ...
@overload
def operator(*, kind: str = ..., control: bool = ...) -> Callable[[F], F]: ...
def operator(method: Any = None, /, *, kind: str = "samples", control: bool = False) -> Any:
    """Declare a method to be an operator that the graph may call.

    `kind` is the kind of edge that its result flows on. `control=True` lets it run beside other calls, on
    the control thread; it must then be quick and thread-safe.
    """

    def mark(function: F) -> F:
        setattr(function, OPERATOR_ATTRIBUTE, OperatorInfo(function.__name__, kind, control))
        return function

    return mark(method) if method is not None else mark


def operators_of(workload: object) -> dict[str, OperatorInfo]:
    """The declared operators of a workload or its class, by name."""
    found = {}
    kind = workload if isinstance(workload, type) else type(workload)
    for name in dir(kind):
        info = getattr(getattr(kind, name, None), OPERATOR_ATTRIBUTE, None)
        if isinstance(info, OperatorInfo):
            found[name] = info
    return found


class Progress:
    """How far a vertex got: a counter that must move while it works, and fields for people to read.

    The diagnosis of a stuck vertex rests on `ticks`: a call in flight during which it does not move for the
    role's `stall_timeout_s` is an incident. Thread-safe.

    Invariant *plain and bounded*: fields are plain data from the moment they are given, in the thread that gives
    them; where they become too many, those whose names came first are forgotten.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ticks = 0
        self._fields: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        self._size = 0

    def tick(self, **fields: Any) -> None:
        self._take(1, fields)

    def note(self, **fields: Any) -> None:
        """Fields for people to read, without a tick: no sign of work."""
        self._take(0, fields)

    def _take(self, ticks: int, fields: dict[str, Any]) -> None:
        made = {name: measured(value) for name, value in fields.items()}
        with self._lock:
            self._ticks += ticks
            for name, (value, size) in made.items():
                self._size += size + len(name) - self._sizes.get(name, 0)
                self._fields[name], self._sizes[name] = value, size + len(name)
            while self._size > PLAIN_LIMIT and len(self._fields) > 1:
                oldest = next(iter(self._fields))
                del self._fields[oldest]
                self._size -= self._sizes.pop(oldest)

    def read(self) -> tuple[int, dict[str, Any]]:
        with self._lock:
            return self._ticks, dict(self._fields)


@dataclass(slots=True)
class WorkloadContext:
    """Where a vertex stands. Bound before `setup()`.

    `master_addr`/`master_port` are set for roles whose ranks are collective peers, and change with each
    generation of the gang. `directory` is the job's own, shared by its vertices.
    """

    job: str
    role: str
    rank: int
    world_size: int
    local_rank: int = 0
    incarnation: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    directory: Path = Path()
    master_addr: str | None = None
    master_port: int | None = None
    progress: Progress = field(default_factory=Progress)
    job_id: str = ""
    rollouts: dict[str, Any] = field(default_factory=dict)
    """The job's `rollouts` section."""
    weights: dict[str, Any] = field(default_factory=dict)
    """The job's `weights` section."""
    elastic: dict[str, Any] | None = None
    """Of the rollout manager only: the rollout role's `elastic` section."""
    local: bool = False
    """Of a rollout instance: it stands on the trainer's devices, and generates in windows."""
    store_url: str = ""
    """Of the rollout manager only, which keeps its ledger there."""
    job_ends: bool = False
    """Of `teardown`: nobody will come back for what this vertex leaves behind."""
    report: Callable[[str, dict[str, Any]], None] = lambda kind, body: None
    """Tell the master of an event, for the journal: a kind of your own and what there is to say, which the journal
    keeps as `Reported`; or the name of a class in `gyre.failover.events`, and its fields."""


class BaseWorkload:
    """A role's worker. Subclass it, declare operators, override the hooks that you need."""

    context: WorkloadContext

    SECTIONS: ClassVar[Mapping[str, type[BaseModel]]] = MappingProxyType({})
    """Sections of `config` that are this class's own, by name: they are checked when a job with it is submitted. Read
    one with `gyre.config.sections.read_section`."""

    # -- who am I -----------------------------------------------------------------------------------

    @property
    def role(self) -> str:
        return self.context.role

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def local_rank(self) -> int:
        return self.context.local_rank

    @property
    def config(self) -> dict[str, Any]:
        """The job's configuration, as given to `RLJobBuilder.config`."""
        return self.context.config

    @property
    def job_name(self) -> str:
        return self.context.job

    # -- hooks --------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Load models, open connections. Runs once per incarnation, before any operator."""

    def teardown(self) -> None:
        """Release what `setup` took. Not called when the process is killed."""

    def abandoned(self) -> None:
        """The job ends, and a call has not ended in time: the process is killed, without `teardown`. Remove what would
        outlive it, beside that call, without waiting for anything."""

    def health(self) -> dict[str, Any]:
        """Facts for `gyre show --json`, asked for every few seconds between calls. Raise, and the vertex is
        replaced."""
        return {}

    def checkpoint(self, path: Path) -> bool | None:
        """Write this rank's state below `path`. Gyre commits the folder once every rank has returned.

        With a further parameter `background`, which is then True where nobody has to wait, it may return True: what is
        to be written is copied, and is still being written. Then Gyre asks `checkpoint_written(wait=…)` on every rank
        until all say True, or waits for it; the call may be a collective.
        """
        return None

    def restore(self, path: Path) -> None:
        """Take the state back that `checkpoint` wrote. Called after `setup` on a new incarnation."""

    def report_progress(self, **fields: Any) -> None:
        """Say that work goes on. Call it inside operators that run longer than the role's stall timeout. The fields are
        kept as plain data (`gyre.workloads.plain_data`): a tensor's number as a number, a NaN as "nan"."""
        self.context.progress.tick(**fields)


class BaseTrainer(BaseWorkload):
    """The role that drives the others. Role handles (`self.actor`, `self.rollout`, …) are bound before `fit`."""

    handles: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        handles = self.__dict__.get("handles", {})
        if name in handles:
            return handles[name]
        known = ", ".join(sorted(handles)) or "none"
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; role handles: {known}")

    def fit(self) -> Any:
        """The whole training. Its return value is the job's result."""
        raise NotImplementedError(f"{type(self).__name__} must define fit()")
