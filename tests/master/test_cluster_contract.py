"""What a master may rely on of a cluster, said once: `RayCluster` and its double `FakeCluster` answer alike."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RaySystemError

from gyre.errors import Fenced
from gyre.graph import Bundle, SubGraph
from gyre.master.cluster import Address, CannotPlace, Cluster, NotAnswering, ProcessDied, Spawned
from gyre.master.ray_cluster import CONTROL_THREADS, RayCluster, living_nodes
from gyre.process_activity import ProcessLife
from gyre.testing.clock import VirtualClock, run_virtual
from gyre.workloads.vertex.host import VertexHost
from gyre.workloads.vertex.messages import Binding, Failure, VertexReport
from gyre.workloads.vertex.preflight import needs_of
from gyre.workloads.vertex.transport import RayTransport
from tests.doubles.fake_cluster import FakeCluster
from tests.master.contract_workloads import BLOCKS_S
from tests.waits import GENEROUS_S

FIRST, SECOND = Address("rollout-0", 1), Address("rollout-0", 2)
PLACE = SubGraph("rollout-0", (Bundle(0, 0, ("rollout-0",)),), "PACK")
HERE = Path(__file__).parent
WATCH_S = 0.3


class Bench:
    """A cluster under test, and the two things that only the world can do: raise in `setup`, stop a process."""

    def __init__(
        self, cluster: Cluster, world: FakeCluster | None, folder: Path, job_id: str = "contract"
    ) -> None:
        self.cluster = cluster
        self.job_id = job_id
        self._world = world
        self._folder = folder

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            try:
                await scenario()
            finally:
                for address in (FIRST, SECOND):
                    await self.cluster.kill(address, pid=0, node="")
                await self.cluster.release(PLACE.id)

        if self._world is not None:
            run_virtual(whole(), self._world.clock)
        else:
            asyncio.run(whole())

    def now(self) -> float:
        return time.monotonic() if self._world is None else self._world.clock.monotonic()

    async def spawn(self, address: Address = FIRST, epoch: int = 1) -> Spawned:
        return await self.cluster.spawn(address, sub_graph=PLACE, bundle=0, epoch=epoch, timeout_s=GENEROUS_S)

    async def bind(self, address: Address, workload: str = "Quiet") -> Any:
        if self._world is not None and workload == "Raising":
            self._world.fail_setup(address.vertex, user_code=True)
        return await self.cluster.bind(address, 1, self._binding(address, workload), timeout_s=GENEROUS_S)

    def stop(self, spawned: Spawned) -> None:
        """The process stays, and answers nothing."""
        if self._world is not None:
            self._world.hang(FIRST.vertex)
        else:
            os.kill(spawned.pid, signal.SIGSTOP)

    def end(self, spawned: Spawned) -> None:
        if self._world is not None:
            self._world.kill(FIRST.vertex)
        else:
            os.kill(spawned.pid, signal.SIGKILL)

    def cpus(self) -> float:
        """Those of the one machine, whoever holds them."""
        [node] = living_nodes() if self._world is None else self._world.room.capacities()
        return node.cpu

    def demands(self) -> list[str]:
        """The sub-graphs that whoever adds machines sees."""
        if self._world is not None:
            return sorted(self._world.room.demands)
        from ray.util.placement_group import placement_group_table

        groups = [group for group in placement_group_table().values() if group["state"] == "PENDING"]
        own = [group["name"].split("/") for group in groups]
        return sorted(name for job, name in own if job == self.job_id)

    async def other_takes(self, cpu: float) -> Callable[[], Awaitable[None]]:
        """Another job reserves CPUs. Returns what gives them back."""
        [node] = await self.cluster.nodes()
        if (world := self._world) is not None:
            world.occupy(node.node_id, cpu=cpu)

            async def give_back() -> None:
                world.occupy(node.node_id)
        else:
            other = RayCluster(f"{self.job_id}-other", device_type="CPU")
            place = needing("other-0", cpu)
            await other.place(place, GENEROUS_S)

            async def give_back() -> None:
                await other.release(place.id)

        return give_back

    def _binding(self, address: Address, workload: str) -> Binding:
        return Binding(
            job_id="contract",
            job_name="contract",
            role="rollout",
            rank=0,
            world_size=1,
            local_rank=0,
            incarnation=address.incarnation,
            module="contract_workloads",
            name=workload,
            file=None,
            config={},
            env={},
            python_path=[str(HERE)],
            directory=str(self._folder),
            log_path=str(self._folder / "logs" / f"{address.vertex}.log"),
            orphan_timeout_s=GENEROUS_S,
        )


def needing(vertex: str, cpu: float) -> SubGraph:
    """The place of a vertex that reserves CPUs."""
    return SubGraph(vertex, (Bundle(0, 0, (vertex,), cpu=cpu),), "PACK")


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Ray tells of what is free a moment late."""
    deadline = time.monotonic() + GENEROUS_S
    while not await holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """A Ray of its own in a short folder (its sockets have long names); skipped beside one that runs already."""
    import ray

    from gyre.api.home import home
    from gyre.api.ray_session import connect, disconnect

    here = not ray.is_initialized()
    with tempfile.TemporaryDirectory(prefix="gc", dir="/tmp") as folder:
        if here:
            connect(None, start_local=True, place=home(folder))
        yield
        if here:
            disconnect()


@pytest.fixture(params=["fake", pytest.param("ray", marks=pytest.mark.ray)])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "fake":
        world = FakeCluster(VirtualClock())
        yield Bench(world.connect(), world, tmp_path)
        return
    request.getfixturevalue("ray_session")
    job_id = f"contract-{os.urandom(4).hex()}"
    yield Bench(RayCluster(job_id, device_type="CPU"), None, tmp_path, job_id)


def test_a_process_is_started_once_and_found_again(bench: Bench) -> None:
    async def scenario() -> None:
        first = await bench.spawn()
        assert first.pid > 0
        assert first.node
        assert not first.bound
        assert await bench.spawn(epoch=2) == first
        status, told = await bench.cluster.bind(
            FIRST, 2, bench._binding(FIRST, "Quiet"), timeout_s=GENEROUS_S
        )
        assert (status, told) == ("ok", {"pid": first.pid})
        again = await bench.spawn(epoch=3)
        assert (again.pid, again.bound) == (first.pid, True)
        assert (await bench.cluster.bind(FIRST, 3, bench._binding(FIRST, "Quiet"), timeout_s=GENEROUS_S))[
            0
        ] == "ok"

    bench.run(scenario)


def test_setup_that_raises_is_told_and_the_process_lives_on(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.spawn()
        status, failure = await bench.bind(FIRST, "Raising")
        assert status == "error"
        assert isinstance(failure, Failure)
        assert failure.user_code
        assert failure.error.startswith("ValueError: ")
        assert "in setup" in failure.traceback
        told = await bench.cluster.call(FIRST, GENEROUS_S, VertexHost.hello, 1)
        assert not told["bound"]

    bench.run(scenario)


def test_a_quiet_watch_ends_at_its_deadline_with_a_report(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.spawn()
        await bench.bind(FIRST)
        await bench.cluster.call(
            FIRST, GENEROUS_S, VertexHost.watch, 1, 0, 0.01
        )  # sees the end of the set-up
        began = bench.now()
        report = await bench.cluster.call(FIRST, GENEROUS_S, VertexHost.watch, 1, 0, WATCH_S)
        assert isinstance(report, VertexReport)
        assert bench.now() - began >= WATCH_S * 0.9
        assert (report.busy, report.outbox, report.version) == ("", [], None)
        assert report.still_s >= WATCH_S * 0.9

    bench.run(scenario)


@pytest.mark.ray
@pytest.mark.parametrize("bench", ["ray"], indirect=True)
def test_operators_that_block_keep_nobody_from_watching(bench: Bench) -> None:
    """Else a healthy vertex counts as silent, and is killed."""

    async def scenario() -> None:
        await bench.spawn()
        await bench.bind(FIRST, "Blocking")
        transport = RayTransport(bench.job_id, 1)
        calls = [
            transport.submit(FIRST.vertex, FIRST.incarnation, "look", control=True)
            for _ in range(2 * CONTROL_THREADS)
        ]
        await asyncio.sleep(1.0)  # by then they have begun
        report = await bench.cluster.call(FIRST, BLOCKS_S / 2, VertexHost.watch, 1, 0, WATCH_S)
        assert isinstance(report, VertexReport)
        assert not any(call.done() for call in calls)

    bench.run(scenario)


def test_a_death_is_known_at_the_call_that_waits(bench: Bench) -> None:
    async def scenario() -> None:
        spawned = await bench.spawn()
        await bench.bind(FIRST)
        watch = asyncio.ensure_future(
            bench.cluster.call(FIRST, 10 * GENEROUS_S, VertexHost.watch, 1, 0, 10 * GENEROUS_S)
        )
        await asyncio.sleep(0.2)
        bench.end(spawned)
        with pytest.raises(ProcessDied) as death:
            await watch
        assert death.value.detail
        assert not death.value.node_lost
        with pytest.raises(ProcessDied):
            await bench.cluster.call(FIRST, GENEROUS_S, VertexHost.hello, 1)
        with pytest.raises(ProcessDied):
            await bench.bind(FIRST)

    bench.run(scenario)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("raised", "becomes"),
    [
        (
            OutOfMemoryError("1 worker(s) were killed due to the node running low on memory."),
            ProcessDied("1 worker(s) were killed due to the node running low on memory."),
        ),
        (
            RaySystemError("what no caller expects"),
            NotAnswering("RaySystemError: System error: what no caller expects"),
        ),
    ],
    ids=["Ray ended it for its memory", "any other"],
)
def test_whatever_ray_raises_is_a_death_or_a_suspicion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None, raised: Exception, becomes: Exception
) -> None:
    """The first is what Ray 2.56 raises, in its words, for a call of an actor that its memory monitor ended."""

    async def answer(reference: object) -> None:
        raise raised

    job_id = f"contract-{os.urandom(4).hex()}"
    bench = Bench(RayCluster(job_id, device_type="CPU"), None, tmp_path, job_id)

    async def scenario() -> None:
        await bench.spawn()
        monkeypatch.setattr("gyre.master.ray_cluster._as_future", answer)
        with pytest.raises(type(becomes)) as error:
            await bench.cluster.call(FIRST, GENEROUS_S, VertexHost.hello, 1)
        monkeypatch.undo()
        assert str(becomes) in str(error.value)
        assert getattr(error.value, "out_of_memory", False) == isinstance(becomes, ProcessDied)

    bench.run(scenario)


@pytest.mark.ray
def test_a_machine_is_gone_for_all_once_a_call_was_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    """Ray's list has it for a while still, and a process that is started there comes up nowhere."""
    job_id = f"contract-{os.urandom(4).hex()}"
    bench = Bench(RayCluster(job_id, device_type="CPU"), None, tmp_path, job_id)

    async def scenario() -> None:
        spawned = await bench.spawn()

        async def dies(reference: object) -> None:
            said = f"The actor died because its node has died. Node Id: {spawned.node}, Ip: 10.0.0.1"
            raise RayActorError(error_msg=said)

        assert [node.node_id for node in await bench.cluster.nodes()] == [spawned.node]
        monkeypatch.setattr("gyre.master.ray_cluster._as_future", dies)
        with pytest.raises(ProcessDied) as error:
            await bench.cluster.call(FIRST, GENEROUS_S, VertexHost.hello, 1)
        monkeypatch.undo()
        assert error.value.node_lost
        assert await bench.cluster.nodes() == await bench.cluster.whole_nodes() == []

    bench.run(scenario)


@pytest.mark.ray
def test_a_process_whose_machine_dies_before_it_is_up_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    job_id = f"contract-{os.urandom(4).hex()}"
    bench = Bench(RayCluster(job_id, device_type="CPU"), None, tmp_path, job_id)

    async def nothing(reference: object) -> None:
        monkeypatch.setattr("gyre.master.ray_cluster.living_nodes", list)
        await asyncio.sleep(10 * GENEROUS_S)

    async def scenario() -> None:
        monkeypatch.setattr("gyre.master.ray_cluster._as_future", nothing)
        async with asyncio.timeout(GENEROUS_S):
            with pytest.raises(ProcessDied, match=r"its machine .* has died") as error:
                await bench.cluster.spawn(FIRST, sub_graph=PLACE, bundle=0, epoch=1, timeout_s=5 * GENEROUS_S)
        monkeypatch.undo()
        assert error.value.node_lost

    bench.run(scenario)


def test_a_machine_tells_how_many_its_kernel_has_killed_for_want_of_memory(bench: Bench) -> None:
    async def scenario() -> None:
        spawned = await bench.spawn()
        await bench.bind(FIRST)
        report = await bench.cluster.call(FIRST, GENEROUS_S, VertexHost.watch, 1, 0, 0.01)
        first, last = spawned.memory_kills, report.memory_kills
        assert first is not None
        assert first.counter == last.counter
        kills = await bench.cluster.memory_kills(first.counter, node=spawned.node)
        assert kills is not None
        assert 0 <= first.kills <= last.kills <= kills
        assert await bench.cluster.memory_kills(first.counter, node="e" * 56) is None

    bench.run(scenario)


def test_a_process_that_is_stopped_does_not_answer_and_can_be_looked_at_and_ended(bench: Bench) -> None:
    async def scenario() -> None:
        spawned = await bench.spawn()
        await bench.bind(FIRST)
        bench.stop(spawned)
        with pytest.raises(NotAnswering):
            await bench.cluster.call(FIRST, 0.5, VertexHost.hello, 1)
        seen = await bench.cluster.stacks(pid=spawned.pid, node=spawned.node, timeout_s=3.0)
        assert "T (stopped)" in seen
        activity = await bench.cluster.activity(pid=spawned.pid, node=spawned.node, over_s=0.1)
        assert activity is not None
        assert activity.life is ProcessLife.STOPPED
        await bench.cluster.kill(FIRST, pid=spawned.pid, node=spawned.node)
        with pytest.raises(ProcessDied):
            await bench.cluster.call(FIRST, GENEROUS_S, VertexHost.hello, 1)

    bench.run(scenario)


def test_an_older_master_is_refused(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.spawn(epoch=3)
        older = (
            bench.cluster.call(FIRST, GENEROUS_S, VertexHost.hello, 2),
            bench.cluster.call(FIRST, GENEROUS_S, VertexHost.stacks, 2),
            bench.cluster.call(FIRST, GENEROUS_S, VertexHost.watch, 2, 0, 0.1),
            bench.cluster.call(FIRST, GENEROUS_S, VertexHost.shutdown, 2, 0.0),
        )
        for call in older:
            with pytest.raises(Fenced, match="obeys epoch 3; a call came with epoch 2"):
                await call

    bench.run(scenario)


def test_ending_a_process_is_idempotent_and_makes_room_for_the_next(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.cluster.kill(FIRST, pid=0, node="")
        spawned = await bench.spawn()
        await bench.cluster.kill(FIRST, pid=spawned.pid, node=spawned.node)
        await bench.cluster.kill(FIRST, pid=spawned.pid, node=spawned.node)
        after = await bench.spawn(SECOND)
        assert after.pid != spawned.pid
        with contextlib.suppress(ProcessDied):
            pytest.fail(str(await bench.cluster.call(FIRST, GENEROUS_S, VertexHost.hello, 1)))

    bench.run(scenario)


def test_the_address_of_a_rendezvous_stays_the_same(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.spawn()
        host, port = await bench.cluster.call(FIRST, GENEROUS_S, VertexHost.address, 1)
        assert host
        assert 0 < port < 65536
        assert tuple(await bench.cluster.call(FIRST, GENEROUS_S, VertexHost.address, 2)) == (host, port)

    bench.run(scenario)


def test_a_place_is_taken_once_and_given_back_as_often_as_asked(bench: Bench) -> None:
    async def scenario() -> None:
        await asyncio.gather(*(bench.cluster.place(PLACE, GENEROUS_S) for _ in range(3)))
        await bench.cluster.release(PLACE.id)
        await bench.cluster.release(PLACE.id)
        await bench.cluster.place(PLACE, GENEROUS_S)
        assert await bench.cluster.nodes()

    bench.run(scenario)


def test_a_demand_is_seen_until_there_is_a_place_or_nobody_wants_it(bench: Bench) -> None:
    async def scenario() -> None:
        everything = needing("reward-0", bench.cpus())
        give_back = await bench.other_takes(1.0)
        await bench.cluster.demand(everything)
        await bench.cluster.demand(everything)
        assert bench.demands() == ["reward-0"]
        assert await bench.cluster.reserved() == {"reward-0"}
        await bench.cluster.release("reward-0")
        assert bench.demands() == []
        assert await bench.cluster.reserved() == set()
        await bench.cluster.demand(everything)
        await give_back()
        await bench.cluster.place(everything, GENEROUS_S)
        assert bench.demands() == []
        assert await bench.cluster.reserved() == {"reward-0"}
        await bench.cluster.release("reward-0")

    bench.run(scenario)


def test_what_others_hold_is_not_the_jobs_and_what_it_holds_itself_is(bench: Bench) -> None:
    async def cpus() -> float:
        [node] = await bench.cluster.nodes()
        return node.cpu

    async def scenario() -> None:
        all_of_them = bench.cpus()
        await until(lambda: is_so(all_of_them))  # what the test before took is back
        own = needing("reward-0", all_of_them - 1.0)
        await bench.cluster.place(own, GENEROUS_S)
        await asyncio.sleep(1.0)
        assert await cpus() == all_of_them
        await bench.cluster.release(own.id)
        give_back = await bench.other_takes(1.0)
        await until(lambda: is_so(all_of_them - 1.0))
        [whole] = await bench.cluster.whole_nodes()
        assert whole.cpu == all_of_them
        with pytest.raises(CannotPlace) as lack:
            await bench.cluster.place(needing("reward-0", all_of_them), 0.5)
        assert lack.value.required
        assert lack.value.available
        await give_back()
        await until(lambda: is_so(all_of_them))
        await bench.cluster.place(needing("reward-0", all_of_them), GENEROUS_S)
        await bench.cluster.release("reward-0")

    async def is_so(expected: float) -> bool:
        return await cpus() == expected

    bench.run(scenario)


def test_a_machine_that_is_fit_is_found_so_and_one_that_is_gone_does_not_answer(
    bench: Bench, tmp_path: Path
) -> None:
    async def scenario() -> None:
        [node] = await bench.cluster.nodes()
        assert await bench.cluster.examine(node.node_id, needs_of(tmp_path, gpus=0)) == []
        assert await bench.cluster.examine("e" * 56, needs_of(tmp_path, gpus=0)) is None

    bench.run(scenario)


@pytest.mark.parametrize("bench", ["ray"], indirect=True)
def test_what_is_wrong_with_a_machine_comes_from_there(bench: Bench, tmp_path: Path) -> None:
    async def scenario() -> None:
        [node] = await bench.cluster.nodes()
        found = await bench.cluster.examine(node.node_id, needs_of(tmp_path / "elsewhere", gpus=0))
        assert found is not None
        assert "elsewhere is not there" in found[0]

    bench.run(scenario)
