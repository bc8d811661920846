"""A cluster whose processes are threads of this process: the real `JobMaster` starts, watches and stops them.

It implements `gyre.master.cluster.Cluster`, in real time and without Ray. In Gyre's own tests
`tests.doubles.fake_cluster` is the one in virtual time, whose vertices run no workload.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from gyre.config import TRAINER, JobSpec
from gyre.errors import VertexDied
from gyre.graph import NodeCapacity, SubGraph
from gyre.master.cluster import Address, CannotPlace, HostMethod, NotAnswering, P, ProcessDied, R, Spawned
from gyre.testing.in_process.host import InProcessHost, Moments
from gyre.testing.in_process.transport import InProcessTransport
from gyre.testing.in_process.vertex import InProcessVertex
from gyre.workloads.vertex.host import VertexHost
from gyre.workloads.vertex.messages import Binding, thread_stacks
from gyre.workloads.vertex.preflight import Needs


class InProcessCluster:
    """As many nodes as the job asks for, with room for everything but what `leave_no_room` names."""

    def __init__(self, spec: JobSpec, moments: Moments) -> None:
        self.vertices: dict[str, InProcessVertex] = {}
        """The newest incarnation of every vertex, dead or alive."""
        self.everything: list[InProcessVertex] = []
        self.answered = threading.Condition()
        """Notified when a vertex has answered the master."""
        self._nodes = [
            NodeCapacity(f"node-{n}", "127.0.0.1", cpu=1e6, memory_bytes=1 << 50, gpu=1e6)
            for n in range(spec.node_num or 1)
        ]
        self._moments = moments
        self._no_room: dict[str, Future[None]] = {}

    def find(self, vertex: str, incarnation: int) -> InProcessVertex | None:
        found = self.vertices.get(vertex)
        return found if found is not None and found.host.incarnation == incarnation else None

    def leave_no_room(self, *vertices: str) -> None:
        """Their next incarnations find no room until `make_room`."""
        self._no_room.update({vertex: Future() for vertex in vertices})

    def make_room(self, *vertices: str) -> None:
        for vertex in vertices:
            self._no_room.pop(vertex).set_result(None)

    # -- the master's port --------------------------------------------------------------------------

    async def nodes(self) -> list[NodeCapacity]:
        return self._nodes

    async def whole_nodes(self) -> list[NodeCapacity]:
        return self._nodes

    async def draining(self) -> dict[str, str]:
        return {}

    async def examine(self, node: str, needs: Needs) -> list[str] | None:
        return []

    async def place(self, sub_graph: SubGraph, timeout_s: float) -> None:
        """Room is looked for by vertex, in `spawn`."""

    async def demand(self, sub_graph: SubGraph) -> None:
        pass

    async def release(self, sub_graph_id: str) -> None:
        pass

    async def reserved(self) -> set[str]:
        return set()

    async def spawn(
        self, address: Address, *, sub_graph: SubGraph, bundle: int, epoch: int, timeout_s: float
    ) -> Spawned:
        vertex = address.vertex
        if (room := self._no_room.get(vertex)) is not None:
            done, _ = await asyncio.wait([asyncio.wrap_future(room)], timeout=timeout_s)
            if not done:
                raise CannotPlace(f"{vertex} found no room in {timeout_s:g} s, as the test wants it")
        if self.find(vertex, address.incarnation) is None:
            transport = None
            if vertex == f"{TRAINER}-0":
                transport = InProcessTransport(self.find, address.incarnation, moments=self._moments)
            host = InProcessHost(
                vertex, address.incarnation, epoch, moments=self._moments, transport=transport
            )
            self.vertices[vertex] = InProcessVertex(host)
            self.everything.append(self.vertices[vertex])
        told = await self.call(address, timeout_s, VertexHost.hello, epoch)
        return Spawned(pid=told["pid"], node=self._nodes[0].node_id, bound=told["bound"])

    async def call(
        self,
        address: Address,
        timeout_s: float,
        method: HostMethod[P, R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        return await self._ask(address, InProcessVertex.control, timeout_s, method, *args, **kwargs)

    async def bind(
        self, address: Address, epoch: int, binding: Binding, *, timeout_s: float
    ) -> tuple[str, Any]:
        return await self._ask(address, InProcessVertex.submit, timeout_s, VertexHost.bind, epoch, binding)

    async def _ask(
        self,
        address: Address,
        send: Callable[[InProcessVertex, Callable[[], Any]], Future[Any]],
        timeout_s: float,
        method: HostMethod[P, R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        vertex = self.find(address.vertex, address.incarnation)
        if vertex is None:
            raise ProcessDied(f"{address.vertex} has no incarnation {address.incarnation}")
        bound = getattr(vertex.host, method.__name__)  # an in-process host's own, where it has one
        future = asyncio.wrap_future(send(vertex, partial(bound, *args, **kwargs)))
        # Not `wait_for`, which in Python 3.11 forgets a cancellation that comes together with its result.
        try:
            done, _ = await asyncio.wait([future], timeout=timeout_s)
        finally:
            future.cancel()  # where nobody waits for the answer any more
        if not done:
            raise NotAnswering(f"{address.vertex} did not answer within {timeout_s:g} s")
        try:
            answer: R = future.result()
        except VertexDied as error:
            raise ProcessDied(error.message) from None
        with self.answered:
            self.answered.notify_all()
        return answer

    async def kill(self, address: Address, *, pid: int, node: str) -> None:
        vertex = self.find(address.vertex, address.incarnation)
        if vertex is not None and not vertex.is_cut_off:
            # On another thread: it runs what waits for the vertex's answers.
            await asyncio.to_thread(vertex.kill)

    async def activity(self, *, pid: int, node: str, over_s: float) -> None:
        return None  # every vertex is in this process

    async def memory_kills(self, counter: str, *, node: str) -> None:
        return None  # nobody is killed

    async def stacks(self, *, pid: int, node: str, timeout_s: float) -> str:
        return thread_stacks()

    async def end(self) -> None:
        pass
