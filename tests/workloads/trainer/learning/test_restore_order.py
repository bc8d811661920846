"""Gangs that are brought back otherwise than from the disk: every step has the digest of an undisturbed run."""

from __future__ import annotations

import shutil
import threading
from typing import Any

import pytest

from gyre.workloads.trainer.learning import lifecycle
from tests.workloads import kept_policy
from tests.workloads.conftest import digests_of
from tests.workloads.toy_policy import ToyActor

pytestmark = pytest.mark.landing

DEADLINE_S = 90
HERE = "tests.workloads.kept_policy"


def roles(actor: str) -> dict[str, Any]:
    return {"actor": {"entrypoint": f"{HERE}:{actor}", "total": 2}}


def restored(job: Any) -> list[tuple[str, int]]:
    return [(report.body["source"], report.body["step"]) for report in job.reports_of("GangRestored")]


@pytest.mark.parametrize(
    ("call", "nth", "when", "step", "victims"),
    [
        ("actor.accumulate", 7, "before", 3, "actor-1"),
        ("actor.accumulate", 7, "before", 3, "actor-1 trainer-0"),
        ("actor.apply", 3, "after", 3, "actor-0 actor-1"),
        ("actor.apply", 3, "after", 3, "actor-1 trainer-0"),
        ("actor.accumulate", 5, "after", 2, "actor-1"),
    ],
)
def test_a_gang_goes_on_from_memory(make_job, undisturbed, call, nth, when, step, victims):
    """Two micro-batches a step, checkpoints of 0, 2 and 4. The last case dies in step 3, before anything newer than the
    checkpoint of step 2 is kept: memory has that step, too. Where both ranks die at the end of
    a step, the other one may or may not have kept it."""
    job = make_job(roles=roles("KeepingActor"))
    job.on(call, nth, lambda: job.kill(*victims.split()), when=when, vertex="actor-1")
    with job:
        result = job.result(timeout_s=DEADLINE_S)
    assert digests_of(job) == undisturbed.digests
    assert result["prompts_lost"] == 0
    assert job.account().trained_twice == ()
    able = {("memory", step)}
    if victims == "actor-0 actor-1":
        able.add(("disk", 2))
    assert restored(job)[0] in able
    directory = str(job.directory)
    assert not any(key[0] == directory for key in kept_policy.KEPT), "nobody will come back for it"


def lose_the_disk(job: Any, victim: str = "actor-1") -> None:
    shutil.rmtree(job.directory / "checkpoints")
    job.kill(victim)


def test_a_lost_checkpoint_is_replaced_by_the_weights_of_instances(make_job, undisturbed, monkeypatch):
    """A toy has no optimizer: its steps come out the same."""
    monkeypatch.setattr(lifecycle, "WeightCopies", kept_policy.ServedCopies)
    job = make_job(roles=roles("ServingActor"), run={"lost_checkpoint": "weights"})
    job.on("actor.accumulate", 7, lambda: lose_the_disk(job), vertex="actor-1")
    with job:
        result = job.result(timeout_s=DEADLINE_S)
    assert digests_of(job) == {**undisturbed.digests, 3: None}, "step 3 has the weights of instances now"
    assert result["prompts_lost"] == 0
    assert restored(job) == [("instance", 3)]
    told = [report.body["step"] for report in job.reports_of("CheckpointCommitted")]
    assert told == [0, 2, 3, 4, 5], "written as soon as the weights were there"


@pytest.mark.parametrize(
    ("moment", "nth", "when"),
    [
        ("actor.restore_weights", 1, "after"),
        ("trainer.GangRestored", 1, "before"),
        ("trainer.GangRestored", 1, "after"),
        ("actor.begin", 2, "before"),
    ],
)
def test_a_trainer_that_dies_before_it_is_heard_leaves_its_restore_to_the_next(
    make_job, undisturbed, monkeypatch, moment, nth, when
):
    """Its last words may be lost with it: the next one says them, under the same number."""
    monkeypatch.setattr(lifecycle, "WeightCopies", kept_policy.ServedCopies)
    job = make_job(roles=roles("ServingActor"), run={"lost_checkpoint": "weights"})
    job.on("actor.accumulate", 7, lambda: lose_the_disk(job), vertex="actor-1")
    vertex = "trainer-0" if moment.startswith("trainer") else "actor-1"
    job.on(moment, nth, lambda: job.kill("trainer-0"), when=when, vertex=vertex)
    with job:
        result = job.result(timeout_s=DEADLINE_S)
    assert digests_of(job) == {**undisturbed.digests, 3: None}
    assert result["prompts_lost"] == 0
    told = [report.body for report in job.reports_of("GangRestored")]
    assert [(one["number"], one["source"], one["step"], one["gang"]) for one in told] == [
        (1, "instance", 3, 2)
    ]


@pytest.mark.parametrize(
    ("actor", "victim", "sources"),
    [("ServingActor", "trainer-0", []), ("KeepingActor", "actor-1", [("memory", 2)])],
)
def test_a_lost_checkpoint_costs_nothing_that_ranks_or_their_memory_have(
    make_job, undisturbed, monkeypatch, actor, victim, sources
):
    """All of the checkpoint's step is there: no weights are taken, and what was lost is written again at once."""
    monkeypatch.setattr(lifecycle, "WeightCopies", kept_policy.ServedCopies)
    job = make_job(roles=roles(actor), run={"lost_checkpoint": "weights"})
    job.on("actor.accumulate", 5, lambda: lose_the_disk(job, victim), vertex="actor-1")
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert digests_of(job) == undisturbed.digests
    assert restored(job) == sources
    assert [report.body["step"] for report in job.reports_of("CheckpointCommitted")] == [0, 2, 2, 4, 5]


def test_ranks_that_are_stuck_at_the_end_do_not_hold_the_result(make_job, undisturbed, monkeypatch):
    monkeypatch.setattr(lifecycle, "END_WITHIN_S", 0.2)
    free = threading.Event()
    job = make_job(roles=roles("KeepingActor"), run={"call_timeout_s": 10 * DEADLINE_S})
    job.on("actor.forget_memory", 1, lambda: free.wait(2 * DEADLINE_S), vertex="actor-1")
    with job:
        result = job.result(timeout_s=DEADLINE_S)
        free.set()
    assert result["digest"] == undisturbed.result["digest"]


def test_without_leave_a_lost_checkpoint_is_told_and_no_weights_are_taken(make_job, monkeypatch):
    monkeypatch.setattr(lifecycle, "WeightCopies", kept_policy.ServedCopies)
    job = make_job(roles=roles("ServingActor"))
    told = threading.Event()
    job.on("actor.accumulate", 7, lambda: lose_the_disk(job), vertex="actor-1")
    job.on_report("OperatorFailed", 2, told.set)  # it is tried again, for a disk may come back
    with job:
        assert told.wait(DEADLINE_S)
        failed = job.reports_of("OperatorFailed")
    assert failed[0].body["operator"] == "restore"
    assert restored(job) == []


def cut_short(job: Any, step: int) -> None:
    part = job.directory / "checkpoints" / f"step_{step:08d}" / "rank_0.json"
    part.write_text(part.read_text()[:-1])


@pytest.mark.parametrize("victims", ["actor-1", "actor-1 trainer-0"])
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before_it(make_job, undisturbed, victims):
    """It dies in step 5, and the checkpoint of step 4 is not whole: steps 3 and 4 are trained again."""

    def harm() -> None:
        cut_short(job, 4)
        job.kill(*victims.split())

    job = make_job()
    job.on("actor.accumulate", 9, harm, vertex="actor-1")
    with job:
        result = job.result(timeout_s=DEADLINE_S)
    assert digests_of(job) == undisturbed.digests
    assert result["digest"] == undisturbed.result["digest"]
    assert result["prompts_lost"] == 0
    assert job.account().trained_twice == ()
    assert restored(job) == [("disk", 2)]
    (told,) = [report.body for report in job.reports_of("CheckpointDamaged")]
    assert (told["step"], told["older"]) == (4, 2)
    assert "rank_0.json has" in told["problem"]
    steps = [report.body["step"] for report in job.reports_of("CheckpointCommitted")]
    assert steps[-2:] == [4, 5], "a second one is there again as soon as can be"


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("victims", ["actor-1", "trainer-0", "actor-0 trainer-0"])
@pytest.mark.parametrize(
    ("call", "nth", "when"),
    [
        ("actor.checkpoint", 2, "after"),
        ("actor.checkpoint_written", 3, "before"),
        ("actor.checkpoint_written", 4, "after"),
        ("actor.accumulate", 6, "before"),
    ],
)
def test_whoever_dies_while_a_checkpoint_is_written_nothing_is_lost_or_trained_twice(
    make_job, undisturbed, call, nth, when, victims
):
    """That of step 2 is being written during step 3, and is committed after it."""
    job = make_job(roles=roles("SlowWriter"))
    job.on(call, nth, lambda: job.kill(*victims.split()), when=when, vertex="actor-1")
    with job:
        result = job.result(timeout_s=DEADLINE_S)
    assert job.killed == victims.split()
    assert digests_of(job) == undisturbed.digests
    assert result["digest"] == undisturbed.result["digest"]
    assert result["prompts_lost"] == 0
    assert job.account().trained_twice == ()
    assert job.reports_of("CheckpointDamaged") == []
    assert all(step in (0, 2) for _, step in restored(job)), "never from one that was not committed"
    assert sorted(path.name for path in (job.directory / "checkpoints").iterdir())[-1] == "step_00000005"


def test_it_is_the_same_where_only_the_ranks_can_tell(make_job, undisturbed):
    job = make_job(roles={"actor": {"entrypoint": f"{HERE}:RefusingActor", "total": 2}})
    job.on("actor.accumulate", 9, lambda: job.kill("actor-1"), vertex="actor-1")
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert digests_of(job) == undisturbed.digests
    assert restored(job) == [("disk", 2)]
    (told,) = [report.body for report in job.reports_of("CheckpointDamaged")]
    assert "a bit is wrong" in told["problem"]
    assert job.reports_of("OperatorFailed") == []


@pytest.mark.parametrize("victims", ["actor-1", "actor-1 trainer-0"])
@pytest.mark.parametrize(("nth", "step"), [(7, 3), (9, 4)])
def test_a_replay_that_differs_is_noticed_also_while_the_trainer_lives(make_job, victims, nth, step):
    """Checkpoints of 0, 2 and 4; the rank dies after step 3, or after step 4, whose checkpoint is cut short then."""
    job = make_job(roles=roles("DivergingActor"))

    def harm() -> None:
        if step == 4:
            cut_short(job, 4)
        job.kill(*victims.split())

    job.on("actor.accumulate", nth, harm, vertex="actor-1")
    with job:
        job.result(timeout_s=DEADLINE_S)
    told = {report.body["step"] for report in job.reports_of("StepDiverged")}
    assert told, "nobody was told"
    assert told <= set(range(3, step + 1))
    for report in job.reports_of("StepDiverged"):
        assert report.body["role"] == "actor"
        assert report.body["expected"] != report.body["found"]


def test_a_replay_that_does_not_differ_is_not_spoken_of(make_job, undisturbed):
    job = make_job()
    job.on("actor.accumulate", 7, lambda: job.kill("actor-1"), vertex="actor-1")
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert restored(job) == [("disk", 2)]
    assert job.reports_of("StepDiverged") == []
    assert digests_of(job) == undisturbed.digests


def test_where_both_are_damaged_the_ranks_say_so_and_nothing_is_trained_again(make_job):
    def harm() -> None:
        cut_short(job, 2)
        cut_short(job, 4)
        job.kill("actor-1")

    told = threading.Event()
    job = make_job()
    job.on("actor.accumulate", 9, harm, vertex="actor-1")
    job.on_report("OperatorFailed", 1, told.set)
    with job:
        assert told.wait(DEADLINE_S)
    assert restored(job) == []
    assert job.reports_of("CheckpointDamaged") == []


def test_what_a_toy_is_restored_from_is_the_disk(make_job, undisturbed):
    job = make_job()
    assert not hasattr(ToyActor, "restore_from_memory")
    job.on("actor.accumulate", 7, lambda: job.kill("actor-1"), vertex="actor-1")
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert digests_of(job) == undisturbed.digests
    assert restored(job) == [("disk", 2)]
