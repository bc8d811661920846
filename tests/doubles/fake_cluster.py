"""A fake cluster: it implements `gyre.master.cluster.Cluster`, so that the real master runs without Ray.

    world = FakeCluster(clock)
    master = JobMaster(..., cluster=world.connect(), clock=clock)
    world.at(12.0, world.kill, "rollout-0")

It is a behavioural double, not a mock: processes come up after a while, keep an outbox until it is acknowledged,
obey epochs as `VertexHost` does and go on without a master. `tests/master/test_cluster_contract.py` holds it to the
observed behaviour of `RayCluster`. Its trainer is in memory as well: it makes steps while everything in its membership
works, reports each, and keeps its ledger (`steps`) outside of the processes, as the sample ledger is.

It has no tasks or timers of its own: events that are due by the clock happen when somebody looks. So it outlives event
loops, and with them any number of masters.

Knobs: `start_delay_s`, `setup_delay_s`, `step_s` (infinite: no step ends), `latency_s`; `kill`, `hang`, `stall`,
`fail_setup`, `fail_operator`, `no_room`, `say`, `report`; `add_machine`, `lose_machine`, `drain_machine`, `occupy`,
`make_unfit`; `at` plans any of them for later.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gyre.config import TRAINER
from gyre.errors import Fenced
from gyre.graph import SubGraph
from gyre.master.cluster import Address, CannotPlace, NotAnswering, ProcessDied, Spawned
from gyre.process_activity import Activity
from gyre.testing.clock import VirtualClock
from gyre.workloads.vertex.disk_room import DiskRoom
from gyre.workloads.vertex.host import VertexHost
from gyre.workloads.vertex.memory_kills import MemoryKills
from gyre.workloads.vertex.messages import Binding, Failure, VertexReport
from tests.doubles.fake_connection import Connection
from tests.doubles.fake_room import FakeRoom

T = TypeVar("T")

FIRST_PID = 1000
STACK_OF_A_STALL = 'File "loop.py", line 7, in generate\n    while True: pass'
IDLE, WORKING = Activity("S", ran=0.0, waited=0.0), Activity("RS", ran=1.0, waited=0.0)
STARVED, STOPPED = Activity("R", ran=0.1, waited=1.5), Activity("T", ran=0.0, waited=0.0)


class FakeClusterBroken(AssertionError):
    """A rule of the fake world was about to be broken: two incarnations of a vertex alive at once."""


@dataclass
class FakeTrainer:
    """The script of the in-memory trainer's `fit()`."""

    steps: int = 10
    checkpoint_every: int = 5
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class FakeProcess:
    """One incarnation of a vertex. `hung` does not answer; `stalled` answers and makes no progress."""

    address: Address
    pid: int
    epoch: int
    node: str
    alive: bool = True
    bound: bool = False
    hung: bool = False
    stalled: bool = False
    activity: Activity = IDLE
    detail: str = ""
    node_lost: bool = False
    ticks: int = 0
    moved_at: float = 0.0
    version: int | None = None
    fields: Any = None
    """The progress that it reports; None for the usual one."""
    outbox: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    reported: int = 0
    told: list[str] = field(default_factory=list)
    """The control calls that it obeyed, in order."""
    job_ends: bool | None = None
    """The argument `job_ends` of its shutdown."""
    heard_at: float = 0.0
    binding: Binding | None = None

    @property
    def works(self) -> bool:
        return self.alive and self.bound and not self.hung and not self.stalled

    def report(self, kind: str, **body: Any) -> None:
        self.reported += 1
        self.outbox.append((self.reported, kind, {"incarnation": self.address.incarnation, **body}))


@dataclass(eq=False)
class Fit:
    """The trainer's own state, in its process."""

    process: FakeProcess
    serial: int = -1
    running: dict[str, int] = field(default_factory=dict)
    roles: dict[str, int] = field(default_factory=dict)
    started: bool = False
    paused: bool = False
    stopping: bool = False
    ended: bool = False
    step_ends_at: float | None = None


class FakeCluster:
    """The fake world: processes, room for them, and the trainer's ledger. `connect` gives a master its `Cluster`."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        trainer: FakeTrainer | None = None,
        start_delay_s: float = 0.2,
        setup_delay_s: float = 0.5,
        step_s: float = 1.0,
        latency_s: float = 0.002,
        nodes: int = 1,
    ) -> None:
        self.clock = clock
        self.trainer = trainer or FakeTrainer()
        self.start_delay_s = start_delay_s
        self.setup_delay_s = setup_delay_s
        self.step_s = step_s
        self.latency_s = latency_s
        self.room = FakeRoom()
        for number in range(nodes):
            self.room.add(f"node-{number}")
        self.no_room: set[str] = set()
        """Vertices for which there is no room; those already placed stay."""
        self.disks: tuple[DiskRoom, ...] = ()
        """The disks that every vertex reports."""
        self.steps: list[tuple[int, int]] = []
        """The ledger: each optimizer step with the trainer's incarnation that made it."""
        self.spawned: list[Address] = []
        self.ended = False
        """Whether a master has ended the job."""
        self.processes: dict[Address, FakeProcess] = {}
        """Every incarnation, living or dead, by its address."""
        self._newest: dict[str, FakeProcess] = {}
        """Of each vertex the incarnation that began last: all before it are dead."""
        self.fits: dict[Address, Fit] = {}
        """The trainers' own state, by their addresses."""
        self._deadlocked: set[Address] = set()
        self._failing_setups: dict[str, list[bool]] = {}
        self._failing_calls: dict[str, list[bool]] = {}
        self._pids = itertools.count(FIRST_PID)
        self._plans: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._waiters: dict[asyncio.Future[None], None] = {}  # in order, so that a run can be repeated

    def connect(self) -> Connection:
        """A `Cluster` for one master. Cut it (`connection.cut()`) when that master dies."""
        return Connection(self)

    # -- knobs --------------------------------------------------------------------------------------

    def at(self, at_s: float, action: Callable[..., object], *args: Any) -> None:
        """Plan an action for a moment of the clock's `monotonic()`."""
        heapq.heappush(self._plans, (at_s, next(self._numbers), action, args))
        self._wake()

    def kill(self, vertex: str, detail: str = "") -> None:
        """SIGKILL the living incarnation, if there is one. `detail` is the cluster's exit detail."""
        if (process := self.living(vertex)) is not None:
            self.end(process, detail or f"{vertex} was killed (SIGKILL)")

    def kill_for_memory(self, vertex: str) -> None:
        """Let the kernel of its machine kill a vertex for want of memory."""
        if (process := self.living(vertex)) is not None:
            self.room.machines[process.node].memory_kills += 1
            self.end(process, f"{vertex} was killed (SIGKILL)")

    def hang(self, vertex: str, activity: Activity = STOPPED) -> None:
        """Let a vertex answer nothing until `unhang`, while its process does this."""
        if (process := self.living(vertex)) is not None:
            process.hung = True
            process.activity = activity
            self._wake()

    def add_machine(self, name: str, **what: Any) -> None:
        """Let a machine come; `what` it has are fields of `FakeMachine`."""
        self.room.add(name, **what)
        self._wake()

    def lose_machine(self, name: str) -> None:
        """Let a machine vanish, with the processes and places on it."""
        self.room.lose(name)
        for process in self.alive:
            if process.node == name:
                process.node_lost = True
                self.end(process, f"The node has died: {name}")
        self._wake()

    def drain_machine(self, name: str) -> None:
        """Let the cluster say that a machine will go. It takes no new place."""
        self.room.machines[name].draining = True
        self._wake()

    def make_unfit(self, name: str, *found: str) -> None:
        """The machine's pre-flight finds this; nothing, if nothing is given."""
        self.room.machines[name].unfit = found

    def occupy(self, name: str, *, cpu: float = 0.0, gpu: float = 0.0) -> None:
        """Let other jobs hold so much of a machine, in all."""
        machine = self.room.machines[name]
        machine.others_cpu, machine.others_gpu = cpu, gpu
        self._wake()

    def unhang(self, vertex: str) -> None:
        if (process := self.living(vertex)) is not None:
            process.hung = False
            self._wake()

    def stall(self, vertex: str) -> None:
        """Let a vertex stall: it answers, and its running call makes no progress."""
        if (process := self.living(vertex)) is not None:
            process.stalled = True
            process.moved_at = self.clock.monotonic()
            self._wake()

    def deadlock(self, *vertices: str) -> None:
        """Let no step be made, with all vertices looking healthy, until these vertices are replaced."""
        self._deadlocked |= {process.address for name in vertices if (process := self.living(name))}

    def fail_setup(self, vertex: str, *, user_code: bool, times: int = 1) -> None:
        """Let the next `times` calls of its `setup()` raise."""
        self._failing_setups.setdefault(vertex, []).extend([user_code] * times)

    def fail_operator(self, vertex: str, *, user_code: bool, times: int = 1) -> None:
        """Let the next `times` calls of an operator in it raise; the trainer reports each."""
        self._failing_calls.setdefault(vertex, []).extend([user_code] * times)

    def say(self, vertex: str, fields: Any) -> None:
        """Let the living incarnation report these fields of progress as they are; a `VertexHost` makes them plain."""
        if (process := self.living(vertex)) is not None:
            process.fields = fields
            self._wake()

    def report(self, vertex: str, kind: Any, body: Any) -> None:
        """Let the living incarnation report an event as it is."""
        if (process := self.living(vertex)) is not None:
            process.reported += 1
            process.outbox.append((process.reported, kind, body))
            self._wake()

    # -- what a test looks at -----------------------------------------------------------------------

    def living(self, vertex: str) -> FakeProcess | None:
        """The living process of a vertex."""
        newest = self._newest.get(vertex)
        return newest if newest is not None and newest.alive else None

    @property
    def alive(self) -> list[FakeProcess]:
        return [process for process in self.processes.values() if process.alive]

    def process(self, vertex: str, incarnation: int) -> FakeProcess:
        """That incarnation, living or dead. Raises KeyError if there was none."""
        return self.processes[Address(vertex, incarnation)]

    # -- the world goes on --------------------------------------------------------------------------

    def advance(self) -> None:
        """Let everything happen that is due by now, in the order of its time."""
        while (due := self._next_at()) is not None and due <= self.clock.monotonic() + 1e-9:
            if self._plans and self._plans[0][0] <= due:
                _, _, action, args = heapq.heappop(self._plans)
                action(*args)
            else:
                fit = min((f for f in self.fits.values() if f.step_ends_at is not None), key=_ends)
                self.end_step(fit)
            self._look_at_fits()
            self._wake()
        self._look_at_fits()

    def _next_at(self) -> float | None:
        times = [fit.step_ends_at for fit in self.fits.values() if fit.step_ends_at is not None]
        if self._plans:
            times.append(self._plans[0][0])
        return min(times, default=None)

    def _look_at_fits(self) -> None:
        """Begin steps that can be made, and give up steps that no longer can."""
        if math.isinf(self.step_s):
            return  # none ever ends
        now = self.clock.monotonic()
        for fit in self.fits.values():
            if not self._can_step(fit):
                fit.step_ends_at = None
            elif fit.step_ends_at is None:
                fit.step_ends_at = now + self.step_s

    def _can_step(self, fit: Fit) -> bool:
        if not fit.process.works or not fit.started or fit.ended or (fit.paused and not fit.stopping):
            return False
        if any(self.processes[address].alive for address in self._deadlocked):
            return False
        for role, count in fit.roles.items():
            if role == TRAINER or not count:
                continue
            present = [vertex for vertex in fit.running if vertex.rpartition("-")[0] == role]
            binding = fit.process.binding
            gang = bool(binding and binding.spec and binding.spec["roles"][role]["gang"])
            if len(present) < (count if gang else 1):
                return False
        return all(
            (process := self.processes.get(Address(vertex, incarnation))) is not None and process.works
            for vertex, incarnation in fit.running.items()
        )

    def end_step(self, fit: Fit) -> None:
        """Let the trainer report its step: a failed call, or the step, and its end if it was the last."""
        fit.step_ends_at = None
        process = fit.process
        for vertex, incarnation in fit.running.items():
            if failing := self._failing_calls.get(vertex):
                user_code = failing.pop(0)
                process.report(
                    "OperatorFailed",
                    vertex=vertex,
                    vertex_incarnation=incarnation,
                    operator="run",
                    error="ValueError: by plan",
                    traceback="Traceback (most recent call last):\nValueError: by plan\n",
                    user_code=user_code,
                )
                return
        step = len(self.steps) + 1
        if step <= self.trainer.steps:
            self.steps.append((step, process.address.incarnation))
            process.ticks += 1
            process.moved_at = self.clock.monotonic()
            for vertex, incarnation in fit.running.items():
                member = self.processes[Address(vertex, incarnation)]
                member.ticks, member.moved_at, member.version = member.ticks + 1, process.moved_at, step
            process.report("StepCompleted", step=step, version=step, metrics={"reward": step / 10})
            process.report(
                "WeightsPublished", version=step, step=step, checksum=f"xxh3:{step:x}", size_bytes=1
            )
            if step % self.trainer.checkpoint_every == 0:
                process.report("CheckpointCommitted", step=step, path=f"/checkpoints/{step}")
        if step >= self.trainer.steps or fit.stopping:
            fit.ended = True
            process.report(
                "TrainerFinished",
                result={"steps": len(self.steps), **self.trainer.result},
                stopped=fit.stopping,
            )

    def begin(self, address: Address, epoch: int, node: str = "node-0") -> FakeProcess:
        """Start a process, which is not set up yet. Raises FakeClusterBroken."""
        other = self.living(address.vertex)
        if other is not None:
            raise FakeClusterBroken(f"{address} starts beside {other.address}")
        process = FakeProcess(address, next(self._pids), epoch, node, moved_at=self.clock.monotonic())
        self.processes[address] = self._newest[address.vertex] = process
        self.spawned.append(address)
        if address.vertex == f"{TRAINER}-0":
            self.fits[address] = Fit(process)
        return process

    def _memory_kills(self, process: FakeProcess) -> MemoryKills | None:
        machine = self.room.machines.get(process.node)
        return MemoryKills(machine.name, machine.memory_kills) if machine is not None else None

    def end(self, process: FakeProcess, detail: str) -> None:
        process.alive = False
        process.detail = detail
        self._look_at_fits()
        self._wake()

    # -- waiting ------------------------------------------------------------------------------------

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self, until: float) -> None:
        """Wait until something changes, at the latest until `until`."""
        due = self._next_at()
        until = until if due is None else min(until, due)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await asyncio.wait([waiter], timeout=max(0.0, until - self.clock.monotonic()))
        finally:
            self._waiters.pop(waiter, None)

    async def _sleep(self, seconds: float) -> None:
        deadline = self.clock.monotonic() + seconds
        self.advance()
        while self.clock.monotonic() < deadline - 1e-9:
            await self._wait(deadline)
            self.advance()

    # -- what connections call ----------------------------------------------------------------------

    async def place(self, sub_graph: SubGraph, timeout_s: float) -> None:
        deadline = self.clock.monotonic() + timeout_s
        while not self.room.has(sub_graph):
            if not self.no_room & set(sub_graph.vertices) and self.room.reserve(sub_graph):
                return
            if self.clock.monotonic() >= deadline - 1e-9:
                raise CannotPlace(
                    f"{sub_graph.id} found no room in {timeout_s:g} s: required 1, available 0",
                    required="1",
                    available="0",
                )
            await self._sleep(min(0.5, deadline - self.clock.monotonic()))

    async def spawn(
        self, address: Address, sub_graph: SubGraph, bundle: int, epoch: int, timeout_s: float
    ) -> Spawned:
        await self.place(sub_graph, timeout_s)
        process = self.processes.get(address)
        if process is None or not process.alive:
            process = self.begin(address, epoch, self.room.machine_of(sub_graph.id, bundle))
            await self._sleep(self.start_delay_s)
        told = await self.call(address, timeout_s, VertexHost.hello, epoch)
        return Spawned(told["pid"], process.node, told["bound"], told["memory_kills"])

    async def call(
        self, address: Address, timeout_s: float, method: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        assert not kwargs, "the master gives its arguments by position"
        epoch, rest = args[0], args[1:]
        deadline = self.clock.monotonic() + timeout_s
        await self._sleep(min(self.latency_s, timeout_s))
        process = self.processes.get(address)
        if process is None or not process.alive:
            raise (
                _death(process)
                if process
                else ProcessDied(f"no actor {address.vertex}/{address.incarnation}")
            )
        while process.hung:
            if self.clock.monotonic() >= deadline - 1e-9:
                raise NotAnswering(f"{address.vertex} did not answer within {timeout_s:g} s")
            await self._wait(deadline)
            self.advance()
            if not process.alive:
                raise _death(process)
        if epoch < process.epoch:
            raise Fenced(f"{address.vertex} obeys epoch {process.epoch}; a call came with epoch {epoch}.")
        process.epoch, process.heard_at = epoch, self.clock.monotonic()
        if method is VertexHost.watch:
            return await self._watch(process, *rest, deadline=deadline)
        if method is not VertexHost.hello:
            process.told.append(method.__name__)
        return self.obey(process, method.__name__, rest)

    def obey(self, process: FakeProcess, method: str, args: tuple[Any, ...]) -> Any:
        """Carry out a control call on a process, and return its answer."""
        fit = self.fits.get(process.address)
        match method:
            case "hello":
                return {
                    "pid": process.pid,
                    "bound": process.bound,
                    "incarnation": process.address.incarnation,
                    "memory_kills": self._memory_kills(process),
                }
            case "address":
                return "127.0.0.1", 40_000 + process.pid
            case "stacks":
                return STACK_OF_A_STALL if process.stalled else "idle"
            case "shutdown":
                process.job_ends = args[1:] == (True,)
                return None
            case "announce" | "start_fit":
                assert fit is not None
                if args[0] > fit.serial:
                    fit.serial, fit.running, fit.roles = args[0], dict(args[1]), dict(args[2])
                if method == "start_fit":
                    fit.started, fit.paused = True, args[3]
            case "set_paused":
                assert fit is not None
                fit.paused = args[0]
            case "stop_fit":
                assert fit is not None
                fit.stopping = True
            case _:
                raise AttributeError(f"a vertex has no control method {method!r}")
        self.advance()
        self._wake()
        return None

    async def _watch(
        self,
        process: FakeProcess,
        acknowledged: int,
        report_s: float,
        master: tuple[int, str] | None = None,
        *,
        deadline: float,
    ) -> VertexReport:
        process.outbox = [entry for entry in process.outbox if entry[0] > acknowledged]
        answer_at = self.clock.monotonic() + report_s
        while True:
            self.advance()
            if not process.alive:
                raise _death(process)
            now = self.clock.monotonic()
            if process.hung:
                if now >= deadline - 1e-9:
                    raise NotAnswering(f"{process.address.vertex} did not answer")
                await self._wait(deadline)
                continue
            if process.outbox or now >= answer_at - 1e-9:
                break
            await self._wait(answer_at)
        usual = {"step": len(self.steps)} if process.address in self.fits else {}
        return VertexReport(
            ticks=process.ticks,
            fields=usual if process.fields is None else process.fields,
            busy="generate" if process.stalled else "",
            still_s=self.clock.monotonic() - process.moved_at,
            version=process.version,
            outbox=list(process.outbox),
            memory_kills=self._memory_kills(process),
            disks=self.disks,
        )

    async def bind(
        self, address: Address, epoch: int, binding: Binding, *, timeout_s: float
    ) -> tuple[str, Any]:
        began = self.clock.monotonic()
        await self.call(address, timeout_s, VertexHost.hello, epoch)
        process = self.processes[address]
        if process.bound:
            return "ok", {"pid": process.pid}
        while True:
            await self._sleep(min(self.setup_delay_s, timeout_s))
            if not process.alive:
                raise _death(process)
            if not process.hung and not process.stalled:
                break
            if self.clock.monotonic() - began >= timeout_s:
                raise NotAnswering(f"{address.vertex} did not answer within {timeout_s:g} s")
        if failing := self._failing_setups.get(address.vertex):
            user_code = failing.pop(0)
            trace = 'Traceback (most recent call last):\n  File "mine.py", line 3, in setup\nValueError: no\n'
            return "error", Failure("ValueError: no", trace, user_code)
        process.bound, process.binding = True, binding
        self.advance()
        return "ok", {"pid": process.pid}

    async def kill_address(self, address: Address) -> None:
        await self._sleep(self.latency_s)
        process = self.processes.get(address)
        if process is not None and process.alive:
            self.end(process, f"{address.vertex} was ended by the master")


def _death(process: FakeProcess) -> ProcessDied:
    return ProcessDied(process.detail, node_lost=process.node_lost)


def _ends(fit: Fit) -> float:
    assert fit.step_ends_at is not None
    return fit.step_ends_at
