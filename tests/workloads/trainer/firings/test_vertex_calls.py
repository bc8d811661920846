"""Calls of operators to one vertex: what is sent is as little as it needs, and what comes back is whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from gyre.errors import VertexDied
from gyre.graph.elements import Operator
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.base import BaseWorkload
from gyre.workloads.gang.gang import outcome_of
from gyre.workloads.trainer.firings.vertex_calls import VertexCalls
from gyre.workloads.trainer.learning.publishing import PublishedVersion
from gyre.workloads.vertex.returns import Expected
from tests.waits import GENEROUS_S
from tests.workloads import plain_workloads

SCORE, SERVED = Operator("echo", "score"), Operator("echo", "served")
ANYTHING = Expected("score")


class Judge(BaseWorkload):
    loads = 0

    def score(self, groups: list[Group], *, step: int) -> list[Group]:
        for group in groups:
            for sample in group.samples:
                sample.reward = float(len(sample.token_ids) + step)
                sample.extras["known"] = not np.isnan(sample.logprobs).any()
        return groups

    def served(self, groups: list[Group], *, index: int) -> list[Group]:
        for group in groups:
            group.meta = {"loads": self.loads, "index": index}
        return groups

    def load_weights(self, manifest: dict[str, Any], buffer: bytes) -> int:
        self.loads += 1
        return int(manifest["version"])


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(
        plain_workloads, "binding", partial(plain_workloads.binding, "Judge", module=__name__)
    )
    made = plain_workloads.Cluster(2)
    yield made
    made.close()


@pytest.fixture
def calls(cluster):
    return VertexCalls(cluster.membership, cluster.transport)


def a_group(tokens: int) -> Group:
    ids, run = np.arange(tokens, dtype=np.int32), (VersionRun(3, 0, tokens),)
    sample = Sample(ids, np.zeros(tokens, np.float32), run, extras={"ref_logprobs": -ids.astype(np.float32)})
    return Group(7, np.array([1, 2], np.int32), {"answer": "4"}, [sample])


@pytest.mark.parametrize(("slim", "added_only"), [(False, False), (False, True), (True, True)])
def test_groups_come_back_whole_however_they_travelled(calls, slim: bool, added_only: bool) -> None:
    mine = a_group(5)
    sent = calls.fire(
        ("echo-0", 1), SCORE, [mine], step=2, index=0, expected=ANYTHING, slim=slim, added_only=added_only
    )
    status, (group,) = sent.result(GENEROUS_S)
    assert status == "ok"
    assert (group.id, group.meta, group.prompt_ids.tolist()) == (7, {"answer": "4"}, [1, 2])
    (sample,) = group.samples
    assert (sample.reward, sample.extras["known"]) == (7.0, not slim)
    assert sample.versions == (VersionRun(3, 0, 5),)
    assert sample.extras["ref_logprobs"].tolist() == [0, -1, -2, -3, -4]
    assert mine.samples[0].reward is None, "what was sent is as it was"


def test_a_vertex_that_died_is_lost_in_whatever_form_it_would_have_answered(calls, cluster) -> None:
    cluster.vertices["echo-0"].kill()
    sent = calls.fire(("echo-0", 1), SCORE, [a_group(1)], step=2, index=0, expected=ANYTHING, added_only=True)
    with pytest.raises(VertexDied):
        sent.result(GENEROUS_S)
    assert isinstance(outcome_of(sent), VertexDied)


def test_a_policy_is_sent_once_and_again_after_a_failure(calls, cluster) -> None:
    bundle = cluster.transport.share(({"version": 4}, b""))
    policy = PublishedVersion(version=4, checksum="c", bundle=bundle)

    def loads() -> int:
        fire = partial(calls.fire, ("echo-1", 1), SERVED, [a_group(1)], step=2, index=6)
        _, (group,) = fire(expected=Expected("served"), policy=policy).result(GENEROUS_S)
        assert group.meta["index"] == 6
        return int(group.meta["loads"])

    assert [loads(), loads()] == [1, 1]
    calls.failed(("echo-1", 1))
    assert loads() == 2
