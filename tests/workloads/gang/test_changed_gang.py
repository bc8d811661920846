"""A gang whose membership changes in the middle of a call: the call is dropped, and made again on the next gang.

Of a rank that dies the trainer hears by the call itself. Here the master gives up a rank that neither answers nor dies,
as behind a network that swallows everything: the announcement of the next gang is all that the trainer hears.
"""

from __future__ import annotations

import threading

import pytest

from tests.workloads.trainer.test_loop import came_to

HUNG_WITHIN_S = 60


@pytest.mark.parametrize(("call", "nth"), [("actor.accumulate", 2), ("actor.apply", 1), ("actor.apply", 3)])
def test_a_call_that_a_lost_rank_never_ends_is_made_again_on_the_next_gang(make_job, undisturbed, call, nth):
    job = make_job(run={"call_timeout_s": 600.0})
    is_hung = threading.Event()

    def hang() -> None:
        job.hang("actor-0")
        is_hung.set()

    job.on(call, nth, hang, vertex="actor-0")
    with job:
        assert is_hung.wait(HUNG_WITHIN_S)
        lost = job.vertex("actor-0")
        job.cut_off("actor-0", "actor-1")
        job.on_report(
            "StepCompleted", 1, lost.wake
        )  # what it made of the call comes in the middle of the next gang's
        came_to(job, undisturbed)
        assert not lost.dead
    assert job.reports_of("OperatorFailed") == [], "the master knows"
    assert {name: job.vertex(name).host.incarnation for name in ("trainer-0", "actor-0", "actor-1")} == {
        "trainer-0": 1,
        "actor-0": 2,
        "actor-1": 2,
    }
