"""The one class that makes the master's Ray calls.

Vertices are detached actors named `job/vertex/incarnation`, `max_restarts=0`, in detached placement groups: they
outlive the master, and the control plane alone restarts them. A pending call to such an actor fails 12 ms after
its process is killed; that is the detection of deaths.

Everything that depends on the Ray version in `constraints.txt` is in this module, each with a contract test.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import signal
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from gyre.config import ROLLOUT_MANAGER, TRAINER
from gyre.graph import NodeCapacity, SubGraph
from gyre.master.cluster import Address, CannotPlace, HostMethod, NotAnswering, P, ProcessDied, R, Spawned
from gyre.process_activity import Activity, activity_of
from gyre.process_identity import ProcessIdentity
from gyre.workloads.vertex.host import VertexHost
from gyre.workloads.vertex.memory_kills import kills_in
from gyre.workloads.vertex.messages import Binding
from gyre.workloads.vertex.observed_process import describe_process
from gyre.workloads.vertex.preflight import Needs, examine
from gyre.workloads.vertex.transport import NAMESPACE, actor_name

TOKEN_CPU = 0.001
"""CPU share of a bundle that reserves no CPU: Ray refuses an empty bundle."""

CONTROL_THREADS = 4
"""Concurrent control calls to a vertex: one is the pending watch call, the others are for calls meanwhile."""

OPERATOR_THREADS = 4
"""Concurrent calls of the user's own control operators, which may block: the watch call must not wait for them."""

REMOVAL_DEADLINE_S = 10.0

MEMORY_ASKED_S = 1.0
"""For a machine's count of kills: the repair of a death waits for it. A worker of Ray's that is idle needs 5 ms. One
that must be started may need 1.5 s, and then the cause is known less well."""

EXAMINED_S = 60.0
"""For a pre-flight: a worker process is started for it, and GPUs may take half of it."""

LOOK_AGAIN_S = 0.2
"""A look at the machines serves for so long: what is free there changes no faster than Ray reports it."""

LONGEST_PAUSE_S = 0.25
"""Between two looks at a placement group that waits for room."""

STANDS_EVERY_S = 1.0
"""How often it is looked whether the machine of a process that starts is still there."""

DEAD_NODE = re.compile(r"its node has died\. Node Id: ([0-9a-f]+)")
"""What Ray says to a call of an actor whose machine died."""

_WITHOUT_A_WORD = "exits with a connection error code 2. End of file"
"""What Ray says, among 700 characters of possible causes, of a process that a signal or a crash ended."""

NODE_LABEL = "ray.io/node-id"
"""The label that Ray gives every node; a bundle that selects it stands on that machine."""


WRITERS = (TRAINER, ROLLOUT_MANAGER)
"""Roles that write to the store: their ledgers are rows in it."""


def how_it_died(detail: str) -> str:
    """What Ray says of an actor's death; of one without an exception in a sentence of our own."""
    if _WITHOUT_A_WORD not in detail:
        return detail
    pid = re.search(r"\bpid: (\d+)", detail)
    process = f"process {pid[1]}" if pid else "the process"
    return (
        f"{process} was killed or crashed, without a Python exception (`dmesg` shows whether the kernel killed it for "
        "memory)"
    )


class RayCluster:
    def __init__(
        self, job_id: str, *, device_type: str, master: Any = None, writers_stay_here: bool = False
    ) -> None:
        """With `writers_stay_here` the trainer and the rollout manager run on the master's machine, where the file with
        their ledgers is."""
        self._job_id = job_id
        self._writers_stay_here = writers_stay_here
        self._gpu = device_type == "GPU"
        self._master = master
        self._groups: dict[str, PlacementGroup] = {}
        self._placing: dict[str, asyncio.Lock] = {}
        self._stand: dict[str, set[str]] = {}
        """The machines of the placement groups, by sub-graph."""
        self._waiting: dict[str, set[str]] = {}
        """The machines that the waiting placement groups ask for, by sub-graph."""
        self._looking = asyncio.Lock()
        self._seen: tuple[float, list[NodeCapacity]] = (-LOOK_AGAIN_S, [])
        self._dead: set[str] = set()
        """Machines whose death a call has reported: Ray's list has them for a while still. No id comes back."""
        self._actors: dict[Address, Any] = {}
        self._processes: dict[Address, ProcessIdentity] = {}
        """Those that this master has started."""
        remote: Any = ray.remote  # its stubs do not know concurrency groups
        self._host = remote(
            num_cpus=0,
            max_restarts=0,
            concurrency_groups={"control": CONTROL_THREADS, "operators": OPERATOR_THREADS},
            enable_task_events=False,
        )(VertexHost)

    # -- nodes and placement ------------------------------------------------------------------------

    async def nodes(self) -> list[NodeCapacity]:
        # Many vertices that start together ask together, and one look serves them all.
        async with self._looking:
            seen_at, seen = self._seen
            now = asyncio.get_running_loop().time()
            if now - seen_at > LOOK_AGAIN_S:
                seen = await asyncio.to_thread(self._look)
                self._seen = now, seen
            return self._living(seen)

    def _look(self) -> list[NodeCapacity]:
        """The machines without what others have reserved there."""
        free = available_resources_per_node()  # type: ignore[no-untyped-call]
        own: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for group in placement_group_table().values():
            if group["state"] == "CREATED" and group["name"].startswith(f"{self._job_id}/"):
                for index, node in group["bundles_to_node_id"].items():
                    for resource, amount in group["bundles"][index].items():
                        own[node][resource] += amount

        def usable(node: NodeCapacity, resource: str, total: float) -> float:
            # Ray tells of what is free a moment late, so that a new placement group may be in both.
            left = float(free.get(node.node_id, {}).get(resource, 0.0)) + own[node.node_id][resource]
            return min(total, round(left, 3))

        return [
            NodeCapacity(
                node.node_id,
                node.ip,
                cpu=usable(node, "CPU", node.cpu),
                memory_bytes=int(usable(node, "memory", node.memory_bytes)),
                gpu=usable(node, "GPU", node.gpu),
                custom={name: usable(node, name, total) for name, total in node.custom.items()},
                labels=node.labels,
            )
            for node in living_nodes()
        ]

    async def whole_nodes(self) -> list[NodeCapacity]:
        return self._living(await asyncio.to_thread(living_nodes))

    def _living(self, nodes: list[NodeCapacity]) -> list[NodeCapacity]:
        return [node for node in nodes if node.node_id not in self._dead]

    async def draining(self) -> dict[str, str]:
        deadlines = await asyncio.to_thread(get_draining_nodes)
        return {node: _notice(at_ms) for node, at_ms in deadlines.items()}

    async def examine(self, node: str, needs: Needs) -> list[str] | None:
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(examine)
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        found: list[str] | None = await _within(
            remote.options(scheduling_strategy=where).remote(needs), EXAMINED_S
        )
        return found

    async def place(self, sub_graph: SubGraph, timeout_s: float) -> None:
        # Two vertices of one sub-graph ask at the same time; only one may create it.
        async with self._placing.setdefault(sub_graph.id, asyncio.Lock()):
            await self._place(sub_graph, timeout_s)

    async def demand(self, sub_graph: SubGraph) -> None:
        # Ray's autoscaler looks at pending placement groups. This one is bound to no machine, for none would do.
        async with self._placing.setdefault(sub_graph.id, asyncio.Lock()):
            name = f"{self._job_id}/{sub_graph.id}"
            if sub_graph.id in self._groups or await asyncio.to_thread(self._find, name) is not None:
                return
            labels = [dict(bundle.labels) for bundle in sub_graph.bundles]
            await asyncio.to_thread(self._create, name, sub_graph, labels)
            self._waiting[sub_graph.id] = set()

    async def _place(self, sub_graph: SubGraph, timeout_s: float) -> None:
        machines = {node.node_id for node in await self.nodes()}
        name = f"{self._job_id}/{sub_graph.id}"
        selectors = self._selectors(sub_graph, machines)
        pins = {selector[NODE_LABEL] for selector in selectors if selector}
        if sub_graph.id in self._groups:
            if pins <= self._stand[sub_graph.id] <= machines:
                return
            # Its machine is gone, or it shall stand elsewhere. No process lives in it.
            await self._remove(name, self._groups.pop(sub_graph.id))
        group = await asyncio.to_thread(self._find, name)
        state, where = ("", set()) if group is None else await asyncio.to_thread(_state_of, group)
        if group is not None and (
            # The group's machine died under an earlier master.
            state == "RESCHEDULING"
            # It waits, perhaps for a machine that another plan chose, or stands where it shall not.
            or (state == "PENDING" and self._waiting.get(sub_graph.id) != pins)
            or (state == "CREATED" and not pins <= where)
        ):
            await self._remove(name, group)
            group = None
        if group is None:
            group = await asyncio.to_thread(self._create, name, sub_graph, selectors)
        self._waiting[sub_graph.id] = pins
        if not await _is_created(group, timeout_s):
            available = await asyncio.to_thread(ray.available_resources)
            shown = _in_words(available)
            bundles = "; ".join(_in_words(bundle) for bundle in self._bundles(sub_graph))
            required = f"{bundles} ({sub_graph.strategy})" if len(sub_graph.bundles) > 1 else bundles
            raise CannotPlace(
                f"{sub_graph.id} found no room in {timeout_s:g} s: required {required}, available {shown}",
                required=required,
                available=f"{shown} in the whole cluster",
            )
        self._waiting.pop(sub_graph.id, None)
        self._groups[sub_graph.id] = group
        self._stand[sub_graph.id] = (await asyncio.to_thread(_state_of, group))[1]

    def _selectors(self, sub_graph: SubGraph, machines: set[str]) -> list[dict[str, str]]:
        """Label selectors that put each bundle on the machine that the plan chose; none on a cluster of one machine."""
        out = []
        for bundle in sub_graph.bundles:
            pin = bundle.machine if bundle.machine in machines else ""
            if self._writers_stay_here and any(f"{role}-0" in bundle.vertices for role in WRITERS):
                pin = _own_node()
            out.append({NODE_LABEL: pin} if pin and len(machines) > 1 else {})
        return out

    async def _remove(self, name: str, group: PlacementGroup) -> None:
        """Remove a placement group; when this returns, its name is free again."""
        await asyncio.to_thread(remove_placement_group, group)
        deadline = asyncio.get_running_loop().time() + REMOVAL_DEADLINE_S
        while await asyncio.to_thread(self._find, name) is not None:
            if asyncio.get_running_loop().time() > deadline:
                raise CannotPlace(
                    f"Ray did not remove the placement group {name} in {REMOVAL_DEADLINE_S:g} s"
                )
            await asyncio.sleep(0.05)

    @staticmethod
    def _find(name: str) -> PlacementGroup | None:
        try:
            group: PlacementGroup = get_placement_group(name)
        except ValueError:  # Ray's way of saying that there is none
            return None
        return group

    def _create(self, name: str, sub_graph: SubGraph, selectors: list[dict[str, str]]) -> PlacementGroup:
        options: dict[str, Any] = {"bundle_label_selector": selectors} if any(selectors) else {}
        group: PlacementGroup = placement_group(
            self._bundles(sub_graph), strategy=sub_graph.strategy, name=name, lifetime="detached", **options
        )
        return group

    def _bundles(self, sub_graph: SubGraph) -> list[dict[str, float]]:
        out = []
        for bundle in sub_graph.bundles:
            resources: dict[str, float] = {"CPU": max(bundle.cpu, TOKEN_CPU)}
            if bundle.memory_bytes:
                resources["memory"] = float(bundle.memory_bytes)
            if self._gpu and bundle.accelerator:
                resources["GPU"] = bundle.accelerator
            resources.update(bundle.custom)
            out.append(resources)
        return out

    async def release(self, sub_graph_id: str) -> None:
        # Whoever wants it again meanwhile makes a new one, once this one's name is free.
        async with self._placing.setdefault(sub_graph_id, asyncio.Lock()):
            name = f"{self._job_id}/{sub_graph_id}"
            group = self._groups.pop(sub_graph_id, None) or await asyncio.to_thread(self._find, name)
            if group is None:
                return  # never made, or gone already
            with contextlib.suppress(CannotPlace):  # it is asked for; Ray takes its time
                await self._remove(name, group)

    async def reserved(self) -> set[str]:
        groups = await asyncio.to_thread(placement_group_table)
        prefix = f"{self._job_id}/"
        return {
            group["name"].removeprefix(prefix)
            for group in groups.values()
            if group["state"] != "REMOVED" and group["name"].startswith(prefix)
        }

    # -- processes ----------------------------------------------------------------------------------

    async def spawn(
        self, address: Address, *, sub_graph: SubGraph, bundle: int, epoch: int, timeout_s: float
    ) -> Spawned:
        await self.place(sub_graph, timeout_s)
        accelerator = next(
            (b.accelerator / max(1, len(b.vertices)) for b in sub_graph.bundles if b.index == bundle), 0.0
        )
        options: dict[str, Any] = {
            "name": actor_name(self._job_id, address.vertex, address.incarnation),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._groups[sub_graph.id], placement_group_bundle_index=bundle
            ),
        }
        if self._gpu and accelerator:
            options["num_gpus"] = accelerator
        try:
            actor = await asyncio.to_thread(
                lambda: self._host.options(**options).remote(address.vertex, address.incarnation, epoch)
            )
        except ValueError as error:  # what Ray says to a bundle or a resource that the group does not have
            raise CannotPlace(f"Ray refused to place {address.vertex}: {error}") from None
        self._actors[address] = actor
        told = await self._first_word(address, sub_graph, epoch, timeout_s)
        node = await asyncio.to_thread(_node_of, actor)
        self._processes[address] = told["process"]
        return Spawned(told["pid"], node, told["bound"], told["memory_kills"])

    async def _first_word(self, address: Address, sub_graph: SubGraph, epoch: int, timeout_s: float) -> Any:
        """What `hello` answers. Ray lets an actor whose machine dies before it is up wait for another machine, which
        its place does not allow."""
        hello = asyncio.ensure_future(self.call(address, timeout_s, VertexHost.hello, epoch))
        try:
            while not (await asyncio.wait({hello}, timeout=STANDS_EVERY_S))[0]:
                gone = self._stand[sub_graph.id] - {node.node_id for node in await self.nodes()}
                if gone:
                    raise ProcessDied(f"{address.vertex}: its machine {min(gone)} has died", node_lost=True)
            return hello.result()
        finally:
            hello.cancel()

    async def call(
        self,
        address: Address,
        timeout_s: float,
        method: HostMethod[P, R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        actor = await self._actor(address)
        remote = getattr(actor, method.__name__).options(concurrency_group="control").remote
        answer: R = await self._answer(remote(*args, **kwargs), address, timeout_s)
        return answer

    async def bind(
        self, address: Address, epoch: int, binding: Binding, *, timeout_s: float
    ) -> tuple[str, Any]:
        actor = await self._actor(address)
        answer: tuple[str, Any] = await self._answer(actor.bind.remote(epoch, binding), address, timeout_s)
        return answer

    async def _actor(self, address: Address) -> Any:
        if address not in self._actors:
            name = actor_name(self._job_id, address.vertex, address.incarnation)
            try:
                self._actors[address] = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            except ValueError as error:  # no living actor of that name
                raise ProcessDied(f"no actor {name}: {error}") from None
        return self._actors[address]

    async def _answer(self, reference: Any, address: Address, timeout_s: float) -> Any:
        try:
            return await asyncio.wait_for(_as_future(reference), timeout_s)
        except (TimeoutError, GetTimeoutError):
            raise NotAnswering(f"{address.vertex} did not answer within {timeout_s:g} s") from None
        except ActorUnavailableError as error:
            # Only a suspicion: the connection broke, and the process may still live.
            raise NotAnswering(str(error)[:500]) from None
        except ActorUnschedulableError as error:
            raise CannotPlace(str(error)[:500]) from None
        except (ActorDiedError, RayActorError) as error:
            self._actors.pop(address, None)
            detail = str(error)
            if (dead := DEAD_NODE.search(detail)) is not None:
                self._dead.add(dead[1])
            raise ProcessDied(how_it_died(detail)[:2000], node_lost="node has died" in detail) from None
        except OutOfMemoryError as error:  # Ray ends processes of a machine whose memory is nearly full
            self._actors.pop(address, None)
            raise ProcessDied(str(error)[:2000], out_of_memory=True) from None
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            # None of those that tell a death: only a suspicion, and the next call shows more.
            raise NotAnswering(f"{type(error).__name__}: {error}"[:500]) from None

    async def kill(self, address: Address, *, pid: int, node: str) -> None:
        try:
            actor = await self._actor(address)
        except ProcessDied:
            return
        if pid:
            # Ray asks the process to end itself, which a stopped process cannot do.
            await self._kill_process(address, pid, node)
        await asyncio.to_thread(ray.kill, actor, no_restart=True)
        self._actors.pop(address, None)
        self._processes.pop(address, None)
        deadline = asyncio.get_running_loop().time() + REMOVAL_DEADLINE_S
        name = actor_name(self._job_id, address.vertex, address.incarnation)
        while asyncio.get_running_loop().time() < deadline:
            try:
                await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            except ValueError:
                return
            await asyncio.sleep(0.02)

    async def _kill_process(self, address: Address, pid: int, node: str) -> None:
        known = self._processes.get(address)
        if known is not None and known.pid != pid:
            known = None
        if node == _own_node():
            _kill_process(pid, known)
            return
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(_kill_process)
        reference = remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(pid, known)
        await _within(reference, 5.0)

    async def stacks(self, *, pid: int, node: str, timeout_s: float) -> str:
        if not pid:
            return "(no process id)"
        if node == _own_node():
            return await asyncio.to_thread(describe_process, pid, timeout_s)
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(describe_process)
        reference = remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(pid, timeout_s)
        return await _within(reference, timeout_s + 5.0) or f"(node {node} did not answer)"

    async def activity(self, *, pid: int, node: str, over_s: float) -> Activity | None:
        if not pid:
            return None
        if node == _own_node():
            found = await asyncio.to_thread(activity_of, pid, over_s)
        else:
            remote: Any = ray.remote(num_cpus=0, max_retries=0)(activity_of)
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            found = await _within(remote.options(scheduling_strategy=where).remote(pid, over_s), over_s + 5.0)
        return found

    async def memory_kills(self, counter: str, *, node: str) -> int | None:
        if node == _own_node():
            return kills_in(counter)
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(kills_in)
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        asked = remote.options(scheduling_strategy=where).remote(counter)
        found: int | None = await _within(asked, MEMORY_ASKED_S)
        return found

    async def end(self) -> None:
        if self._master is not None:
            await asyncio.to_thread(ray.kill, self._master, no_restart=True)


def get_draining_nodes() -> dict[str, int]:
    """Ray's draining nodes, by id, with their deadlines in ms since 1970; 0 for none. `ray.nodes()` does not tell."""
    found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return found


def _notice(deadline_ms: int) -> str:
    if not deadline_ms:
        return "Ray drains it"
    at = datetime.datetime.fromtimestamp(deadline_ms / 1000, datetime.UTC)
    return f"Ray drains it by {at:%H:%M:%S} UTC"


def living_nodes() -> list[NodeCapacity]:
    """The machines of the cluster that this process is connected to, and what they have in all."""
    return [
        NodeCapacity(
            node_id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            cpu=float(node["Resources"].get("CPU", 0)),
            memory_bytes=int(node["Resources"].get("memory", 0)),
            gpu=float(node["Resources"].get("GPU", 0)),
            custom=_own_resources(node["Resources"]),
            labels=dict(node["Labels"]),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def _own_resources(resources: Mapping[str, float]) -> dict[str, float]:
    """Those that the user named. Ray adds others: for each node one, and the type of an accelerator."""
    ours = ("CPU", "GPU", "memory", "object_store_memory")
    return {
        name: float(amount)
        for name, amount in resources.items()
        if name not in ours and not name.startswith(("node:", "accelerator_type:"))
    }


def _in_words(resources: Mapping[str, float]) -> str:
    """What there is of CPUs, GPUs and memory."""
    words = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
    if resources.get("memory"):
        words.append(f"{resources['memory'] / 2**30:.1f} GiB of memory")
    return ", ".join(words) or "nothing"


def _as_future(reference: Any) -> asyncio.Future[Any]:
    return asyncio.wrap_future(reference.future())


async def _within(reference: Any, timeout_s: float) -> Any:
    """Returns the result of a helper task, or None if its node is gone: callers can do without the result."""
    try:
        return await asyncio.wait_for(_as_future(reference), timeout_s)
    except (TimeoutError, RayActorError, RayTaskError, ray.exceptions.RayError):
        return None


async def _is_created(group: PlacementGroup, timeout_s: float) -> bool:
    """Whether the group has its place before the timeout. `group.ready()` would leave a pending task behind with each
    call that is given up."""
    deadline, pause_s = asyncio.get_running_loop().time() + timeout_s, 0.005
    while (await asyncio.to_thread(_state_of, group))[0] != "CREATED":
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return True


def _state_of(group: PlacementGroup) -> tuple[str, set[str]]:
    """The state of a placement group, and the machines that it stands on."""
    told = placement_group_table(group)
    return str(told.get("state", "")), set(told.get("bundles_to_node_id", {}).values())


def _own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _kill_process(pid: int, known: ProcessIdentity | None) -> None:
    """Kill a vertex's process on this machine. A master that did not start it knows the pid alone: the process has to
    be one that Ray runs a vertex in."""
    process = known or ProcessIdentity.of(pid)
    if process is None or (known is None and not _hosts_a_vertex(pid)):
        return
    with contextlib.suppress(PermissionError):  # not ours, so not the vertex
        process.signal(signal.SIGKILL)


def _hosts_a_vertex(pid: int) -> bool:
    """By the title that Ray gives the process of an actor."""
    try:
        return f"ray::{VertexHost.__name__}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _node_of(actor: Any) -> str:
    """Returns the node that an actor runs on, from Ray's actor table."""
    table = ray._private.state.actors(actor._actor_id.hex())
    return str(table.get("Address", {}).get("NodeID", ""))
