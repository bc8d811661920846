"""A master's connection to the fake cluster, which can be cut as its process dies."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from gyre.graph import NodeCapacity, SubGraph
from gyre.master.cluster import Address, HostMethod, P, R, Spawned
from gyre.process_activity import Activity
from gyre.workloads.vertex.messages import Binding
from gyre.workloads.vertex.preflight import Needs

if TYPE_CHECKING:
    from tests.doubles.fake_cluster import FakeCluster

T = TypeVar("T")

STACK_FROM_OUTSIDE = "state: T (stopped)"


class Connection:
    """A master's `Cluster`. Once cut, no call of its master reaches the world."""

    def __init__(self, world: FakeCluster) -> None:
        self._world = world
        self._cut = False

    def cut(self) -> None:
        """The master's process is gone."""
        self._cut = True

    async def _through(self, call: Coroutine[Any, Any, T]) -> T:
        if self._cut:
            call.close()
            raise asyncio.CancelledError("the master that calls is dead")
        return await call

    async def nodes(self) -> list[NodeCapacity]:
        self._world.advance()
        return self._world.room.capacities()

    async def whole_nodes(self) -> list[NodeCapacity]:
        return [machine.whole for machine in self._world.room.machines.values()]

    async def draining(self) -> dict[str, str]:
        return {
            machine.name: "the cluster drains it"
            for machine in self._world.room.machines.values()
            if machine.draining
        }

    async def examine(self, node: str, needs: Needs) -> list[str] | None:
        machine = self._world.room.machines.get(node)
        return list(machine.unfit) if machine is not None else None

    async def place(self, sub_graph: SubGraph, timeout_s: float) -> None:
        await self._through(self._world.place(sub_graph, timeout_s))

    async def demand(self, sub_graph: SubGraph) -> None:
        if not self._cut:
            self._world.room.demands.add(sub_graph.id)

    async def release(self, sub_graph_id: str) -> None:
        if not self._cut:
            self._world.room.release(sub_graph_id)

    async def reserved(self) -> set[str]:
        return {*self._world.room.places, *self._world.room.demands}

    async def spawn(
        self, address: Address, *, sub_graph: SubGraph, bundle: int, epoch: int, timeout_s: float
    ) -> Spawned:
        return await self._through(self._world.spawn(address, sub_graph, bundle, epoch, timeout_s))

    async def call(
        self,
        address: Address,
        timeout_s: float,
        method: HostMethod[P, R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        answer: R = await self._through(self._world.call(address, timeout_s, method, *args, **kwargs))
        return answer

    async def bind(
        self, address: Address, epoch: int, binding: Binding, *, timeout_s: float
    ) -> tuple[str, Any]:
        return await self._through(self._world.bind(address, epoch, binding, timeout_s=timeout_s))

    async def kill(self, address: Address, *, pid: int, node: str) -> None:
        await self._through(self._world.kill_address(address))

    async def stacks(self, *, pid: int, node: str, timeout_s: float) -> str:
        return STACK_FROM_OUTSIDE if pid else "(no process id)"

    async def activity(self, *, pid: int, node: str, over_s: float) -> Activity | None:
        await asyncio.sleep(over_s)
        process = next((one for one in self._world.processes.values() if one.pid == pid and one.alive), None)
        return process.activity if process is not None else None

    async def memory_kills(self, counter: str, *, node: str) -> int | None:
        machine = self._world.room.machines.get(node)
        return machine.memory_kills if machine is not None else None

    async def end(self) -> None:
        if not self._cut:
            self._world.ended = True
