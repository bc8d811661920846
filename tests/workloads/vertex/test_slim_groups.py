"""What travels to a reward and back: enough to score by, and what it added, joined to the samples where they lie."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.trainer.firings.result_checks import problem_with_groups
from gyre.workloads.vertex.call_info import NOTHING_OFFERED, CallInfo
from gyre.workloads.vertex.host import VertexHost
from gyre.workloads.vertex.slim_groups import Additions, SlimGroups, additions, extras_of, joined
from tests.rollout_rows import sessions


def group(group_id: int, *lengths: int) -> Group:
    samples = [
        Sample(np.arange(n, dtype=np.int32), np.full(n, -1.0, np.float32), (VersionRun(3, 0, n),), "length")
        for n in lengths
    ]
    return Group(group_id, np.array([9, group_id], np.int32), {"answer": group_id}, samples)


def test_slim_groups_have_tokens_prompts_and_ends_and_nothing_of_the_policy() -> None:
    given = [group(4, 5, 0, 2), group(5), group(6, 1)]
    packed = pickle.dumps(SlimGroups.of(given))
    for slim, whole in zip(pickle.loads(packed).groups(), given, strict=True):
        assert (slim.id, slim.meta, slim.prompt_ids.tolist()) == (
            whole.id,
            whole.meta,
            whole.prompt_ids.tolist(),
        )
        for one, other in zip(slim.samples, whole.samples, strict=True):
            assert (one.token_ids.tolist(), one.finish_reason) == (other.token_ids.tolist(), "length")
            assert np.isnan(one.logprobs).all()
            assert {run.version for run in one.versions} <= {-1}
    long = [group(0, *[1000] * 8)]
    assert len(pickle.dumps(SlimGroups.of(long))) < 0.55 * len(pickle.dumps(long))


def test_what_was_added_is_joined_to_the_samples_and_nothing_else_comes_back() -> None:
    given = [group(4, 5, 2)]
    for sample in given[0].samples:
        sample.extras["ref_logprobs"] = np.zeros(1000, np.float32)
    before = extras_of(given)
    for number, sample in enumerate(given[0].samples):
        sample.reward = float(number)
        sample.extras["why"] = "because"
    told = additions(before, given)
    assert told == Additions([(4, [(0.0, {"why": "because"}), (1.0, {"why": "because"})])])
    (whole,) = joined([group(4, 5, 2)], told)
    assert [sample.reward for sample in whole.samples] == [0.0, 1.0]
    assert [len(sample.token_ids) for sample in whole.samples] == [5, 2]


def test_what_an_operator_should_not_return_is_refused_as_before() -> None:
    given = [group(4, 5, 2), group(5, 1, 1)]
    known = {one.id: one for one in given}

    def problem(returned: Any) -> str | None:
        before = extras_of(given)
        return problem_with_groups("reward.score", joined(given, additions(before, returned)), [4, 5], known)

    assert "expected the list of groups" in str(problem({"reward": 1.0}))
    assert "it returned groups [5, 4]" in str(problem(given[::-1]))
    given[0].samples[0].reward = given[0].samples[1].reward = 1.0
    assert "it returned 1 samples of group 5" in str(problem([given[0], group(5, 1)]))
    assert "set sample.reward (2 of 2" in str(problem([group(4, 5, 2), group(5, 1, 1)]))


def test_the_host_gives_groups_and_returns_additions() -> None:
    class Reward:
        def score(self, groups: list[Group]) -> list[Group]:
            for one in groups:
                for sample in one.samples:
                    sample.reward = float(len(sample.token_ids))
            return groups

    host = VertexHost("reward-0", 1, 1)
    host._workload = Reward()
    slim = SlimGroups.of([group(4, 5, 2)])
    assert host.call(1, "score", CallInfo(added_only=True), slim) == (
        "ok",
        Additions([(4, [(5.0, {}), (2.0, {})])]),
    )
    status, whole = host.call(1, "score", NOTHING_OFFERED, [group(4, 5, 2)])
    assert (status, whole[0].samples[0].reward) == ("ok", 5.0)


def test_a_row_is_still_one_where_it_is_scored() -> None:
    (given,) = sessions(0, 1)
    given.samples.append(group(4, 2).samples[0])
    (slim,) = pickle.loads(pickle.dumps(SlimGroups.of([given]))).groups()
    for one, other in zip(slim.samples, given.samples, strict=True):
        assert one.rollout == other.rollout
        assert (one.mask is None) == (other.mask is None)
        assert other.mask is None or np.array_equal(one.mask, other.mask)
