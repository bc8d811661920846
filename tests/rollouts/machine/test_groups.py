"""The open groups: against a fleet that does anything, and one case at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

from gyre.rollouts.plane.groups import MOST_RESETS
from gyre.rollouts.plane.quarantine import QUARANTINE_AFTER
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import Held, Request
from gyre.rollouts.protocol.progress import End, GenerationProgress
from gyre.rollouts.samples import Group, pack_groups
from tests.examples import examples
from tests.rollouts.machine.fleet import EVERYTHING, SEEN, Fleet, went_through
from tests.rollouts.machine.simulated_agents import Rows, SimAgent, picture
from tests.rollouts.machine.small_groups import asked, groups_with, join, report


class TestFleet(Fleet.TestCase):
    settings = settings(
        max_examples=examples(50),
        stateful_step_count=50,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a failure is told as it came: making it smaller takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )

    @classmethod
    def setUpClass(cls) -> None:
        SEEN.clear()

    @classmethod
    def tearDownClass(cls) -> None:
        went_through(SEEN, (*EVERYTHING, "dealt"))


def test_a_request_that_fails_is_tried_elsewhere_first() -> None:
    open_groups = groups_with("a", "b")
    (request,) = open_groups.open(asked(1))
    (state,) = request.samples
    tried = []
    for _ in range(QUARANTINE_AFTER):
        open_groups.assign()
        assert state.instance is not None
        tried.append(state.instance)
        report(open_groups, state.instance, {}, {state: "failed"})
    assert all(one != next_ for one, next_ in pairwise(tried))
    assert open_groups.account.samples_quarantined == 1


def test_work_is_given_for_its_policy_only() -> None:
    """What needs version 1 waits for it, what came before does not wait, and an old instance gets nothing then."""
    open_groups = groups_with("a")
    (later,) = open_groups.open(asked(1, min_version=1))
    (now,) = open_groups.open(msgspec.structs.replace(asked(1, min_version=0), purpose="other"))
    open_groups.assign()
    assert now.samples[0].instance == "a"
    assert later.samples[0].instance is None
    open_groups.promote(1)
    open_groups.admit("a")
    open_groups.assign()
    assert later.samples[0].instance is None
    open_groups.serve("a", 1)
    open_groups.assign()
    assert later.samples[0].instance == "a"


def test_a_pinned_request_that_comes_too_late_is_refused_and_an_open_one_is_not() -> None:
    open_groups = groups_with("a")
    open_groups.open(asked(1, pinned=True))
    open_groups.promote(3)
    assert open_groups.open(asked(1, pinned=True)) == []
    with pytest.raises(FrameError) as caught:
        open_groups.open(asked(2, pinned=True))
    assert caught.value.details["reason"] == "pinned_late"
    assert len(open_groups.requests) == 1


def test_a_sample_that_lost_its_end_is_finished_and_not_generated_again() -> None:
    open_groups = groups_with("a")
    (request,) = open_groups.open(asked(1, limit=10))
    (state,) = request.samples
    open_groups.assign()
    report(open_groups, "a", {state: 10})
    open_groups.leave("a")
    assert state.finish == "length"
    assert open_groups.take_batch().complete == [request.number]


@pytest.mark.parametrize(
    ("stops", "length", "finish"),
    [([0], 10, "stop"), ([0], 3, "stop"), ([7], 10, "length"), ([7], 3, "")],
)
def test_tokens_say_how_a_sample_ended_where_its_engine_did_not(
    stops: list[int], length: int, finish: str
) -> None:
    """All that were reported are token 0. One that has its stop token must not be generated further."""
    open_groups = groups_with("a", "b")
    sampling = {"max_new_tokens": 10, "stop_token_ids": stops}
    (request,) = open_groups.open(msgspec.structs.replace(asked(1), sampling=sampling))
    (state,) = request.samples
    open_groups.assign()
    holder = state.instance
    report(open_groups, holder, {state: length})
    open_groups.leave(holder)
    open_groups.assign()
    assert state.finish == finish
    assert (state.instance is None) == bool(finish)


def test_stop_tokens_that_are_ignored_end_nothing() -> None:
    open_groups = groups_with("a")
    sampling = {"max_new_tokens": 10, "stop_token_ids": [0], "ignore_eos": True}
    (request,) = open_groups.open(msgspec.structs.replace(asked(1), sampling=sampling))
    (state,) = request.samples
    open_groups.assign()
    report(open_groups, "a", {state: 3})
    open_groups.leave("a")
    assert state.finish == ""


@pytest.mark.parametrize(
    ("group", "sampling"),
    [
        (Group(0, np.array([], np.int32)), {"max_new_tokens": 4}),
        (Group(2**63, np.array([1], np.int32)), {"max_new_tokens": 4}),
        (Group(0, np.array([-1], np.int32)), {"max_new_tokens": 4}),
        (Group(0, np.array([[1]], np.int32)), {"max_new_tokens": 4}),
        (Group(0, np.array([1.5], np.float32)), {"max_new_tokens": 4}),
        (Group(0, np.array([1], np.int32)), {"max_new_tokens": 0}),
        (Group(0, np.array([1], np.int32)), {}),
        (Group(0, np.array([1], np.int32)), {"max_new_tokens": 4, "stop_token_ids": 2}),
        (Group(0, np.array([1], np.int32)), {"max_new_tokens": 4, "min_tokens": 2}),
        (Group(0, np.array([1], np.int32)), {"max_new_tokens": 4, "sampling_seed": 2}),
        (Group(0, np.array([1], np.int32), {"max_new_tokens": 0}), {"max_new_tokens": 4}),
        (Group(0, np.array([1], np.int32), {"max_new_tokens": True}), {"max_new_tokens": 4}),
        (Group(0, np.array([1], np.int32), {"max_new_tokens": "9"}), {"max_new_tokens": 4}),
    ],
)
def test_a_request_that_nobody_can_generate_is_refused_whole(group: Group, sampling: dict[str, Any]) -> None:
    open_groups = groups_with("a")
    good = Group(7, np.array([1], np.int32))
    request = Request(
        purpose="train", groups=pack_groups([good, group]), n=1, sampling=sampling, seed=1, min_version=0
    )
    with pytest.raises(FrameError) as caught:
        open_groups.open(request)
    assert caught.value.details["reason"] == "invalid"
    assert not open_groups.requests
    assert not open_groups.is_dirty


def test_a_key_that_no_engine_is_told_is_refused_by_its_name() -> None:
    asked_for = msgspec.structs.replace(asked(1), sampling={"max_new_tokens": 4, "topp": 0.9})
    with pytest.raises(FrameError, match=r"request\.sampling\.topp: .*; did you mean 'top_p'\?"):
        groups_with("a").open(asked_for)


def test_impossible_progress_is_refused_and_changes_nothing() -> None:
    open_groups = groups_with("a", "b")
    (request,) = open_groups.open(asked(1, limit=10))
    (state,) = request.samples
    open_groups.assign()
    assert state.instance is not None
    report(open_groups, state.instance, {state: 4})
    kept = picture(open_groups)

    def sent(**changed: Any) -> GenerationProgress:
        columns = {
            "seq": 2,
            "rows": np.array([state.row], np.uint32),
            "leases": np.array([state.lease], np.uint64),
            "starts": np.array([4], np.uint32),
            "counts": np.array([2], np.uint32),
            "versions": np.array([0], np.int32),
            "tokens": np.zeros(2, np.int32),
            "logprobs": np.zeros(2, np.float32),
        }
        return GenerationProgress(**(columns | changed))

    wrong = {
        "gap": sent(starts=np.array([6], np.uint32)),
        "too_long": sent(
            counts=np.array([7], np.uint32), tokens=np.zeros(7, np.int32), logprobs=np.zeros(7, np.float32)
        ),
        "unknown_version": sent(versions=np.array([6], np.int32)),
        "unknown_row": sent(rows=np.array([1 << 20], np.uint32)),
    }
    for code, frame in wrong.items():
        with pytest.raises(FrameError) as caught:
            open_groups.progress(state.instance, frame)
        assert caught.value.details["reason"] == code
        assert picture(open_groups) == kept
    for end, code in (
        (End(1 << 20, 1, "stop", "", ()), "unknown_row"),
        (End(state.row, state.lease, "stop", "", ((6, 4),)), "unknown_version"),
    ):
        with pytest.raises(FrameError) as caught:
            open_groups.progress(state.instance, sent(ends=[end]))
        assert caught.value.details["reason"] == code
        assert picture(open_groups) == kept


def test_version_runs_that_the_engine_tells_in_the_end_are_the_ones_kept() -> None:
    """Over two instances and an update in place; and the same after a restart."""
    open_groups = groups_with("a")
    (request,) = open_groups.open(asked(1, limit=100))
    (state,) = request.samples
    open_groups.assign()
    report(open_groups, "a", {state: 6})
    open_groups.leave("a")
    join(open_groups, "b")
    open_groups.assign()
    report(open_groups, "b", {state: 10})
    for version in (2, 3):
        open_groups.serve("b", version)
    end = End(state.row, state.lease, "stop", "", ((0, 3), (2, 5), (3, 2)))
    open_groups.progress("b", GenerationProgress(9, *[np.empty(0, t) for t in "IQIIiif"], [end]))
    assert state.runs == [[0, 0, 9], [2, 9, 14], [3, 14, 16]]
    batch = open_groups.take_batch()
    rows = Rows(batch.counters, batch.opened, dict(batch.encoded()), 5, 0)
    assert picture(rows.restored(2)) == picture(open_groups)


def test_what_comes_under_a_lease_that_ended_counts_for_nothing_though_its_holder_has_the_sample_again() -> (
    None
):
    open_groups = groups_with("a")
    (request,) = open_groups.open(asked(1))
    (state,) = request.samples
    open_groups.assign()
    report(open_groups, "a", {state: 4})
    former = state.lease
    report(open_groups, "a", {}, {state: "released"})
    open_groups.assign()
    assert state.instance == "a"
    assert state.lease != former
    late = {
        "rows": np.array([state.row], np.uint32),
        "leases": np.array([former], np.uint64),
        "starts": np.array([4], np.uint32),
        "counts": np.array([3], np.uint32),
        "versions": np.zeros(1, np.int32),
        "tokens": np.zeros(3, np.int32),
        "logprobs": np.zeros(3, np.float32),
    }
    open_groups.progress("a", GenerationProgress(2, **late, ends=[End(state.row, former, "stop", "", ())]))
    assert (state.length, state.finish, state.instance) == (4, "", "a")
    assert open_groups.account.discarded == {"superseded": 3}
    assert open_groups.missing_tokens() == 0


def test_a_sample_that_was_given_up_is_not_taken_back() -> None:
    open_groups = groups_with("a", "b")
    (request,) = open_groups.open(asked(1))
    (state,) = request.samples
    for _ in range(QUARANTINE_AFTER + MOST_RESETS):
        open_groups.assign()
        assert state.instance is not None
        report(open_groups, state.instance, {}, {state: "failed"})
    assert state.key in open_groups.given_up
    hello = SimAgent("a", 0, 0).hello()
    assert (
        open_groups.join(
            msgspec.structs.replace(hello, held=[Held(key=state.key, lease=9, start=0, length=5)])
        )
        == []
    )
    assert state.instance is None
