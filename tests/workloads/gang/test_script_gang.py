"""A gang under a script's `fit()`: in step before it is used, called whole, and again as a whole."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any

import pytest

from gyre.errors import Unreachable, UserCodeError
from gyre.testing.in_process import InProcessTransport
from gyre.workloads.gang import alignment as alignment_module
from gyre.workloads.gang import gang as gang_module
from gyre.workloads.gang.script import ScriptGang
from gyre.workloads.handles import RoleHandle
from gyre.workloads.vertex.call_info import CallInfo
from tests.workloads.plain_workloads import Cluster
from tests.workloads.scripts import script_spec

DEADLINE_S = 60


class Gang:
    """A gang of three, a trainer's handle on it, and what that trainer reported. The master that it tells replaces the
    whole gang."""

    def __init__(self) -> None:
        self.cluster = Cluster(3)
        self.reports: list[dict[str, Any]] = []

    def handle(self, term: int = 1, *, timeout_s: float = DEADLINE_S) -> RoleHandle:
        transport = InProcessTransport(self.cluster._find, term)
        gang = ScriptGang(
            "echo",
            self.cluster.membership,
            transport,
            numbers=itertools.count(1),
            owner=self,
        )
        return RoleHandle(
            "echo",
            self.cluster.membership,
            transport,
            timeout_s=timeout_s,
            owner=self.cluster,
            gang=gang,
        )

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def report(self, kind: str, **body: Any) -> None:
        self.reports.append({"kind": kind, **body})
        self.replace()

    def replace(self) -> None:
        for vertex in list(self.cluster.vertices.values()):
            vertex.kill()
        self.cluster.start(range(3))

    def half_send(self, *ranks: int) -> None:
        """As an earlier trainer did, which died between two ranks."""
        for rank in ranks:
            transport = self.cluster.transport
            transport.submit(f"echo-{rank}", 1, "hold", info=CallInfo(gang_call=(1, 1)))
            assert self.cluster.workload(rank).entered.wait(DEADLINE_S)


@pytest.fixture
def gang(monkeypatch):
    monkeypatch.setattr(alignment_module, "LOOK_S", 0.02)
    monkeypatch.setattr(gang_module, "PEERS_S", 0.1)
    monkeypatch.setattr(alignment_module, "PEERS_S", 0.1)
    made = Gang()
    yield made
    made.cluster.close()


def test_a_call_that_an_earlier_trainer_sent_to_some_ranks_is_found_before_the_first_one(gang):
    gang.half_send(0, 2)
    assert gang.handle(2).who() == [(0, 2), (1, 2), (2, 2)]
    (report,) = gang.reports
    assert (report["kind"], report["vertex"], report["vertex_incarnation"]) == ("OperatorFailed", "echo-0", 1)
    assert "echo-0 is inside hold, which echo-1 was never given" in report["error"]
    assert not report["user_code"]


def test_a_gang_in_step_is_used_as_it_is_and_asked_once(gang):
    first, second = gang.handle(1), gang.handle(2)
    assert first.add(1, two=2) == [3, 3, 3]
    assert second.who() == second.who() == [(0, 1), (1, 1), (2, 1)]
    assert second.double.scatter([1, 2, 3, 4]) == [2, 4, 6, 8]
    assert second.double.scatter([5]) == [10], "some ranks have nothing to do, and are not called"
    assert second[1].who() == (1, 1)
    assert second.who() == [(0, 1), (1, 1), (2, 1)]
    assert gang.reports == []


def test_where_a_rank_dies_all_of_the_next_gang_are_called(gang):
    called: list[int] = []
    for rank in range(3):
        note = lambda r=rank: called.append(r)  # noqa: E731
        gang.cluster.moments.add("echo.who", 1, note, when="after", vertex=f"echo-{rank}")
    handle = gang.handle()
    assert len(handle.who()) == 3
    gang.cluster.moments.add("echo.add", 1, gang.replace, when="before", vertex="echo-1")
    assert handle.add(2) == [2, 2, 2]
    assert [gang.cluster.workload(rank).calls for rank in range(3)] == [1, 1, 1]
    assert gang.reports == [], "the master knows of a death by itself"


def test_an_exception_on_one_rank_is_told_though_the_others_wait_and_they_are_replaced_for_the_next_call(
    gang,
):
    def fail() -> None:
        raise ValueError("no memory")

    handle = gang.handle()
    gang.cluster.moments.add("echo.hold", 1, fail, when="before", vertex="echo-1")
    with pytest.raises(UserCodeError, match=r"echo-1\.hold raised ValueError: no memory"):
        handle.hold()
    assert gang.reports == [], "the script may know what to do"
    assert handle.who() == [(0, 2), (1, 2), (2, 2)]
    assert len(gang.reports) == 1


def test_calls_at_the_same_time_reach_every_rank_in_the_same_order(gang):
    handle = gang.handle()
    order: dict[int, list[int]] = {rank: [] for rank in range(3)}
    handle.who()
    for rank in range(3):
        gang.cluster.workload(rank).add = lambda one, rank=rank: order[rank].append(one)
    calls = [handle.add.submit(number) for number in range(20)]
    for call in calls:
        call.result(DEADLINE_S)
    assert sorted(order[0]) == list(range(20))
    assert order[0] == order[1] == order[2]


def test_a_call_that_does_not_return_ends_at_its_deadline(gang):
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"hold did not return within run\.call_timeout_s"):
        gang.handle(timeout_s=0.2).hold()
    assert time.monotonic() - began >= 0.2


def test_a_scripts_successor_finds_what_the_first_one_half_sent(make_job, monkeypatch):
    """The real trainer's processes: its handles of a gang number what they send."""
    monkeypatch.setattr(alignment_module, "LOOK_S", 0.02)
    spec = script_spec("Sum")
    spec["roles"]["worker"] |= {"entrypoint": "tests.workloads.scripts:Meeting", "gang": True}
    job = make_job(spec)
    job.on("worker.work", 1, job.kill_trainer, when="sent", vertex="worker-0")
    with job:
        assert job.result(timeout_s=DEADLINE_S) == {"sum": 21, "role": "trainer"}
    (failed,) = job.reports_of("OperatorFailed")
    assert "worker-0 is inside work, which worker-1 was never given" in failed.body["error"]
    assert failed.body["incarnation"] == 2
