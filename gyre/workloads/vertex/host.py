"""The process of one vertex: it holds the user's workload and answers the master and the trainer.

The master watches it through one pending `watch` call, which returns when there is news and at least every so often;
the vertex itself never calls anybody. News for the master stays in an outbox until it is acknowledged, so a master that
is away loses nothing.

Invariants:
- *fenced*: a control call with an older epoch, or a data call with an older term, is refused;
- *one at a time*: the workload's methods run one after another, except operators marked `control`;
- *where it stands*: the host knows which call of its gang began here last, also while that call runs;
- *no zombie*: without a master for `orphan_timeout_s` the process ends itself; before that it ends a master that hangs.

The class is an ordinary one: Ray makes an actor of it, tests call it directly. Calls marked (control) below come on the
control threads, the others on the work thread.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre.clock import Clock
from gyre.errors import Fenced
from gyre.gpus import GpuLook, GpuUse
from gyre.logs.output import look_at_log, redirect_output
from gyre.malloc_tuning import stay_small
from gyre.process_identity import ProcessIdentity
from gyre.rollouts.weight_dirs import remove_left_by_job
from gyre.workloads.addresses import free_port as free_port
from gyre.workloads.addresses import network_environment, reserve
from gyre.workloads.base import BaseWorkload, Progress, WorkloadContext, operators_of
from gyre.workloads.file_modules import module_of_file
from gyre.workloads.plain_data import plain, plain_fields, plain_text
from gyre.workloads.protocols import TakesPolicy
from gyre.workloads.vertex.call_info import NOTHING_OFFERED, CallInfo
from gyre.workloads.vertex.disk_room import SHARED_MEMORY, DiskLook
from gyre.workloads.vertex.master_watchdog import MasterWatchdog
from gyre.workloads.vertex.memory_kills import own_memory_kills
from gyre.workloads.vertex.messages import (
    Binding,
    CallPosition,
    Failure,
    VertexReport,
    failure_of,
    thread_stacks,
)
from gyre.workloads.vertex.returns import USER_SCRIPT, Given, checked, named
from gyre.workloads.vertex.slim_groups import SlimGroups, additions, extras_of

OUTBOX_LIMIT = 100_000
"""Reports kept for a master that is away; at one a step this is weeks."""

COALESCE_S = 0.02
"""How long a watch call waits for further reports once there is one: halves the calls of a fast job."""

STOOD_STILL_S = 1.0
"""A thread that wakes up later than that was not let run, with its process."""

HEALTH_EVERY_S = 5.0
"""Interval between calls of a workload's `health()`: often enough to matter, seldom enough to cost nothing."""

ORPHANED = 17
"""Exit status of a vertex that stopped itself because no master came back."""


class VertexHost:
    def __init__(
        self,
        vertex: str,
        incarnation: int,
        epoch: int,
        *,
        clock: Clock = time,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self.vertex = vertex
        self.incarnation = incarnation
        self.progress = Progress()
        self._clock = clock
        self._exit_process = exit_process
        self._fence = threading.Lock()
        self._epoch = epoch
        self._term = 0
        self._call_position = CallPosition()
        self._heard_at = clock.monotonic()
        self._condition = threading.Condition()
        self._outbox: list[tuple[int, str, dict[str, Any]]] = []
        self._outbox_next = 1
        self._busy = ""
        self._health_at = -math.inf
        self._unhealthy = ""
        self._last_ticks = 0
        self._moved_at = clock.monotonic()
        self._work = threading.Lock()
        self._workload: Any = None
        self._control_methods: frozenset[str] = frozenset()
        self._runtime: Any = None
        self._address: tuple[str, int] | None = None
        self._guard: MasterWatchdog | None = None
        self._disks = DiskLook()
        self._gpus = GpuLook()
        self._gpus_noted: list[GpuUse] = []

    # -- the master's calls (control) ---------------------------------------------------------------

    def hello(self, epoch: int) -> dict[str, Any]:
        """Answers at once, whatever the vertex is doing."""
        self._hear(epoch)
        return {
            "pid": os.getpid(),
            "process": ProcessIdentity.own(),
            "bound": self._workload is not None,
            "incarnation": self.incarnation,
            "memory_kills": own_memory_kills(),
        }

    def address(self, epoch: int) -> tuple[str, int]:
        """(control) An address and a port of this host, for a gang's rendezvous; the port is held until then. It is
        always the same, so that a master that takes over during a start tells the other ranks what its predecessor
        told."""
        self._hear(epoch)
        if self._address is None:
            host = _own_address()
            self._address = (host, reserve(host))
        return self._address

    def watch(
        self, epoch: int, acknowledged: int, timeout_s: float, master: ProcessIdentity | None = None
    ) -> VertexReport:
        """(control) Returns when there is news, at the latest after `timeout_s`. `master` identifies the caller."""
        self._hear(epoch)
        look_at_log()
        if master is not None and self._guard is not None:
            self._guard.master = master
        with self._condition:
            self._outbox = [entry for entry in self._outbox if entry[0] > acknowledged]
            if not self._outbox:
                self._condition.wait(timeout_s)
                if self._outbox:
                    self._condition.wait(COALESCE_S)
            outbox = list(self._outbox[:1000])
        ticks, fields = self.progress.read()
        now = self._clock.monotonic()
        if ticks != self._last_ticks:
            self._last_ticks, self._moved_at = ticks, now
        self._ask_health(now)
        self._note_gpus()
        return VertexReport(
            ticks=ticks,
            fields=fields,
            busy=self._busy or (self._runtime.busy if self._runtime is not None else ""),
            still_s=now - self._moved_at,
            version=self._version(),
            unhealthy=self._unhealthy,
            outbox=outbox,
            memory_kills=own_memory_kills(),
            disks=self._disks.newest,
        )

    def _version(self) -> int | None:
        """The workload's `version`; None if the user's property raises or returns no number."""
        try:
            version = plain(getattr(self._workload, "version", None))
        except Exception:
            return None
        return version if isinstance(version, int) else None

    def _note_gpus(self) -> None:
        """Tell what the newest look at this vertex's GPUs has found, if there is a new one."""
        newest = self._gpus.newest
        if newest is not self._gpus_noted:
            self._gpus_noted = newest
            self.progress.note(gpus={one.uuid: one.as_dict() for one in newest})

    def _ask_health(self, now: float) -> None:
        """Call the workload's `health()`, if it is due and no call runs, because methods run one at a time."""
        ask = getattr(self._workload, "health", None)
        if (
            not callable(ask)
            or now - self._health_at < HEALTH_EVERY_S
            or not self._work.acquire(blocking=False)
        ):
            return
        try:
            self._health_at = now
            self.progress.note(health=ask())
            self._unhealthy = ""
        except BaseException as error:  # whatever it raises is the finding
            self._unhealthy = failure_of(error, module=type(self._workload).__module__).traceback
        finally:
            self._work.release()

    def stacks(self, epoch: int) -> str:
        """(control)"""
        self._hear(epoch)
        return thread_stacks()

    def bind(self, epoch: int, binding: Binding) -> tuple[str, Any]:
        """Import, construct and set up the workload. Done once; a repeated call returns the same."""
        self._hear(epoch)
        with self._work:
            if self._workload is not None:
                return "ok", {"pid": os.getpid()}
            self._begin("setup")
            try:
                redirect_output(Path(binding.log_path))
                if binding.log_path:  # else it is no process of its own
                    self._disks.places = [Path(binding.directory), *own_places()]
                    self._disks.begin()
                os.environ.update(binding.env)
                if binding.log_path and binding.gpus:
                    self._gpus.begin(binding.gpus)
                # With a log of its own, the process is the vertex's own, and Ray's.
                own = _own_address() if binding.log_path else ""
                if own and binding.master_addr is not None:
                    for name, value in network_environment(own).items():
                        os.environ.setdefault(name, value)
                _extend_path(binding.python_path)
                workload = _load_class(binding)()
                context = self._context_of(binding, own)
                if isinstance(workload, BaseWorkload):
                    workload.context = context
                else:
                    offer_context(workload, context)
                self._bind_runtime(binding, workload, context)
                if callable(getattr(workload, "setup", None)):
                    workload.setup()
                self._control_methods = frozenset(
                    name for name, info in operators_of(workload).items() if info.control
                )
                self._workload = workload
                if binding.log_path:
                    # This process is the vertex's own, and what is there now stays. Looked at again and again, it would
                    # stop the process for up to a third of a second at any moment.
                    gc.collect()  # first what the setup left behind, which would stay for ever
                    gc.freeze()
            except BaseException as error:  # whatever the user's setup raises is reported
                return "error", failure_of(error, module=binding.module)
            finally:
                self._end()
        self._begin_to_mind_the_master(binding)
        return "ok", {"pid": os.getpid()}

    def _begin_to_mind_the_master(self, binding: Binding) -> None:
        """In a thread of its own, unless the vertex may outlive its master."""
        if math.isfinite(binding.orphan_timeout_s):
            threading.Thread(
                target=self._mind_the_master,
                args=(binding,),
                name="gyre-orphan",
                daemon=True,
            ).start()

    def _context_of(self, binding: Binding, address: str) -> WorkloadContext:
        """What the workload is told of its job. `address` is the process's own, "" where it has none."""
        return WorkloadContext(
            job=binding.job_name,
            role=binding.role,
            rank=binding.rank,
            world_size=binding.world_size,
            local_rank=binding.local_rank,
            incarnation=binding.incarnation,
            config=binding.config,
            directory=Path(binding.directory),
            master_addr=binding.master_addr,
            master_port=binding.master_port,
            address=address,
            progress=self.progress,
            job_id=binding.job_id,
            rollouts=binding.rollouts,
            weights=binding.weights,
            pools=binding.pools,
            neighbours=binding.neighbours,
            local=binding.local,
            store_url=binding.store_url,
            store_hold_s=binding.store_hold_s,
            report=self.report,
        )

    def shutdown(self, epoch: int, grace_s: float, job_ends: bool = False) -> None:
        """(control) Wait for the call in flight, run `teardown()`. The caller kills the process afterwards. Nobody
        watches it any more, and that is no sign of a master that hangs."""
        self._hear(epoch)
        self._guard = None
        if self._work.acquire(timeout=max(0.0, grace_s)):
            try:
                if isinstance(self._workload, BaseWorkload):
                    self._workload.context.job_ends = job_ends
                if callable(getattr(self._workload, "teardown", None)):
                    self._workload.teardown()
            except BaseException as error:  # the process ends either way; what went wrong belongs in its log
                print(f"teardown raised: {failure_of(error).traceback}", file=sys.stderr)
            finally:
                self._work.release()
        elif job_ends:
            self._abandon()
        if job_ends and isinstance(self._workload, BaseWorkload):
            # Left by dead vertices on this machine; the master does the same on its own.
            remove_left_by_job(self._workload.context.directory, [self.vertex])

    def _abandon(self) -> None:
        """Call the workload's `abandoned()`, because a call does not end."""
        if isinstance(self._workload, BaseWorkload):
            try:
                self._workload.abandoned()
            except Exception as error:  # as of `teardown`
                print(f"abandoned raised: {failure_of(error).traceback}", file=sys.stderr)

    # -- the trainer's calls ------------------------------------------------------------------------

    def call(
        self, term: int, method: str, info: CallInfo = NOTHING_OFFERED, /, *args: Any, **kwargs: Any
    ) -> tuple[str, Any]:
        """Run a method of the workload on the work thread, with what it wants of `info`. Groups may come as
        `SlimGroups`."""
        refused = self._check_term(term)
        if refused is not None:
            return "error", refused
        expected = info.expected
        with self._work:
            refused = self._check_term(term)
            if refused is not None:
                return "error", refused
            self._begin(method)
            if info.gang_call is not None:
                self._call_position = CallPosition((term, *info.gang_call), method, inside=True)
            failed = True
            try:
                function = getattr(self._workload, method)
                args = tuple(one.groups() if isinstance(one, SlimGroups) else one for one in args)
                before = extras_of(args[0]) if info.added_only else []
                given = Given.of(args[0]) if expected is not None and args else None
                value = function(*args, **kwargs, **info.wanted_by(function))
                if expected is not None:
                    value = checked(expected, given, value, function, version=kwargs.get("version"))
                failed = False
                return "ok", additions(before, value) if info.added_only else value
            except (
                BaseException
            ) as error:  # reported to the caller, which decides; Ray takes an Exception alone
                return "error", self._failure(error, method)
            finally:
                if info.gang_call is not None:
                    self._call_position = replace(self._call_position, inside=False, failed=failed)
                self._end()

    def call_with_weights(
        self,
        term: int,
        bundle: tuple[Any, Any],
        method: str,
        info: CallInfo = NOTHING_OFFERED,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[str, Any]:
        """Call `load_weights(*bundle)` and then the method. The bundle is an argument of its own, so that one in the
        object store is passed by reference."""
        load = TakesPolicy.load_weights.__name__
        if hasattr(self._workload, load):  # a reference may have weights of its own
            status, value = self.call(term, load, CallInfo(gang_call=info.gang_call), *bundle)
            if status == "error":
                return status, value
        return self.call(term, method, info, *args, **kwargs)

    def control_call(
        self, term: int, method: str, info: CallInfo = NOTHING_OFFERED, /, *args: Any, **kwargs: Any
    ) -> tuple[str, Any]:
        """(operators) Run an operator that is marked `control`, beside whatever else runs."""
        refused = self._check_term(term)
        if refused is not None:
            return "error", refused
        if method not in self._control_methods:
            return self.call(term, method, info, *args, **kwargs)
        try:
            function = getattr(self._workload, method)
            value = function(*args, **kwargs, **info.wanted_by(function))
            if info.expected is not None:
                value = checked(info.expected, None, value, function, version=kwargs.get("version"))
            return "ok", value
        except BaseException as error:  # as in `call`
            return "error", self._failure(error, method)

    def call_position(self, term: int) -> tuple[str, Any]:
        """(control) The rank's `CallPosition`, also while a call runs. It fences nobody: calls of an older term that
        were sent to all ranks may still begin on all of them."""
        with self._fence:
            if term < self._term:
                return "error", self._older(term)
        return "ok", self._call_position

    def settle(self, term: int) -> tuple[str, Any]:
        """The rank's `CallPosition` after all calls that were sent to it before have ended. No call of an older term
        begins after this."""
        with self._work:
            refused = self._check_term(term)
            return ("ok", self._call_position) if refused is None else ("error", refused)

    # -- the trainer vertex (control) ---------------------------------------------------------------

    def start_fit(
        self, epoch: int, serial: int, running: dict[str, int], roles: dict[str, int], paused: bool
    ) -> None:
        self._hear(epoch)
        self._runtime.announce(serial, running, roles)
        self._runtime.start(paused=paused)

    def announce(self, epoch: int, serial: int, running: dict[str, int], roles: dict[str, int]) -> None:
        self._hear(epoch)
        if self._runtime is not None:
            self._runtime.announce(serial, running, roles)

    def set_paused(self, epoch: int, paused: bool) -> None:
        self._hear(epoch)
        self._runtime.set_paused(paused)

    def stop_fit(self, epoch: int) -> None:
        self._hear(epoch)
        self._runtime.stop()

    # -- inside -------------------------------------------------------------------------------------

    def report(self, kind: str, body: dict[str, Any]) -> None:
        """Queue an event, as plain data, for the master's next watch call. Thread-safe."""
        kind, body = plain_text(kind), plain_fields(body)
        with self._condition:
            if len(self._outbox) >= OUTBOX_LIMIT:
                raise RuntimeError(f"{OUTBOX_LIMIT} reports wait for a master: it has been away too long")
            self._outbox.append((self._outbox_next, kind, body))
            self._outbox_next += 1
            self._condition.notify_all()

    def _bind_runtime(self, binding: Binding, workload: Any, context: WorkloadContext) -> None:
        if binding.spec is None:
            return
        from gyre.workloads.runtime import TrainerRuntime

        stay_small()
        self._runtime = TrainerRuntime(binding, workload, context)

    def _failure(self, error: BaseException, method: str) -> Failure:
        """Of a method of the workload, which is named in it."""
        function = getattr(self._workload, method, None)
        name = named(function)[0] if callable(function) else ""
        return failure_of(error, module=type(self._workload).__module__, method=name)

    def _hear(self, epoch: int) -> None:
        with self._fence:
            if epoch < self._epoch:
                raise Fenced(f"{self.vertex} obeys epoch {self._epoch}; a call came with epoch {epoch}.")
            self._epoch = epoch
            self._heard_at = self._clock.monotonic()

    def _check_term(self, term: int) -> Failure | None:
        with self._fence:
            if term < self._term:
                return self._older(term)
            self._term = term
        if self._workload is None:
            return Failure(error=f"{self.vertex} is not set up yet", traceback="", user_code=False)
        return None

    def _older(self, term: int) -> Failure:
        text = f"{self.vertex} works for term {self._term}; a call came with term {term}."
        return Failure(error=text, traceback="", user_code=False, fenced=True)

    def _begin(self, what: str) -> None:
        self._moved_at = self._clock.monotonic()
        self._busy = what
        self.progress.tick()

    def _end(self) -> None:
        self._moved_at = self._clock.monotonic()
        self._busy = ""
        self.progress.tick()

    def _mind_the_master(self, binding: Binding) -> None:
        """Watch for the absence of a master: end one that hangs, and end this process after `orphan_timeout_s`."""
        timeout_s = binding.orphan_timeout_s
        self._guard = MasterWatchdog(binding.master_hung_after_s)
        pause_s = min(1.0, timeout_s / 4)
        while self._look_for_master(timeout_s):
            slept_at = self._clock.monotonic()
            time.sleep(pause_s)
            self._forgive(self._clock.monotonic() - slept_at - pause_s)

    def _forgive(self, late_s: float) -> None:
        """This process stood still for `late_s`, and could hear nobody: that is no silence of the master's."""
        if late_s > STOOD_STILL_S:
            self._heard_at = min(self._clock.monotonic(), self._heard_at + late_s)

    def _look_for_master(self, timeout_s: float) -> bool:
        """One look. Returns False if this process ends."""
        silent_s = self._clock.monotonic() - self._heard_at
        guard = self._guard
        if silent_s > timeout_s:
            print(f"{self.vertex}: no master for {timeout_s:g} s; stopping.", file=sys.stderr, flush=True)
            self._exit_process(ORPHANED)
            return False
        if guard is not None and (found := guard.look(silent_s)) is not None:
            self.report("MasterHung", {"vertex": self.vertex, **found})
        return True


def offer_context(workload: Any, context: WorkloadContext) -> None:
    """Set the context's names on a plain class's workload, except names that it has set itself."""
    for name in ("config", "rank", "world_size", "local_rank", "role"):
        if not hasattr(workload, name):
            setattr(workload, name, getattr(context, name))


def _extend_path(folders: list[str]) -> None:
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def _load_class(binding: Binding) -> type:
    if binding.file is not None:
        module = module_of_file(USER_SCRIPT, Path(binding.file))
    else:
        module = importlib.import_module(binding.module)
    found: Any = module
    for part in binding.name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise TypeError(f"{binding.module}:{binding.name} is not a class")
    return found


def own_places() -> list[Path]:
    """Where any process of Ray's writes, apart from the job's directory: shared memory, and Ray's folder."""
    places = [SHARED_MEMORY]
    try:
        import ray

        node = ray._private.worker._global_node if ray.is_initialized() else None
        if node is not None:
            places.append(Path(node.get_session_dir_path()))
    except ImportError:
        pass  # as in `_own_address`
    return places


def _own_address() -> str:
    """This host's address on the cluster's network; loopback if it has no other."""
    try:
        import ray

        if ray.is_initialized():
            address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            return address
    except ImportError:
        pass  # only tests have a host without Ray, on this machine
    return "127.0.0.1"
