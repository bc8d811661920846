"""Streamed micro-batches and asynchronous steps: what was trained is what the ledger recorded, bit by bit.

A streamed run is not the same as another one; so each is compared with itself: a plain loop trains what the ledger
says was trained, and has to come to the same digest at every step.
"""

from __future__ import annotations

import json
import random
import sqlite3
import threading
from typing import Any

import pytest

from gyre.errors import UserCodeError
from gyre.rollouts.trainer.staleness import Action, Ages, Verdict
from gyre.testing.in_process import InProcessJob
from gyre.workloads.base import WorkloadContext
from tests.workloads.conftest import digests_of, steps_of
from tests.workloads.torch import test_ppo as ppo
from tests.workloads.toy_policy import ToyActor, ToyData, ToyReference, ToyReward, ToyRollout
from tests.workloads.trainer.test_loop import (
    DEADLINE_S,
    EVERYBODY,
    ONE_DIES,
    assert_final_checkpoint,
    assert_never_back,
)

pytestmark = pytest.mark.landing

HERE = "tests.workloads.trainer.test_streaming"
STREAMED = {"micro_batches": "streamed"}

MODES: dict[str, dict[str, Any]] = {
    "streamed": {},
    "streamed, 2 stale": {"max_staleness": 2},
    "wait": {"max_staleness": 2, "staleness": {"policy": "wait"}},
    "drop": {"max_staleness": 1, "staleness": {"policy": "drop"}},
    "drop, replaced": {"max_staleness": 1, "staleness": {"policy": "drop", "dropped": "replace"}},
    "a function": {"max_staleness": 2, "staleness": {"policy": f"{HERE}:within_two"}},
}


def within_two(age: Ages) -> Verdict:
    return Verdict(Action.TRAIN) if age.oldest <= 2 else Verdict(Action.DROP, "old")


def for_ever(age: Ages) -> Verdict:
    return Verdict(Action.WAIT, "tomorrow")


def rows(job: InProcessJob, query: str) -> list[Any]:
    connection = sqlite3.connect(f"file:{job.directory / 'gyre.db'}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def batches_of(job: InProcessJob) -> dict[int, list[list[list[int]]]]:
    """By step, each micro-batch's groups by rank."""
    found: dict[int, list[list[list[int]]]] = {}
    for step, shares in rows(
        job, "SELECT step, shares FROM gyre_ledger_micro_batches ORDER BY step, position"
    ):
        found.setdefault(step, []).append(json.loads(shares))
    return found


def digests_by_record(job: InProcessJob) -> dict[int, str]:
    """Each step's digest, by a plain loop over the micro-batches that the ledger has. A group's tokens follow from its
    prompt and from the policy that the ledger names."""
    made_by = dict(rows(job, "SELECT group_id, version_min FROM gyre_ledger_groups"))
    actor, reward, reference = ToyActor(), ToyReward(), ToyReference()
    actor.context = WorkloadContext(job="by-record", role="actor", rank=0, world_size=1)
    actor.setup()
    actor.warm_start()
    weights, found = {0: list(actor.weights)}, {}
    for step, batches in batches_of(job).items():
        for index, shares in enumerate(batches):
            groups = []
            for group_id in (group_id for share in shares for group_id in share):
                rollout = ToyRollout()
                rollout.context = WorkloadContext(job="by-record", role="rollout", rank=0, world_size=1)
                rollout.version = made_by[group_id]
                rollout.weights = weights[rollout.version]
                groups += rollout.generate([ToyData({}).prompt(group_id)], step=step)
            actor.accumulate(reference.logprobs(reward.score(groups)), step=step, index=index)
        ids = [group_id for shares in batches for share in shares for group_id in share]
        actor.apply(step=step, indices=len(batches), group_ids=ids)
        weights[step] = list(actor.weights)
        found[step] = actor.state()["digest"]
    return found


def came_out_right(job: InProcessJob) -> dict[str, Any]:
    result = job.result(timeout_s=DEADLINE_S)
    steps = job.spec.run.steps
    assert result["steps"] == steps
    assert result["prompts_lost"] == 0
    account = job.account()
    assert (account.trained, account.waiting) == (steps * 8, 0)
    assert account.drawn == account.trained + account.dropped
    assert (account.lost, account.trained_twice) == ((), ())
    assert digests_of(job) == digests_by_record(job)
    told = [report.body["error"] for report in job.reports_of("OperatorFailed")]
    assert not [text for text in told if "replaying" in text], "a replay gave other weights"
    for row in steps_of(job):
        assert 0 <= row.metrics["staleness_max"] <= job.spec.max_staleness
        assert row.metrics["oldest"] == row.step - 1 - row.metrics["staleness_max"]
    for batches in batches_of(job).values():
        sizes = [sum(len(share) for share in shares) for shares in batches]
        assert sum(sizes) == 8
        assert all(1 <= size <= 4 for size in sizes)
        assert all(size >= 2 for size in sizes[:-1]), "sent below the lower bound"
    assert_never_back(job)
    assert_final_checkpoint(job)
    return result


@pytest.fixture
def make_streamed(make_job):
    def make(mode: str = "streamed", *, run: dict[str, Any] | None = None, **changes: Any) -> InProcessJob:
        return make_job(run={**STREAMED, **(run or {})}, **{**MODES[mode], **changes})

    return make


# -- undisturbed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_loop_over_the_record_trains_the_same(make_streamed, mode):
    with make_streamed(mode, run={"steps": 8}) as job:
        came_out_right(job)
    assert job.reports_of("OperatorFailed") == []
    assert [report.body["version"] for report in job.reports_of("Evaluated")] == [0, 2, 4, 6, 8]
    if mode in ("streamed", "streamed, 2 stale"):
        assert [row.group_ids for row in steps_of(job)] == [
            list(range(8 * step, 8 * step + 8)) for step in range(8)
        ]


def test_a_slow_group_holds_up_nobody_but_its_step(make_streamed):
    """A vertex hangs with its first groups; meanwhile the others are generated, scored and taken by the gang."""
    job = make_streamed()
    hung, taken = threading.Event(), threading.Semaphore(0)
    job.on("rollout.generate", 1, lambda: (job.hang("rollout-0"), hung.set()), vertex="rollout-0")
    for nth in range(1, 4):
        job.on("actor.accumulate", nth, taken.release, when="after", vertex="actor-0")
    with job:
        assert hung.wait(DEADLINE_S)
        assert taken.acquire(timeout=DEADLINE_S), "the gang waited for the slowest"
        with pytest.raises(TimeoutError):
            job.wait_for_report("StepCompleted", timeout_s=0.3)
        shares = job.progress["waits"]
        assert any(who.startswith("actor waits for") for who in shares), shares
        job.wake("rollout-0")
        came_out_right(job)


@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_asynchronous_steps_go_on_without_a_slow_group_as_long_as_its_age_permits(make_streamed, policy):
    job = make_streamed(
        staleness={"policy": policy}, max_staleness=2, run={"steps": 8, "groups_per_firing": 1}
    )
    hung = threading.Event()
    job.on("rollout.generate", 1, lambda: (job.hang("rollout-0"), hung.set()), vertex="rollout-0")
    with job:
        assert hung.wait(DEADLINE_S)
        job.wait_for_report("StepCompleted", nth=2, timeout_s=DEADLINE_S)
        if policy == "wait":
            with pytest.raises(TimeoutError):
                job.wait_for_report("StepCompleted", nth=3, timeout_s=0.4)
        else:
            job.wait_for_report("StepCompleted", nth=4, timeout_s=DEADLINE_S)
        job.wake("rollout-0")
        result = came_out_right(job)
    assert bool(result["tokens_discarded"]) is (policy == "drop")
    if policy == "wait":  # of the slow group; without it others may be as old
        assert steps_of(job)[2].metrics["staleness_max"] == 2


@pytest.mark.parametrize("dropped", ["again", "replace"])
def test_a_dropped_group_is_accounted_and_its_place_is_filled(make_streamed, dropped):
    job = make_streamed(
        staleness={"policy": "drop", "dropped": dropped},
        max_staleness=1,
        run={"steps": 8, "groups_per_firing": 1},
    )
    job.on("rollout.generate", 1, lambda: job.hang("rollout-0"), vertex="rollout-0")
    job.on_report("StepCompleted", 4, lambda: job.wake("rollout-0"))
    with job:
        result = came_out_right(job)
    account = job.account()
    (discarded,) = account.discarded.items()
    assert discarded[0] == "stale"
    assert discarded[1] > 0
    assert result["tokens_discarded"] == account.discarded
    told = job.reports_of("GroupReplaced")
    trained = {
        g for batches in batches_of(job).values() for shares in batches for share in shares for g in share
    }
    if dropped == "again":
        assert (account.dropped, told) == (0, [])
        assert trained == set(range(64))
    else:
        assert account.dropped == result["prompts_dropped"] == len(told) > 0
        for report in told:
            assert report.body["reason"] == "stale"
            assert "behind the trainer's" in report.body["evidence"]
            assert report.body["group"] not in trained
            assert report.body["replaced_by"] in trained
    assert job.progress["tokens_discarded"] == account.discarded


def test_a_function_that_lets_everybody_wait_is_told_so(make_streamed):
    with (
        make_streamed("a function", staleness={"policy": f"{HERE}:for_ever"}) as job,
        pytest.raises(
            UserCodeError, match=r"for_ever lets \d+ groups wait, and there is nothing to wait for"
        ),
    ):
        job.result(timeout_s=DEADLINE_S)


# -- bounds -----------------------------------------------------------------------------------------


def test_bounds_in_samples_and_tokens_hold(make_streamed):
    """A group is 2 samples of 3 tokens on a prompt of 2: 10 tokens."""
    run = {
        "min_samples_per_micro_batch": 6,
        "min_tokens_per_micro_batch": 30,
        "max_tokens_per_micro_batch": 30,
    }
    with make_streamed(run=run) as job:
        job.result(timeout_s=DEADLINE_S)
    sizes = {
        tuple(sum(len(share) for share in shares) for shares in batches)
        for batches in batches_of(job).values()
    }
    assert sizes == {(3, 3, 2)}
    assert digests_of(job) == digests_by_record(job)


# -- deaths -----------------------------------------------------------------------------------------


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("mode", ["streamed", "wait", "drop"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("call", "victims"),
    [
        (("actor.accumulate", "actor-1", 1), "actor-1"),
        (("actor.accumulate", "actor-0", 6), "actor-0"),
        (("actor.accumulate", "actor-0", 5), "trainer-0"),
        (("actor.apply", "actor-0", 3), "actor-1 trainer-0"),
        (("actor.apply", "actor-1", 2), "actor-1"),
        (("reward.score", "reward-0", 9), "reward-0 trainer-0"),
        (("rollout.generate", "rollout-0", 5), "rollout-0"),
        (("actor.checkpoint", "actor-0", 2), "trainer-0"),
    ],
)
def test_a_death_changes_nothing_of_what_was_recorded(make_streamed, mode, call, victims, when):
    job = make_streamed(mode)
    recorded: list[dict[int, Any]] = []

    def die() -> None:
        recorded.append(batches_of(job))
        job.kill(*victims.split())

    name, vertex, nth = call
    job.on(name, nth, die, when=when, vertex=vertex)
    with job:
        came_out_right(job)
    (before,) = recorded
    after = batches_of(job)
    for step, batches in before.items():
        assert after[step][: len(batches)] == batches, "a recorded micro-batch became another"


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("kind", ["StepCompleted", "WeightsPublished", "CheckpointCommitted"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_trainer_that_dies_between_two_writes_is_continued(make_streamed, kind, when):
    job = make_streamed("drop")
    job.on_report(kind, 2, job.kill_trainer, when=when)
    with job:
        came_out_right(job)
    assert job.killed == ["trainer-0"], "the moment never came"


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("seed", range(12))
def test_deaths_at_random_moments_lose_nothing(make_streamed, seed):
    dice = random.Random(seed)
    job = make_streamed(list(MODES)[seed % len(MODES)], run={"steps": 7})
    for _ in range(5):
        call, vertex, nth = dice.choice(ONE_DIES)
        victims = dice.sample(EVERYBODY, dice.choice([1, 1, 2, 3]))
        job.on(
            call, nth, lambda v=victims: job.kill(*v), when=dice.choice(["before", "after"]), vertex=vertex
        )
    with job:
        came_out_right(job)


# -- a gang beside the actor's ----------------------------------------------------------------------


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("victim", ["", "critic-0", "actor-0", "trainer-0"])
def test_a_critic_is_fed_the_same_micro_batches(make_job, victim):
    wanted = ppo.spec("ppo", **ppo.PPO_LOSS)
    wanted["run"] = {**wanted["run"], **STREAMED}
    job = make_job(wanted)
    if victim:
        job.on("critic.accumulate", 3, lambda: job.kill(victim), when="after")
    with job:
        job.result(timeout_s=ppo.DEADLINE_S)
    assert not [r for r in job.reports_of("OperatorFailed") if "replaying" in r.body["error"]]
    account = job.account()
    assert (account.trained, account.lost, account.trained_twice) == (16, (), ())
    assert ppo.critic_of(job)["trained"] == [(0, 16)]
    assert all(1 <= len(batches) <= 4 for batches in batches_of(job).values())
    assert len(set(digests_of(job).values())) == 4
