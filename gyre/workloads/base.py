"""The base classes that users subclass: `BaseWorkload` for a role's worker, `BaseTrainer` for the role that drives
them.

A workload is an ordinary class. Gyre constructs it without arguments in a process of its own, binds its `context`
(role, rank, world, config, directories), calls `setup()`, and from then on calls its methods. A class that has the
methods without inheriting also works, without hooks and `self.config`.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

from pydantic import BaseModel

from gyre.workloads.plain_data import PLAIN_LIMIT, measured

if TYPE_CHECKING:
    from gyre.graph.devices import Neighbour

F = TypeVar("F", bound=Callable[..., Any])

OPERATOR_ATTRIBUTE = "__gyre_operator__"


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """The data that `@operator` records of a method. `kind` is the kind of its edge: samples, weights or control."""

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
    """The progress of a vertex: a counter that must move while it works, and fields for people to read.

    The diagnosis of a stuck vertex rests on `ticks`: if it does not move for the role's `stall_timeout_s` during a
    call, that is an incident. Thread-safe.

    Invariant *plain and bounded*: fields are made plain data at once, in the caller's thread; if there are too many,
    the names that came first are forgotten.
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
        """Set fields for people to read, without a tick: they are no sign of work."""
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
    """A vertex's place in its job. Bound before `setup()`.

    `master_addr`/`master_port` are set for roles whose ranks are collective peers, and change with each
    generation of the gang. `directory` is the job's own, shared by its vertices. `address` is this machine's on the
    cluster's network, as Ray says it; empty where there is no cluster. An IPv6 address has no brackets here.
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
    address: str = ""
    progress: Progress = field(default_factory=Progress)
    job_id: str = ""
    rollouts: dict[str, Any] = field(default_factory=dict)
    """The job's `rollouts` section."""
    weights: dict[str, Any] = field(default_factory=dict)
    """The job's `weights` section."""
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For the rollout manager only: by role of instances its `count`, its `elastic` section, None where there is
    none, its `price_per_hour`, and its `engine`."""
    neighbours: Sequence[Neighbour] = ()
    """The other roles on this one's devices."""
    local: bool = False
    """Whether a rollout instance is on the trainer's devices and generates in windows."""
    store_url: str = ""
    """The store of the rollout manager's ledger; empty for other roles."""
    store_hold_s: float = 0.0
    """How long a write waits for a store that is lost, as long as the master does: `store.lost_timeout_s`."""
    job_ends: bool = False
    """Whether the job ends with this `teardown`, so that nothing has to be left for a successor."""
    report: Callable[[str, dict[str, Any]], None] = lambda kind, body: None
    """Reports an event to the master for the journal: a kind of your own and its body, which the journal keeps as
    `Reported`; or the name of a class in `gyre.failover.events`, and its fields."""


class BaseWorkload:
    """A role's worker. Subclass it, declare operators, and override the hooks that you need."""

    context: WorkloadContext

    SECTIONS: ClassVar[Mapping[str, type[BaseModel]]] = MappingProxyType({})
    """This class's own sections of `config`, by name, which are checked when a job is submitted. Read one with
    `gyre.config.sections.read_section`."""

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
        """Remove what would outlive the process, beside a call that has not ended in time and without waiting for
        anything: the job ends, and the process is killed without `teardown`."""

    def health(self) -> dict[str, Any]:
        """Facts for `gyre show --json`, read every few seconds between calls. If it raises, the vertex is replaced."""
        return {}

    def checkpoint(self, path: Path) -> bool | None:
        """Write this rank's state below `path`. Gyre commits the folder once every rank has returned.

        With a further parameter `background`, which is True if nobody has to wait, it may copy the state, return True
        and go on writing. Gyre then calls `checkpoint_written(wait=…)` on every rank until all return True; the call
        may be a collective.
        """
        return None

    def restore(self, path: Path) -> None:
        """Load the state that `checkpoint` wrote. Called after `setup` on a new incarnation."""

    def report_progress(self, **fields: Any) -> None:
        """Show that work goes on. Call it inside operators that run longer than the role's stall timeout. The fields
        are kept as plain data (`gyre.workloads.plain_data`): a tensor's number as a number, a NaN as "nan"."""
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
        """Run the whole training. The return value is the job's result."""
        raise NotImplementedError(f"{type(self).__name__} must define fit()")
