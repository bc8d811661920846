"""The gangs that are trained: their methods reach the ranks as the protocols and the graph word them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.rollouts.samples import Group
from gyre.workloads.base import BaseWorkload
from gyre.workloads.gang.gang import GangLost
from gyre.workloads.gang.learner_gang import ActorGang
from tests.waits import GENEROUS_S
from tests.workloads import plain_workloads


class Words(BaseWorkload):
    """A learner that answers with what it was given; its graph calls `accumulate` and `apply` otherwise."""

    def begin(self, step: int, halved: int = 0) -> dict[str, Any]:
        return {"step": step, "halved": halved}

    def learn(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        return {"ids": [group.id for group in groups], "step": step, "index": index, "rank": self.rank}

    def improve(self, *, step: int, indices: int, group_ids: list[int]) -> Any:
        return {"step": step, "indices": indices, "ids": list(group_ids)} if indices else None

    def state(self) -> dict[str, Any]:
        return {"step": 0, "digest": "", "loaded": getattr(self, "loaded", None)}

    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        self.loaded = manifest["version"]
        return 0

    def checkpoint(self, path: Path, *, background: bool = False) -> bool:
        return background

    def export_weights(self, *, version: int) -> tuple[dict[str, Any], bytes]:
        return {"version": version, "checksum": "c", "size_bytes": self.rank}, b""


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(
        plain_workloads, "binding", partial(plain_workloads.binding, "Words", module=__name__)
    )
    made = plain_workloads.Cluster(2)
    yield made
    made.close()


@pytest.fixture
def gang(cluster):
    members = tuple(cluster.membership.members("echo"))
    return ActorGang(
        1,
        "echo",
        members,
        cluster.membership,
        cluster.transport,
        accumulate_name="learn",
        apply_name="improve",
    )


def group(number: int) -> Group:
    return Group(number, np.array([1], np.int32))


def test_each_rank_gets_its_share_by_the_name_that_the_graph_gives(gang) -> None:
    sent = gang.accumulate([[group(5), group(7)], []], step=3, index=1)
    assert sent.results(timeout_s=GENEROUS_S) == [
        {"ids": [5, 7], "step": 3, "index": 1, "rank": 0},
        {"ids": [], "step": 3, "index": 1, "rank": 1},
    ]
    applied = gang.apply(step=3, indices=2, group_ids=[5, 7]).results(timeout_s=GENEROUS_S)
    assert applied == [{"step": 3, "indices": 2, "ids": [5, 7]}] * 2


def test_ranks_check_what_they_return_by_the_protocol_whatever_the_graph_calls_it(gang) -> None:
    with pytest.raises(GangLost) as lost:
        gang.apply(step=3, indices=0, group_ids=[]).results(timeout_s=GENEROUS_S)
    assert "returned None, expected a dict" in lost.value.blamed[2].error


def test_what_is_not_given_is_not_offered(gang) -> None:
    """A class that does not know the parameter is called without it, and one that does by its own default."""
    assert gang.begin(4).first(timeout_s=GENEROUS_S) == {"step": 4, "halved": 0}
    assert gang.begin(4, halved=2).first(timeout_s=GENEROUS_S) == {"step": 4, "halved": 2}
    assert gang.checkpoint(Path("/there"), background=True).results(timeout_s=GENEROUS_S) == [True, True]


def test_the_first_rank_answers_alone_for_all(gang) -> None:
    sent = gang.export_weights(version=2)
    assert len(sent.futures) == 1
    assert sent.first(timeout_s=GENEROUS_S) == ({"version": 2, "checksum": "c", "size_bytes": 0}, b"")


def test_a_policy_is_loaded_before_the_ranks_say_their_state(gang, cluster) -> None:
    assert gang.state().first(timeout_s=GENEROUS_S)["loaded"] is None
    bundle = cluster.transport.share(({"version": 6}, b""))
    states = gang.take_policy(bundle).results(timeout_s=GENEROUS_S)
    assert [state["loaded"] for state in states] == [6, 6]
