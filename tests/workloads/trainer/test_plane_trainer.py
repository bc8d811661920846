"""The trainer and a rollout plane: whatever fails on either side, each prompt is trained once or replaced."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gyre.errors import JobFailed
from gyre.testing.in_process import InProcessJob
from gyre.workloads.gang.weight_copy import WeightCopy
from gyre.workloads.trainer.learning import lifecycle
from tests.waits import GENEROUS_S
from tests.workloads import toy_plane
from tests.workloads.conftest import digests_of, steps_of
from tests.workloads.toy_plane import ToyPlane, install
from tests.workloads.trainer.test_loop import DEADLINE_S, ONE_RESTART
from tests.workloads.trainer.test_streaming import MODES, batches_of, digests_by_record

pytestmark = pytest.mark.landing

HERE = "tests.workloads.toy_plane"
PLANE_ROLLOUT = "gyre.workloads.rollout_vertices:RolloutInstance"
ALL_MODES = {"fixed": {"run": {"micro_batches": "fixed"}}, **MODES}
MakePlaned = Callable[..., tuple[InProcessJob, ToyPlane]]


@pytest.fixture
def planed(make_job, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePlaned]:
    planes: list[ToyPlane] = []

    def make(
        mode: str = "fixed",
        *,
        run: dict[str, Any] | None = None,
        roles: dict[str, Any] | None = None,
        failover: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        **knobs: Any,
    ) -> tuple[InProcessJob, ToyPlane]:
        plane = ToyPlane(**knobs)
        planes.append(plane)
        install(plane, monkeypatch)
        chosen = dict(ALL_MODES[mode])
        steps = {"micro_batches": "streamed", **chosen.pop("run", {}), **(run or {})}
        planed_roles = {
            "actor": {"entrypoint": f"{HERE}:PlaneActor", "total": 2},
            "rollout": {"entrypoint": PLANE_ROLLOUT},
            **(roles or {}),
        }
        chosen |= {"config": {"sampling": {"n": 2}} | (config or {}), "failover": failover or {}}
        job = make_job(roles=planed_roles, run=steps, **chosen)
        return job, plane

    yield make
    for plane in planes:
        plane.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def came_out_right(job: InProcessJob, plane: ToyPlane, *, diverged: bool = False) -> dict[str, Any]:
    result = job.result(timeout_s=DEADLINE_S)
    account = job.account()
    assert result["prompts_lost"] == 0
    assert (account.trained, account.waiting) == (job.spec.run.steps * 8, 0)
    assert account.drawn == account.trained + account.dropped
    assert (account.lost, account.trained_twice) == ((), ())
    for row in steps_of(job):
        assert 0 <= row.metrics["staleness_max"] <= job.spec.max_staleness
    assert list(batches_of(job)) == list(range(1, job.spec.run.steps + 1))
    told = [report.body["error"] for report in job.reports_of("OperatorFailed")]
    assert diverged or not [text for text in told if "replaying" in text], "a replay gave other weights"
    if job.spec.run.micro_batches == "streamed":
        assert {row.step: row.digest for row in steps_of(job)} == digests_by_record(job)
    # The trainer's last messages may still be on their way.
    until(lambda: not plane.open and not plane.delivered)
    assert plane.taken == plane.generated
    return result


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_run_takes_all_that_the_plane_generates(planed: MakePlaned, mode: str) -> None:
    job, plane = planed(mode)
    with job:
        came_out_right(job, plane)
    assert [report.body["version"] for report in job.reports_of("Evaluated")] == [0, 2, 4]
    published = [report.body for report in job.reports_of("WeightsPublished")]
    assert [one["checksum"] for one in published][1:] == [row.digest for row in steps_of(job)]
    assert job.reports_of("OperatorFailed") == []


@pytest.mark.parametrize("mode", ["streamed", "wait", "drop"])
def test_a_group_that_comes_late_holds_up_as_little_as_it_may(planed: MakePlaned, mode: str) -> None:
    job, plane = planed(mode, held={3})
    with job:
        step = {"streamed": 0, "wait": 2, "drop": 4}[mode]
        if step:
            job.wait_for_report("StepCompleted", nth=step, timeout_s=DEADLINE_S)
        with pytest.raises(TimeoutError):
            job.wait_for_report("StepCompleted", nth=step + 1, timeout_s=0.4)
        plane.release()
        result = came_out_right(job, plane)
    assert bool(result["tokens_discarded"]) is (mode == "drop")
    if mode == "streamed":
        assert len(batches_of(job)[1]) >= 2, "the others were not sent before it"


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_group_that_nobody_can_generate_is_quarantined_and_replaced(planed: MakePlaned, mode: str) -> None:
    job, plane = planed(mode, poison={2, 11, 40, 41})
    with job:
        result = came_out_right(job, plane)
    told = {report.body["group"]: report.body for report in job.reports_of("GroupReplaced")}
    poisoned = {group for group, body in told.items() if body["reason"] == "quarantined"}
    assert {2, 11} <= poisoned <= {2, 11, 40, 41}
    assert result["prompts_dropped"] == job.account().dropped == len(told)
    assert told[2]["evidence"].endswith("the engine's last words")
    trained = {
        g for batches in batches_of(job).values() for shares in batches for share in shares for g in share
    }
    assert not trained & set(told)
    assert trained >= {body["replaced_by"] for body in told.values()} - set(told)
    assert job.progress["groups_dropped"] == len(told)


def test_what_the_plane_delivers_and_nobody_can_train_is_replaced(planed: MakePlaned) -> None:
    """The plane may have it from a ledger of before: delivered again it would be the same."""
    job, plane = planed("streamed", spoilt={2, -2})
    with job:
        came_out_right(job, plane)
    (told,) = (report.body for report in job.reports_of("GroupReplaced"))
    assert (told["group"], told["reason"]) == (2, "quarantined")
    assert "token id -" in told["evidence"]
    assert job.reports_of("TrainerFailed") == []


def test_a_plane_that_can_generate_nothing_ends_the_job_with_its_last_words(planed: MakePlaned) -> None:
    job, _ = planed("streamed", poison=set(range(10_000)), failover=ONE_RESTART)
    with job, pytest.raises(JobFailed, match="the engine's last words"):
        job.result(timeout_s=DEADLINE_S)
    assert 8 < job.account().dropped < 30


def test_an_evaluation_does_without_what_nobody_can_answer(planed: MakePlaned) -> None:
    job, plane = planed("fixed", poison={-2})
    with job:
        came_out_right(job, plane)
    assert {report.body["count"] for report in job.reports_of("Evaluated")} == {2}


def test_an_evaluation_that_nobody_can_answer_is_left_out(planed: MakePlaned) -> None:
    job, plane = planed("fixed", poison={-1, -2, -3})
    with job:
        came_out_right(job, plane)
    assert job.reports_of("Evaluated") == []


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_new_gang_serves_the_version_that_died_with_the_old_one(planed: MakePlaned, every: int) -> None:
    """From the checkpoint of that version, of the one before it, and of the beginning."""
    job, plane = planed("fixed", run={"checkpoint_every": every})
    job.on_report("WeightsPublished", 4, lambda: job.kill("actor-1"))
    with job:
        came_out_right(job, plane)
    assert [version for version, _, source in plane.published if source == "actor-0.2"] == [3, 4, 5]
    assert len({(version, checksum) for version, checksum, _ in plane.published}) == 6
    told = [report.body["version"] for report in job.reports_of("WeightsPublished")]
    assert told == list(range(6))
    assert job.reports_of("OperatorFailed") == []


def test_a_gang_that_came_back_exactly_serves_its_version_though_no_step_follows(planed: MakePlaned) -> None:
    """Beside whatever it does next. A group of the next step is held, so that no newer version takes its place."""
    job, plane = planed("fixed", held={27}, run={"checkpoint_every": 1})
    job.on_report("CheckpointCommitted", 4, lambda: job.kill("actor-1"))
    with job:
        until(lambda: (3, "actor-0.2") in [(version, source) for version, _, source in plane.published])
        plane.release()
        came_out_right(job, plane)
    (restored,) = [report.body for report in job.reports_of("GangRestored")]
    assert restored["step"] == 3, "no step was trained again"
    assert len({(version, checksum) for version, checksum, _ in plane.published}) == 6


def test_the_model_does_not_pass_the_trainer(planed: MakePlaned) -> None:
    """Instances fetch it from the rank, and no call carries it. Only the one that training began with does: the
    reference has it."""
    job, plane = planed("fixed")
    exported = []
    job.on("actor.export_weights", 2, lambda: exported.append(True))
    with job:
        came_out_right(job, plane)
    assert not exported


def test_a_gang_whose_ranks_live_serves_nothing_again(planed: MakePlaned) -> None:
    job, plane = planed("fixed")

    def fail() -> None:
        raise RuntimeError("once")

    job.on("actor.publish_model", 4, fail)
    with job:
        came_out_right(job, plane)
    assert len(job.reports_of("OperatorFailed")) == 1
    assert [version for version, _, _ in plane.published] == list(range(6))


def test_a_step_s_weights_are_made_ready_beside_the_next_step(planed: MakePlaned) -> None:
    """Its micro-batches are trained meanwhile. Its optimizer step waits, the plane hears nothing, and the ledger has no
    digest before it has the weights' own."""
    job, plane = planed("wait")
    seen: list[tuple[list[int], dict[int, Any]]] = []
    accumulated = threading.Event()
    known: list[tuple[str | None, str]] = []
    publish = plane.publish

    def publish_and_look(told: dict[str, Any]) -> None:
        # There is no row of version 0.
        known.append((digests_of(job).get(told["version"], told["checksum"]), told["checksum"]))
        publish(told)

    plane.publish = publish_and_look  # type: ignore[method-assign]

    def look() -> None:
        seen.append(([version for version, *_ in plane.published], digests_of(job)))
        accumulated.set()

    job.on_report("StepCompleted", 2, toy_plane.READY.clear, when="before")
    job.on_report("StepCompleted", 2, lambda: job.on("actor.accumulate", 1, look, when="after"))
    with job:
        try:
            assert accumulated.wait(GENEROUS_S)
            with pytest.raises(TimeoutError):
                job.wait_for_report("StepCompleted", nth=3, timeout_s=0.4)
        finally:
            toy_plane.READY.set()
        came_out_right(job, plane)
    assert len(known) == 6
    assert all(digest == checksum for digest, checksum in known)
    ((published, digests),) = seen
    assert (published, list(digests), digests[2]) == ([0, 1], [1, 2], None)


@pytest.mark.parametrize("victim", ["actor-0", "actor-1", "trainer-0"])
def test_weights_that_died_on_their_way_are_published_by_the_next_gang_or_trainer(
    planed: MakePlaned, victim: str
) -> None:
    job, plane = planed("wait")
    job.on_report("StepCompleted", 3, toy_plane.READY.clear, when="before")

    def kill() -> None:
        job.kill(victim)
        toy_plane.READY.set()

    job.on_report("StepCompleted", 3, lambda: job.on("actor.accumulate", 1, kill, when="after"))
    with job:
        came_out_right(job, plane)
    assert {version for version, *_ in plane.published} == set(range(6))
    assert len({(version, checksum) for version, checksum, _ in plane.published}) == 6
    told = [report.body["version"] for report in job.reports_of("WeightsPublished")]
    assert told == sorted(set(told)), "each once, as far as they were heard before a trainer died"
    assert set(told) >= {3, 4, 5}


@pytest.mark.parametrize("has_copy", [True, False])
def test_a_version_is_never_served_again_with_other_bytes(
    planed: MakePlaned, monkeypatch: pytest.MonkeyPatch, has_copy: bool
) -> None:
    copy = WeightCopy(3, "of 3", ("10.0.0.7:4000",), 3)
    monkeypatch.setattr(lifecycle.WeightCopies, "newest", lambda copies: copy if has_copy else None)
    monkeypatch.setattr(toy_plane, "DIVERGES", {("actor-0.2", 3)})
    job, plane = planed("fixed")
    job.on_report("WeightsPublished", 4, lambda: job.kill("actor-1"))
    with job:
        came_out_right(job, plane, diverged=True)
    assert "of other bytes" not in {checksum for _, checksum, _ in plane.published}
    assert {version for version, _, _ in plane.published} == set(range(6))
    blamed = [report.body["error"] for report in job.reports_of("OperatorFailed")]
    assert len(blamed) == (not has_copy)
    assert {report.body["step"] for report in job.reports_of("StepDiverged")} == {3}, "told in either case"
    assert all("replaying step 3 gave weights of other bytes" in error for error in blamed)


EACH_SAMPLE = {"reward": {"entrypoint": f"{HERE}:SampleReward"}}


def scored(group_id: int) -> list[tuple[int, ...]]:
    calls = [*toy_plane.SCORED]
    return [tokens for call in calls for group, tokens in call if group == group_id]


def test_a_sample_is_scored_while_others_of_its_group_are_generated(planed: MakePlaned) -> None:
    """And once: its score is joined to it when its group comes."""
    job, plane = planed("streamed", held={11}, roles=EACH_SAMPLE)
    with job:
        until(lambda: len(scored(11)) == 1)
        plane.release()
        came_out_right(job, plane)
    assert {len(set(scored(group))) for group in range(40)} == {2}
    assert {len(scored(group)) for group in range(40)} == {2}, "each sample once"


def test_a_score_counts_for_the_tokens_that_it_was_given_for(planed: MakePlaned) -> None:
    job, plane = planed("streamed", held={11}, lies=True, roles=EACH_SAMPLE)
    with job:
        until(lambda: len(scored(11)) == 1)
        plane.release()
        came_out_right(job, plane)
    assert len(scored(11)) == len(set(scored(11))) == 3
    assert {row.step: row.digest for row in steps_of(job)} == digests_by_record(job)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_reward_that_dies_is_sent_its_samples_again(planed: MakePlaned, when: str) -> None:
    job, plane = planed("streamed", roles=EACH_SAMPLE)
    for nth in (1, 4, 5):
        job.on("reward.score", nth, lambda: job.kill("reward-0", "reward-1"), when=when)
    with job:
        came_out_right(job, plane)
    assert job.reports_of("OperatorFailed") == []


def test_a_reward_that_fails_is_blamed_and_asked_again(planed: MakePlaned) -> None:
    job, plane = planed("streamed", roles=EACH_SAMPLE)

    def fail() -> None:
        raise RuntimeError("not today")

    job.on("reward.score", 3, fail)
    with job:
        came_out_right(job, plane)
    (told,) = [report.body for report in job.reports_of("OperatorFailed")]
    assert (told["operator"], told["error"]) == ("reward.score", "RuntimeError: not today")


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("mode", ["fixed", "streamed", "wait", "drop", "drop, replaced"])
@pytest.mark.parametrize("seed", range(4))
def test_deaths_and_cuts_at_random_moments_lose_nothing(planed: MakePlaned, mode: str, seed: int) -> None:
    dice = random.Random(f"{mode}/{seed}")
    roles = EACH_SAMPLE if seed % 2 else {}
    job, plane = planed(mode, seed=seed, poison={dice.randrange(40)}, run={"steps": 6}, roles=roles)
    moments = ["actor.accumulate", "actor.apply", "reward.score", "actor.checkpoint", "actor.publish_model"]
    victims = ["trainer-0", "actor-0", "actor-1", "reward-0", "reference-0"]
    for _ in range(4):
        some = dice.sample(victims, dice.choice([1, 1, 2]))
        job.on(
            dice.choice(moments),
            dice.randrange(1, 9),
            lambda some=some: job.kill(*some),
            when=dice.choice(["before", "after"]),
        )
    for _ in range(3):
        job.on(dice.choice(moments), dice.randrange(1, 12), plane.break_off)
    with job:
        came_out_right(job, plane)
