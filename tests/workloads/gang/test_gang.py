"""Calls to a gang: a death, its symptoms on the survivors, and who is to blame where nobody died."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from gyre.errors import Fenced, VertexDied
from gyre.testing.in_process import InProcessCollective
from gyre.workloads.gang import gang as gang_module
from gyre.workloads.gang.gang import Gang, GangLost, outcome_of
from gyre.workloads.vertex.messages import Failure
from tests.waits import GENEROUS_S
from tests.workloads.plain_workloads import Cluster

SYMPTOM = Failure("RuntimeError: Connection closed by peer", "", user_code=False, collective=True)
GYRES = Failure("RuntimeError: no memory", "", user_code=False)
USERS = Failure("KeyError: 'loss'", "at line 3", user_code=True)
FENCED = Failure("works for term 2", "", user_code=False, fenced=True)
LOST = VertexDied("gone")


@pytest.fixture
def cluster():
    made = Cluster(3)
    yield made
    made.close()


@pytest.fixture
def gang(cluster, monkeypatch):
    monkeypatch.setattr(gang_module, "SETTLE_S", 0.1)
    return Gang(1, "echo", tuple(cluster.membership.members("echo")), cluster.membership, cluster.transport)


def told(failure):
    return ("error", failure)


def test_a_call_gives_every_ranks_result_in_rank_order(gang):
    assert gang.size == 3
    assert gang.gather("who", gang.submit("who", [()] * 3), timeout_s=GENEROUS_S) == [(0, 1), (1, 1), (2, 1)]
    futures = gang.submit("add", [(1,), (2,), (3,)], {"two": 10})
    assert gang.gather("add", futures, timeout_s=GENEROUS_S) == [11, 12, 13]


def test_a_death_is_nobodys_fault_and_the_dead_are_doubted(gang, cluster):
    cluster.vertices["echo-1"].kill()
    with pytest.raises(GangLost) as caught:
        gang.gather("who", gang.submit("who", [()] * 3), timeout_s=GENEROUS_S)
    assert caught.value.blamed is None
    assert cluster.membership.members("echo") == [("echo-0", 1), ("echo-2", 1)]
    assert not gang.is_current()


def test_a_death_explains_the_failures_of_the_others(gang):
    with pytest.raises(GangLost) as caught:
        gang.settle("apply", [told(SYMPTOM), LOST, told(USERS)])
    assert caught.value.blamed is None


def test_a_death_heard_of_a_moment_after_its_symptoms_explains_them(gang, cluster, monkeypatch):
    monkeypatch.setattr(gang_module, "SETTLE_S", GENEROUS_S)

    def announce():
        cluster.vertices["echo-2"].kill()
        cluster.announce()

    threading.Timer(0.02, announce).start()
    with pytest.raises(GangLost) as caught:
        gang.settle("apply", [told(SYMPTOM), told(SYMPTOM), told(SYMPTOM)])
    assert caught.value.blamed is None


@pytest.mark.parametrize(
    ("outcomes", "culprit", "failure"),
    [
        ([told(SYMPTOM), told(USERS), told(SYMPTOM)], 1, USERS),
        ([("ok", 1), told(USERS), told(GYRES)], 1, USERS),
        ([told(SYMPTOM), told(SYMPTOM), told(GYRES)], 2, GYRES),
        ([("ok", 1), ("ok", 1), told(SYMPTOM)], 2, SYMPTOM),
        ([told(SYMPTOM), told(SYMPTOM), told(SYMPTOM)], 0, SYMPTOM),
    ],
    ids=["user", "first", "gyre", "lone symptom", "all symptoms"],
)
def test_where_nobody_died_the_rank_with_an_error_of_its_own_is_blamed(gang, outcomes, culprit, failure):
    with pytest.raises(GangLost) as caught:
        gang.settle("apply", outcomes)
    assert caught.value.blamed == ((f"echo-{culprit}", 1), "apply", failure)


def test_the_users_error_is_blamed_at_once_without_waiting_for_a_death(gang, monkeypatch):
    monkeypatch.setattr(gang_module.time, "sleep", lambda _: pytest.fail("it waited"))
    with pytest.raises(GangLost):
        gang.settle("apply", [("ok", 1), told(USERS), told(SYMPTOM)])


@pytest.mark.parametrize("outcomes", [[told(FENCED)], [told(SYMPTOM), told(FENCED), ("ok", 1)]])
def test_a_rank_that_obeys_a_newer_trainer_fences_the_caller(gang, outcomes):
    with pytest.raises(Fenced, match="term 2"):
        gang.settle("apply", outcomes)


def test_a_failure_of_rank_0_alone_is_blamed_though_the_others_live(gang, monkeypatch):
    """Not taken for a death because the call went to fewer ranks than there are."""
    monkeypatch.setattr(gang_module, "SETTLE_S", 0.01)
    with pytest.raises(GangLost) as caught:
        gang.settle("export_weights", [told(GYRES)])
    assert caught.value.blamed == (("echo-0", 1), "export_weights", GYRES)


def test_a_rank_that_does_not_return_is_named(gang, cluster):
    cluster.vertices["echo-1"].hang()
    cluster.vertices["echo-2"].hang()
    with pytest.raises(GangLost) as caught:
        gang.gather("who", gang.submit("who", [()] * 3), timeout_s=1.0)
    member, operator, failure = caught.value.blamed
    assert (member, operator) == (("echo-1", 1), "who")
    assert failure.error == "who did not return within 1 s"


def test_whoever_waits_for_a_gang_is_known_to_wait(gang, cluster):
    inside = []

    class Owner:
        @contextmanager
        def waiting(self):
            inside.append("in")
            yield
            inside.append("out")

    waiting = Gang(1, "echo", gang.members, cluster.membership, cluster.transport, Owner())
    waiting.gather("who", waiting.submit("who", [()] * 3), timeout_s=GENEROUS_S)
    waiting.gather("who", waiting.submit("who", [()] * 3)[:1], timeout_s=GENEROUS_S)
    assert inside == ["in", "out"] * 2


def test_a_gang_with_another_incarnation_is_not_current(gang, cluster):
    assert gang.is_current()
    cluster.start([1])
    assert not gang.is_current()


def test_an_outcome_is_a_result_or_a_loss_and_anything_else_is_raised():
    done, dead, odd = Future(), Future(), Future()
    done.set_result(("ok", 1))
    dead.set_exception(LOST)
    odd.set_exception(MemoryError())
    assert outcome_of(done) == ("ok", 1)
    assert outcome_of(dead) is LOST
    with pytest.raises(MemoryError):
        outcome_of(odd)


# -- the collective that stands in for Gloo ---------------------------------------------------------


def test_a_collective_gives_everybody_everybodys_value_round_after_round():
    peers = InProcessCollective(2)
    found = []

    def rank1():
        found.extend(peers.exchange(1, number) for number in range(50))

    thread = threading.Thread(target=rank1)
    thread.start()
    mine = [peers.exchange(0, -number) for number in range(50)]
    thread.join(GENEROUS_S)
    assert mine == found == [[-number, number] for number in range(50)]


def test_a_collective_breaks_off_for_those_inside_and_those_who_come_later():
    peers = InProcessCollective(2)
    threading.Timer(0.02, peers.break_off).start()
    for _ in range(2):
        with pytest.raises(ConnectionError, match="Connection closed by peer"):
            peers.exchange(0, 1)


def test_a_collective_whose_peer_does_not_come_breaks_off_at_its_deadline():
    peers = InProcessCollective(2)
    with pytest.raises(ConnectionError):
        peers.exchange(0, 1, timeout_s=0.02)
