"""A worker of a DLRover job in a vertex of Gyre's: the user's entrypoint, its exported methods, and its main.

Exported methods are called by the trainer, beside each other, as in DLRover: in threads, or, if they are coroutines, on
one loop. The main (a function, a class's `run`, a script) runs in a thread of its own.

An elastic role's ranks are a gang: they meet in torch's process group before the entrypoint is imported, under the same
variables as in DLRover. Their methods may hold a collective, so they are called one at a time, in one order on all
ranks; coroutines beside them.
"""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

from gyre.errors import GyreError, UserCodeError
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.vertex.messages import failure_of
from gyre_dlrover.common.enums import ACCELERATOR_TYPE
from gyre_dlrover.common.workload_desc import ElasticWorkloadDesc
from gyre_dlrover.description import JobDescription
from gyre_dlrover.entry import Entry
from gyre_dlrover.open_calls import CallNumber
from gyre_dlrover.raised import packed
from gyre_dlrover.relay import News, Relay, Result
from gyre_dlrover.station import Arguments, Station

MEETING_S = 1800.0
"""How long ranks wait for each other where the job does not say it: torch's own time-out."""


class Worker(BaseWorkload):
    def setup(self) -> None:
        description = JobDescription.of(self.config)
        role = description.role_of(self.role)
        assert role is not None, "the role was compiled from the description"
        self._workload = role.workload
        self._relay = Relay()
        self._station = Station(description, role, self.context, self._relay)
        self._station.on_export = lambda name, beside: self._relay.tell("export", (name, beside))
        self._entry: Entry | None = None
        self._main: threading.Thread | None = None
        self._raised: bytes | None = None
        self._joined = False
        self._set_environment()
        if isinstance(self._workload, ElasticWorkloadDesc):
            self._meet(self._workload, gpu=description.accelerator_type is ACCELERATOR_TYPE.GPU)

    def teardown(self) -> None:
        self._station.close()
        if self._joined:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    # -- the trainer's calls ------------------------------------------------------------------------

    def begin(self, run: bool) -> list[str]:
        """Make the entrypoint, and run its main unless it ran to its end before (`run` is False). Done once; a repeated
        call returns the same: the exported methods that run beside others."""
        entry = self._ready()
        if run and entry.main is not None and self._main is None:
            self._main = threading.Thread(
                target=self._run, args=(entry,), name="user_main_thread", daemon=True
            )
            self._main.start()
        return self._station.beside()

    @operator(control=True)
    def take(self, number: CallNumber, method: str, arguments: Arguments | bytes) -> None:
        """Begin a call of an exported method. Its result is told as news."""
        future = self._station.begin(method, partial(_read, arguments))
        future.add_done_callback(
            lambda done: self._relay.tell("result", (number, self._result(method, done)))
        )

    def rpc(self, method: str, arguments: Arguments | bytes) -> Any:
        """Call an exported method of a gang's rank. What comes pickled is answered so."""
        self._ready()
        try:
            value = self._station.invoke(method, _read(arguments))
        except Exception as error:
            self._raised = packed(error)
            raise
        return pickle.dumps(value) if isinstance(arguments, bytes) else value

    def rpc_each(self, parts: list[Arguments | bytes], method: str) -> list[Any]:
        """As `rpc`, with the one part that is this rank's."""
        return [self.rpc(method, part) for part in parts]

    @operator(control=True)
    def raised(self) -> bytes | None:
        """What `rpc` raised last."""
        return self._raised

    @operator(control=True)
    def attend(self, acknowledged: int, timeout_s: float) -> list[News]:
        return self._relay.attend(acknowledged, timeout_s)

    @operator(control=True)
    def answer(self, number: int, value: Any, error: Exception | None) -> None:
        self._relay.answer(number, value, error)

    # -- inside -------------------------------------------------------------------------------------

    def _ready(self) -> Entry:
        """The entrypoint, imported and made. A replacement may be called before it is told to begin."""
        if self._entry is None:
            with self._station.entered():
                self._entry = Entry(self._workload)
            self._station.is_made()
        return self._entry

    def _result(self, method: str, done: Future[Any]) -> Result:
        error = done.exception()
        if error is None:
            try:
                return Result(pickle.dumps(done.result()))
            except Exception as unsendable:  # whatever the user's objects raise
                error = UserCodeError(
                    f"the result of {method} cannot be sent: {type(unsendable).__name__}: {unsendable}"
                )
        module = type(error).__module__  # an exception of the user's is the user's wherever it was raised
        return Result(failure=failure_of(error, module=module, method=method), error=packed(error))

    def _run(self, entry: Entry) -> None:
        """The thread of the main. However it ends, the trainer is told: it would wait for ever otherwise."""
        try:
            with self._station.entered():
                entry.run()
        except BaseException as error:
            self._relay.tell("failed", failure_of(error, module=entry.module or "__main__", method="run"))
        else:
            self._relay.tell("ended", None)

    def _set_environment(self) -> None:
        me, per_group = self._station.actor_info, self._workload.per_group
        os.environ |= {
            "NAME": me.name,
            "RANK": str(me.rank),
            "WORLD_SIZE": str(self._workload.total),
            "LOCAL_RANK": str(me.local_rank),
            "LOCAL_WORLD_SIZE": str(per_group),
            "NODE_RANK": str(me.node_rank),
        }

    def _meet(self, workload: ElasticWorkloadDesc, *, gpu: bool) -> None:
        from gyre.workloads.addresses import free_port

        if self.context.master_addr is None:  # one rank alone
            self.context.master_addr, self.context.master_port = "127.0.0.1", free_port("127.0.0.1")
        os.environ |= {
            "MASTER_ADDR": self.context.master_addr,
            "MASTER_PORT": str(self.context.master_port),
            "ACCELERATE_TORCH_DEVICE": "cuda:0" if gpu else "cpu",
        }
        if not workload.comm_auto_setup_process_group:
            return
        try:
            import torch
        except ImportError as error:
            raise GyreError(
                "An elastic role's ranks meet in torch's process group, and torch is not installed.",
                hint="Install torch, or say .no_setup_process_group().",
            ) from error
        from gyre.workloads.gang.rendezvous import join

        if gpu:
            torch.cuda.set_device(0)
        backend = workload.comm_backend
        if backend == "auto":
            backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        timeout_s = float(workload.comm_timeout_s or MEETING_S)
        join(self.context, backend, timeout_s)
        self._joined = True


def _read(arguments: Arguments | bytes) -> Arguments:
    read: Arguments = pickle.loads(arguments) if isinstance(arguments, bytes) else arguments
    return read
