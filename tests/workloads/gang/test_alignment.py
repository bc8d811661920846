"""Ranks that are not in the same call are found out before their gang is used, whatever the call was."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.errors import Fenced
from gyre.testing.in_process import InProcessTransport
from gyre.workloads.base import operator
from gyre.workloads.gang import alignment as alignment_module
from gyre.workloads.gang import gang as gang_module
from gyre.workloads.gang.alignment import StrayCall, align, find_stray
from gyre.workloads.gang.gang import Gang, GangLost
from gyre.workloads.trainer.learning import gang_dispatch as dispatch_module
from gyre.workloads.vertex.call_info import CallInfo
from gyre.workloads.vertex.messages import CallPosition
from tests.waits import GENEROUS_S
from tests.workloads.plain_workloads import Cluster
from tests.workloads.toy_policy import ToyActor
from tests.workloads.trainer.test_loop import came_to

FIRST, SECOND = (1, 1, 1), (1, 1, 2)
IDLE = CallPosition()
IN_FIRST = CallPosition(FIRST, "begin", inside=True)
IN_SECOND = CallPosition(SECOND, "apply", inside=True)
DID_FIRST = CallPosition(FIRST, "begin")
DID_SECOND = CallPosition(SECOND, "apply")
IN_LATER_TERM = CallPosition((2, 1, 1), "begin", inside=True)
FAILED_SECOND = CallPosition(SECOND, "apply", failed=True)


@pytest.mark.parametrize(
    ("settled", "inside", "found"),
    [
        ({0: IDLE, 1: IDLE}, {}, None),
        ({0: DID_SECOND, 1: DID_SECOND}, {}, None),
        ({0: DID_SECOND, 1: FAILED_SECOND}, {}, None),
        ({}, {0: IN_SECOND, 1: IN_SECOND}, None),
        ({}, {0: IN_SECOND, 1: IN_FIRST}, None),  # rank 1 may still have the second before it
        ({1: DID_SECOND}, {0: IN_FIRST}, None),
        ({1: DID_SECOND}, {0: IN_SECOND}, None),
        ({1: DID_FIRST}, {0: IN_SECOND}, StrayCall(0, 1, IN_SECOND)),
        ({0: IDLE}, {1: IN_FIRST}, StrayCall(1, 0, IN_FIRST)),
        ({0: DID_SECOND, 2: DID_FIRST}, {1: IN_SECOND}, StrayCall(1, 2, IN_SECOND)),
        ({1: FAILED_SECOND}, {0: IN_SECOND}, StrayCall(0, 1, IN_SECOND, failed=True)),
        ({0: DID_FIRST, 1: DID_SECOND}, {}, StrayCall(1, 0, DID_SECOND)),
        ({0: DID_FIRST, 1: DID_SECOND}, {2: IN_FIRST}, None),  # until rank 2 is through
        ({1: DID_SECOND}, {0: IN_LATER_TERM}, StrayCall(0, 1, IN_LATER_TERM)),
    ],
)
def test_who_is_ahead_of_whom(settled, inside, found):
    assert find_stray(settled, inside) == found


# -- on ranks that are in calls ---------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(alignment_module, "LOOK_S", 0.02)
    made = Cluster(3)
    yield made
    made.close()


class Asking(InProcessTransport):
    """A later trainer's; does something when it has asked a rank so often for its position."""

    def __init__(self, cluster, *, after=0, do=lambda: None):
        super().__init__(cluster._find, 2)
        self.asked, self._after, self._do = 0, after, do

    def call_position(self, vertex, incarnation):
        self.asked += 1
        if self.asked == self._after:
            self._do()
        return super().call_position(vertex, incarnation)


def next_gang(cluster, transport=None):
    members = tuple(cluster.membership.members("echo"))
    return Gang(1, "echo", members, cluster.membership, transport or Asking(cluster))


def send(cluster, rank, number, method="hold", *args):
    """As an earlier trainer did: call `number` of its gang."""
    return cluster.transport.submit(f"echo-{rank}", 1, method, args, info=CallInfo(gang_call=(1, number)))


def enter(cluster, rank, number):
    send(cluster, rank, number)
    assert cluster.workload(rank).entered.wait(GENEROUS_S)


def open_gates(cluster):
    for rank in range(3):
        cluster.workload(rank).gate.set()


def test_ranks_that_do_nothing_are_aligned_without_a_question(cluster):
    for rank in range(3):
        send(cluster, rank, 1, "who").result(GENEROUS_S)
    asking = Asking(cluster)
    align(next_gang(cluster, asking), timeout_s=GENEROUS_S)
    gang = next_gang(cluster, asking)
    assert gang.gather("who", gang.submit("who", [()] * 3), timeout_s=GENEROUS_S) == [(0, 1), (1, 1), (2, 1)]


def test_a_rank_in_a_call_that_another_was_never_given_is_blamed(cluster):
    for rank in range(3):
        send(cluster, rank, 1, "who")
    enter(cluster, 0, 2)
    send(cluster, 1, 2)
    with pytest.raises(GangLost) as caught:
        align(next_gang(cluster), timeout_s=600)
    member, operator, failure = caught.value.blamed
    assert (member, operator) == (("echo-0", 1), "echo.hold")
    assert "echo-0 is inside hold, which echo-2 was never given" in failure.error
    assert not failure.user_code


def test_ranks_in_the_same_call_are_waited_for(cluster):
    for rank in range(3):
        enter(cluster, rank, 1)
    asking = Asking(cluster, after=30, do=lambda: open_gates(cluster))
    align(next_gang(cluster, asking), timeout_s=600)
    assert asking.asked >= 30


def test_a_rank_that_is_behind_with_what_it_was_given_is_waited_for(cluster):
    for rank in (0, 2):
        for number in (1, 2):
            send(cluster, rank, number, "who").result(GENEROUS_S)
    enter(cluster, 1, 1)
    send(cluster, 1, 2, "who")
    asking = Asking(cluster, after=10, do=lambda: open_gates(cluster))
    align(next_gang(cluster, asking), timeout_s=600)


def test_a_rank_in_a_call_that_another_has_left_by_an_exception_is_blamed(cluster, monkeypatch):
    monkeypatch.setattr(alignment_module, "PEERS_S", 0.1)
    send(cluster, 1, 1, "fail", "no memory")
    enter(cluster, 0, 1)
    enter(cluster, 2, 1)
    with pytest.raises(GangLost) as caught:
        align(next_gang(cluster), timeout_s=600)
    assert "echo-0 is inside hold, which echo-1 has left by an exception" in caught.value.blamed[2].error


def test_ranks_that_have_ended_other_calls_are_out_of_step_too(cluster):
    """What a rank did alone may have left its collectives one ahead of the others'."""
    send(cluster, 1, 1, "who").result(GENEROUS_S)
    with pytest.raises(GangLost) as caught:
        align(next_gang(cluster), timeout_s=600)
    member, _, failure = caught.value.blamed
    assert member == ("echo-1", 1)
    assert "echo-1 has done who, which echo-0 was never given" in failure.error


def test_a_call_of_the_earlier_trainer_that_comes_after_the_alignment_is_refused(cluster):
    align(next_gang(cluster), timeout_s=GENEROUS_S)
    status, failure = send(cluster, 0, 1, "who").result(GENEROUS_S)
    assert (status, failure.fenced) == ("error", True)


def test_the_question_fences_no_call_that_is_still_to_begin(cluster):
    """Else a rank that answered a moment earlier than its peer would leave it alone in the next call."""
    enter(cluster, 0, 1)
    waiting = send(cluster, 0, 2, "who")
    assert Asking(cluster).call_position("echo-0", 1).result(GENEROUS_S)[1].inside
    open_gates(cluster)
    assert waiting.result(GENEROUS_S) == ("ok", (0, 1))


def test_a_rank_that_dies_ends_the_alignment_though_another_waits(cluster):
    enter(cluster, 0, 1)
    asking = Asking(cluster, after=1, do=cluster.vertices["echo-1"].kill)
    cluster.vertices["echo-1"].hang()
    with pytest.raises(GangLost) as caught:
        align(next_gang(cluster, asking), timeout_s=600)
    assert caught.value.blamed is None
    assert ("echo-1", 1) not in cluster.membership.members("echo")


def test_a_rank_that_does_not_come_out_is_named_at_the_deadline(cluster):
    for rank in range(3):
        enter(cluster, rank, 1)
    with pytest.raises(GangLost) as caught:
        align(next_gang(cluster), timeout_s=0.1)
    member, operator, failure = caught.value.blamed
    assert (member, operator) == (("echo-0", 1), "echo.hold")
    assert failure.error == "hold, which an earlier trainer called, did not return within 0.1 s"


def test_a_trainer_that_was_replaced_is_fenced(cluster):
    assert cluster.vertices["echo-0"].host.call(3, "who")[0] == "ok"
    with pytest.raises(Fenced):
        align(next_gang(cluster), timeout_s=GENEROUS_S)


def test_one_rank_alone_is_asked_nothing():
    made = Cluster(1)
    try:
        made.vertices["echo-0"].hang()
        align(next_gang(made), timeout_s=0.0)
    finally:
        made.close()


# -- a trainer that dies between the submits --------------------------------------------------------


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("actor.warm_start", 1),
        ("actor.begin", 1),
        ("actor.accumulate", 1),
        ("actor.accumulate", 4),
        ("actor.apply", 1),
        ("actor.apply", 3),
        ("actor.apply", 5),
        ("actor.checkpoint", 2),
    ],
)
def test_a_trainer_that_dies_between_the_submits_of_a_gang_call_costs_the_gang_and_nothing_else(
    make_job, undisturbed, monkeypatch, call, nth
):
    monkeypatch.setattr(alignment_module, "LOOK_S", 0.02)
    job = make_job(run={"call_timeout_s": 600.0})
    job.on(call, nth, job.kill_trainer, when="sent", vertex="actor-0")
    with job:
        came_to(job, undisturbed)
    told = job.reports_of("OperatorFailed")
    assert told
    for one in told:  # said again where the gang is formed again before the master has replaced it
        assert one.body["vertex"] == "actor-0"
        assert one.body["user_code"] is False
        assert f"{call.removeprefix('actor.')}, which actor-1 was never given" in one.body["error"]
    assert {name: job.vertex(name).host.incarnation for name in ("trainer-0", "actor-0", "actor-1")} == {
        "trainer-0": 2,
        "actor-0": 2,
        "actor-1": 2,
    }


def test_a_trainer_that_dies_when_the_last_rank_has_its_call_costs_no_gang(make_job, undisturbed):
    job = make_job()
    job.on("actor.apply", 3, job.kill_trainer, when="sent", vertex="actor-1")
    with job:
        came_to(job, undisturbed)
    assert job.vertex("actor-0").host.incarnation == job.vertex("actor-1").host.incarnation == 1
    assert job.reports_of("OperatorFailed") == []


# -- a rank that raises while the others wait for it ------------------------------------------------


class FailingOnce(ToyActor):
    """Rank 1 raises in the call that the job's config names, once, before it joins the others in it."""

    def _fail(self, call: str) -> None:
        marker = self.context.directory / "failed"
        if self.rank == 1 and self.config["fails_in"] == call and not marker.exists():
            marker.touch()
            raise ValueError("no memory")

    @operator(kind="control")
    def warm_start(self) -> dict[str, Any]:
        self._fail("warm_start")
        return super().warm_start()

    @operator
    def apply(self, *, step: int, indices: int, group_ids: list[int]) -> dict[str, Any]:
        self._fail(f"apply of step {step}")
        return super().apply(step=step, indices=indices, group_ids=group_ids)


@pytest.mark.parametrize("call", ["warm_start", "apply of step 3"])
def test_an_exception_on_one_rank_is_told_at_once_though_the_others_wait_in_a_collective(
    make_job, undisturbed, monkeypatch, call
):
    """Then the gang is tried again, found out of step, and replaced: not after the collective's own deadline."""
    for module in (gang_module, dispatch_module, alignment_module):
        monkeypatch.setattr(module, "PEERS_S", 0.1)
    monkeypatch.setattr(alignment_module, "LOOK_S", 0.02)
    job = make_job(
        run={"call_timeout_s": 600.0},
        roles={"actor": {"entrypoint": f"{__name__}:FailingOnce", "total": 2}},
        config={"fails_in": call},
    )
    with job:
        came_to(job, undisturbed)
    # On a busy machine 0.1 s may find the ranks out of step once more.
    first, second, *later = (report.body for report in job.reports_of("OperatorFailed"))
    assert (first["vertex"], first["error"], first["user_code"]) == ("actor-1", "ValueError: no memory", True)
    assert (second["vertex"], second["user_code"]) == ("actor-0", False)
    assert not any(body["user_code"] for body in later)
    method = call.partition(" ")[0]
    assert f"actor-0 is inside {method}, which actor-1 has left by an exception" in second["error"]
