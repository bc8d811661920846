"""Calls that are spread over a gang: every rank has its share, and what comes back is whole or nobody's."""

from __future__ import annotations

import queue
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from gyre.errors import VertexDied
from gyre.graph.elements import Dispatch, Operator
from gyre.graph.flow import Firing
from gyre.rollouts.samples import Group
from gyre.workloads.base import BaseWorkload
from gyre.workloads.gang import spread
from gyre.workloads.gang.gang import GangLost
from gyre.workloads.gang.learner_gang import LearnerGang
from gyre.workloads.gang.spread import SpreadCalls
from tests.workloads import plain_workloads

HEARD_WITHIN_S = 30


class Valuer(BaseWorkload):
    def values(self, groups: list[Group], *, step: int) -> list[Group]:
        for group in groups:
            group.meta = {"by": self.rank, "step": step}
        return groups

    def none(self, groups: list[Group]) -> None:
        return None


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(
        plain_workloads, "binding", partial(plain_workloads.binding, "Valuer", module=__name__)
    )
    made = plain_workloads.Cluster(3)
    yield made
    made.close()


@pytest.fixture
def gang(cluster):
    members = tuple(cluster.membership.members("echo"))
    return LearnerGang(1, "echo", members, cluster.membership, cluster.transport)


class Heard:
    """What came, taken in as the trainer does."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.calls = SpreadCalls(self)

    def rank_answered(self, *what: Any) -> None:
        self.news.put(what)

    def take(self) -> Any:
        call, rank, outcome = self.news.get(timeout=HEARD_WITHIN_S)
        call.outcomes[rank] = outcome
        return call


def group(number: int) -> Group:
    return Group(number, np.array([1], np.int32))


def send(heard: Heard, gang: LearnerGang, method: str = "values") -> None:
    operator, firings = Operator("critic", method, Dispatch.SPREAD), [Firing("critic.values", 2)]
    shares = [[group(7), group(5)], [], [group(1)]]
    heard.calls.send(gang, operator, firings, [5, 1, 7], shares, step=4)


def test_groups_come_back_in_the_order_in_which_they_were_given(gang) -> None:
    heard = Heard()
    send(heard, gang)
    found = None
    for _ in range(3):
        assert found is None, "not before every rank has answered"
        found = heard.calls.results_of(heard.take())
    assert [(one.id, one.meta) for one in found] == [
        (5, {"by": 0, "step": 4}),
        (1, {"by": 2, "step": 4}),
        (7, {"by": 0, "step": 4}),
    ]


def test_two_calls_are_on_their_way_at_a_time(gang) -> None:
    heard = Heard()
    for left in (True, False):
        send(heard, gang)
        assert heard.calls.has_room("echo") == left
    assert heard.calls.has_room("another")
    for _ in range(6):
        heard.calls.results_of(heard.take())
    assert heard.calls.has_room("echo")


def test_what_is_no_list_of_groups_is_handed_on_as_it_is(gang) -> None:
    heard = Heard()
    send(heard, gang, "none")
    for _ in range(3):
        found = heard.calls.results_of(heard.take())
    assert found == [None] * 3


def test_a_dead_ranks_call_is_given_up_and_its_firings_are_free(gang, cluster) -> None:
    heard = Heard()
    cluster.vertices["echo-1"].kill()
    send(heard, gang)
    calls = [heard.take() for _ in range(3)]
    with pytest.raises(GangLost):
        heard.calls.results_of(calls[0])
    assert any(isinstance(got, VertexDied) for got in calls[0].outcomes)
    assert heard.calls.give_up() == [Firing("critic.values", 2)]
    assert not heard.calls.is_current(calls[0])
    assert heard.calls.give_up() == []


def test_a_rank_that_fails_is_told_though_another_does_not_come_out(gang, cluster, monkeypatch) -> None:
    monkeypatch.setattr(spread, "PEERS_S", 0.0)
    heard = Heard()
    cluster.vertices["echo-1"].hang()
    heard.calls.check_failed(time.monotonic())
    send(heard, gang, "no_such_method")
    for _ in range(2):
        assert heard.calls.results_of(heard.take()) is None
    with pytest.raises(GangLost) as caught:
        heard.calls.check_failed(time.monotonic())
    member, method, failure = caught.value.blamed
    assert (member, method) == (("echo-0", 1), "no_such_method")
    assert "no_such_method" in failure.error
