"""The trainer that walks the graph: whatever dies, and whenever, every step has the digest of an undisturbed run."""

from __future__ import annotations

import json
import random
import re
import threading
import time

import pytest

from gyre.errors import JobFailed, UserCodeError
from gyre.testing.in_process import InProcessJob
from gyre.workloads.trainer import retries
from gyre.workloads.trainer.learning import checkpoints
from tests.workloads.conftest import digests_of, steps_of
from tests.workloads.toy_policy import ToyData, digests_by_hand

HERE = "tests.workloads.toy_policy"
DEADLINE_S = 90

ONE_RESTART = {"vertex": {"max": 1, "window_s": 600}, "job": {"max": 0, "window_s": 600}}
"""What is repeated in vain fails soon."""


def came_to(job: InProcessJob, undisturbed) -> None:
    """The job ends, and nothing shows of what happened to it."""
    result = job.result(timeout_s=DEADLINE_S)
    assert digests_of(job) == undisturbed.digests
    assert result["digest"] == undisturbed.result["digest"]
    assert result["steps"] == undisturbed.result["steps"]
    assert result["prompts_lost"] == 0
    account = job.account()
    assert (account.drawn, account.trained, account.waiting) == (40, 40, 0)
    assert account.lost == ()
    assert account.trained_twice == ()
    assert_never_back(job)
    assert_final_checkpoint(job)


def assert_never_back(job: InProcessJob) -> None:
    for kind, field in (("WeightsPublished", "version"), ("CheckpointCommitted", "step")):
        told = [report.body[field] for report in job.reports_of(kind)]
        assert told == sorted(told), kind
    steps = [report.body["step"] for report in job.reports_of("StepCompleted")]
    assert steps == list(range(1, job.spec.run.steps + 1)), "each is told once, whoever dies"
    versions = [report.body["version"] for report in job.reports_of("StepCompleted")]
    assert versions == steps


def assert_final_checkpoint(job: InProcessJob) -> None:
    folders = sorted((job.directory / "checkpoints").glob("step_*"))
    assert folders[-1].name == f"step_{job.spec.run.steps:08d}"
    assert len(folders) <= checkpoints.KEPT_CHECKPOINTS


# -- undisturbed ------------------------------------------------------------------------------------


def test_an_undisturbed_run_trains_every_prompt_once_and_repeats_itself_bit_by_bit(make_job, undisturbed):
    with make_job() as job:
        came_to(job, undisturbed)
    assert job.reports_of("OperatorFailed") == []
    assert [row.group_ids for row in steps_of(job)] == [
        list(range(8 * step, 8 * step + 8)) for step in range(5)
    ]
    assert [report.body["version"] for report in job.reports_of("Evaluated")] == [0, 2, 4]
    assert [report.body["step"] for report in job.reports_of("CheckpointCommitted")] == [0, 2, 4, 5]
    assert {row.metrics["staleness_max"] for row in steps_of(job)} == {0}
    assert list((job.directory / "checkpoints").glob(".partial_*")) == []


def test_the_graph_trains_what_a_plain_loop_trains(undisturbed):
    assert undisturbed.digests == digests_by_hand(steps=5, batch=8, micro=4)


def test_no_version_is_out_before_its_step_is_in_the_ledger(make_job):
    job = make_job()
    stored: list[list[int]] = []
    shared: list[list[int]] = []
    for nth in range(1, 7):
        job.on_report("WeightsPublished", nth, lambda: stored.append(list(digests_of(job))), when="before")
    for nth in range(1, 6):
        job.on_report("StepCompleted", nth, lambda: shared.append(list(digests_of(job))), when="before")
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert stored == [list(range(1, version + 1)) for version in range(6)]
    assert shared == [list(range(1, step + 1)) for step in range(1, 6)]


def test_nothing_is_generated_by_the_version_before_one_that_died_on_its_way(make_job, undisturbed):
    """The step is in the ledger, and its weights are not out: what they license waits for the next gang."""
    job = make_job()
    job.on("actor.export_weights", 4, lambda: job.kill("actor-0"))
    with job:
        came_to(job, undisturbed)
    assert job.reports_of("OperatorFailed") == []


def test_the_result_does_not_depend_on_how_many_rollouts_or_rewards_there_are(make_job, undisturbed):
    more = {name: {"entrypoint": f"{HERE}:{cls}", "total": 3} for name, cls in SERVERS.items()}
    with make_job(roles=more, device_per_node=16) as job:
        came_to(job, undisturbed)


SERVERS = {"rollout": "ToyRollout", "reward": "ToyReward", "reference": "ToyReference"}

# -- deaths at chosen moments -----------------------------------------------------------------------

ONE_DIES = [
    # what is called, on whom, for the how-manieth time
    ("rollout.load_weights", "rollout-0", 1),
    ("rollout.load_weights", "rollout-1", 3),
    ("rollout.generate", "rollout-0", 1),
    ("rollout.generate", "rollout-1", 7),
    ("rollout.evaluate", None, 2),
    ("reward.score", "reward-0", 1),
    ("reward.score", "reward-0", 9),
    ("reference.logprobs", "reference-0", 20),
    ("actor.warm_start", "actor-0", 1),
    ("actor.warm_start", "actor-1", 1),
    ("actor.begin", "actor-1", 1),
    ("actor.accumulate", "actor-0", 1),
    ("actor.accumulate", "actor-1", 4),
    ("actor.accumulate", "actor-0", 10),
    ("actor.apply", "actor-0", 1),
    ("actor.apply", "actor-1", 2),
    ("actor.apply", "actor-0", 3),
    ("actor.apply", "actor-1", 5),
    ("actor.export_weights", "actor-0", 1),
    ("actor.export_weights", "actor-0", 3),
    ("actor.export_weights", "actor-0", 6),
    ("actor.checkpoint", "actor-0", 1),
    ("actor.checkpoint", "actor-1", 2),
    ("actor.checkpoint", "actor-0", 4),
]


@pytest.mark.many_cases(quick=4)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("call", "vertex", "nth"), ONE_DIES)
def test_a_vertex_that_dies_in_a_call_leaves_no_trace(make_job, undisturbed, call, vertex, nth, when):
    job = make_job()
    victim = vertex or "rollout-0"
    job.on(call, nth, lambda: job.kill(victim), when=when, vertex=vertex)
    with job:
        came_to(job, undisturbed)
    assert job.killed == [victim], "the moment never came"


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("call", "vertex", "nth"), ONE_DIES[::3])
def test_a_trainer_that_dies_during_a_call_is_continued_by_the_next(
    make_job, undisturbed, call, vertex, nth, when
):
    job = make_job()
    job.on(call, nth, job.kill_trainer, when=when, vertex=vertex)
    with job:
        came_to(job, undisturbed)
    assert job.killed == ["trainer-0"], "the moment never came"


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "nth"),
    [
        ("StepCompleted", 1),
        ("StepCompleted", 2),
        ("StepCompleted", 5),
        ("WeightsPublished", 1),
        ("WeightsPublished", 3),
        ("CheckpointCommitted", 1),
        ("CheckpointCommitted", 2),
        ("CheckpointCommitted", 4),
        ("Evaluated", 2),
    ],
)
def test_a_trainer_that_dies_between_two_writes_is_continued_by_the_next(
    make_job, undisturbed, kind, nth, when
):
    """A step is reported right after the ledger has it, a checkpoint right after it is committed, weights right
    after they are shared."""
    job = make_job()
    job.on_report(kind, nth, job.kill_trainer, when=when)
    with job:
        came_to(job, undisturbed)
    assert job.killed == ["trainer-0"], "the moment never came"


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("victims", ["actor-0", "actor-1", "actor-0 actor-1", "actor-1 trainer-0"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("during", ["actor.restore", "actor.accumulate", "actor.apply"])
def test_a_second_death_during_restore_and_replay_is_survived(make_job, undisturbed, during, when, victims):
    """The first death is in step 4, after a checkpoint of step 2: step 3 has to be trained again."""
    job = make_job()

    def second() -> None:
        job.kill(*victims.split())

    job.on("actor.accumulate", 7, lambda: job.kill("actor-1"), vertex="actor-1")
    if during == "actor.restore":
        job.on(during, 2, second, when=when)
    else:
        job.on("actor.restore", 2, lambda: job.on(during, 1, second, when=when), when="after")
    with job:
        came_to(job, undisturbed)
    assert job.killed == ["actor-1", *victims.split()], "the second moment never came"


EVERYBODY = ("actor-0", "actor-1", "rollout-0", "rollout-1", "reward-0", "reference-0", "trainer-0")


@pytest.mark.parametrize("call", ["rollout.generate", "reward.score", "actor.accumulate", "actor.apply"])
def test_everybody_may_die_at_once(make_job, undisturbed, call):
    job = make_job()
    job.on(call, 6, lambda: job.kill(*EVERYBODY), when="after")
    with job:
        came_to(job, undisturbed)
    assert set(job.killed) == set(EVERYBODY), "the moment never came"


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("seed", range(10))
def test_deaths_at_random_moments_leave_no_trace(make_job, undisturbed, seed):
    dice = random.Random(seed)
    job = make_job()
    for _ in range(6):
        call, vertex, nth = dice.choice(ONE_DIES)
        victims = dice.sample(EVERYBODY, dice.choice([1, 1, 2, 3]))
        job.on(
            call, nth, lambda v=victims: job.kill(*v), when=dice.choice(["before", "after"]), vertex=vertex
        )
    with job:
        came_to(job, undisturbed)


def test_the_others_go_on_while_a_dead_rollout_is_not_replaced(make_job, undisturbed):
    job = make_job()
    job.on("rollout.generate", 3, lambda: job.kill("rollout-0", no_room=True), vertex="rollout-0")
    with job:
        came_to(job, undisturbed)
    assert job.vertex("rollout-0").host.incarnation == 1


def test_a_dead_gang_is_waited_for(make_job, undisturbed):
    job = make_job()
    killed = threading.Event()
    job.on("actor.apply", 3, lambda: (job.kill("actor-0", no_room=True), killed.set()), vertex="actor-0")
    with job:
        job.wait_for_report("StepCompleted", nth=2, timeout_s=DEADLINE_S)
        assert killed.wait(DEADLINE_S)
        with pytest.raises(TimeoutError):
            job.wait_for_report("StepCompleted", nth=3, timeout_s=0.3)
        job.make_room("actor-0")
        came_to(job, undisturbed)


@pytest.mark.parametrize(
    ("call", "vertex", "nth"),
    [("actor.apply", "actor-1", 2), ("rollout.generate", "rollout-0", 3), ("actor.checkpoint", "actor-0", 2)],
)
def test_a_vertex_that_hangs_is_replaced_by_whoever_watches_and_the_run_goes_on(
    make_job, undisturbed, call, vertex, nth
):
    job = make_job()
    hung = threading.Event()
    job.on(call, nth, lambda: (job.hang(vertex), hung.set()), vertex=vertex)
    with job:
        assert hung.wait(DEADLINE_S)
        with pytest.raises(TimeoutError):
            job.result(timeout_s=0.2)
        job.kill(vertex)
        came_to(job, undisturbed)


def test_a_due_checkpoint_that_a_death_prevented_is_written_by_the_next_gang(make_job, undisturbed):
    """Also the last one: the job is not over before its weights outlive it."""
    job = make_job()
    job.on("actor.checkpoint", 4, lambda: job.kill("actor-0"), vertex="actor-0")
    with job:
        came_to(job, undisturbed)
    steps = [report.body["step"] for report in job.reports_of("CheckpointCommitted")]
    assert steps == [0, 2, 4, 5]


def test_what_unfinished_checkpoints_left_on_disk_is_removed(make_job, undisturbed):
    job = make_job()
    job.on("actor.checkpoint", 2, job.kill_trainer, when="after", vertex="actor-0")
    with job:
        came_to(job, undisturbed)
    assert list((job.directory / "checkpoints").glob(".partial_*")) == []


# -- staleness --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 2])
def test_no_token_is_staler_than_permitted(make_job, bound):
    with make_job(max_staleness=bound, run={"steps": 8}) as job:
        job.result(timeout_s=DEADLINE_S)
    rows = steps_of(job)
    assert [row.step for row in rows] == list(range(1, 9))
    for row in rows:
        assert row.step - 1 - bound <= row.metrics["oldest"] <= row.metrics["newest"] <= row.step - 1
        assert row.metrics["staleness_max"] == row.step - 1 - row.metrics["oldest"]
    assert max(row.metrics["staleness_max"] for row in rows) == bound, "nothing ever ran ahead"
    assert job.account().trained_twice == ()


@pytest.mark.parametrize("seed", range(4))
def test_a_stale_run_stays_within_its_bound_whatever_dies(make_job, seed):
    dice = random.Random(seed)
    job = make_job(max_staleness=1 + seed % 2, run={"steps": 6})
    for _ in range(4):
        call, vertex, nth = dice.choice(ONE_DIES)
        victim = dice.choice(EVERYBODY)
        job.on(call, nth, lambda v=victim: job.kill(v), vertex=vertex)
    with job:
        job.result(timeout_s=DEADLINE_S)
    for row in steps_of(job):
        assert row.metrics["oldest"] >= row.step - 1 - job.spec.max_staleness
    account = job.account()
    assert (account.trained, account.lost, account.trained_twice) == (48, (), ())
    assert_never_back(job)


def test_a_load_that_fails_lets_no_old_weights_into_a_step(make_job, undisturbed):
    """The call behind the failed load is already on its way, and is answered by the older policy."""
    roles = {"rollout": {"entrypoint": f"{HERE}:StubbornRollout"}}
    with make_job(roles=roles) as job:
        came_to(job, undisturbed)
    told = [report.body["error"] for report in job.reports_of("OperatorFailed")]
    assert any("damaged" in text for text in told)


# -- failures that are told -------------------------------------------------------------------------


def raising(message: str):
    def action() -> None:
        raise ValueError(message)

    return action


def test_an_exception_in_a_reward_is_told_with_its_traceback_and_the_call_is_repeated(make_job, undisturbed):
    job = make_job()
    job.on("reward.score", 3, raising("no such answer"))
    with job:
        came_to(job, undisturbed)
    (told,) = job.reports_of("OperatorFailed")
    assert told.body["vertex"] == "reward-0"
    assert told.body["vertex_incarnation"] == 1
    assert told.body["operator"] == "reward.score"
    assert told.body["error"] == "ValueError: no such answer"
    assert told.body["user_code"] is True
    assert "raise ValueError(message)" in told.body["traceback"]


@pytest.mark.parametrize(
    ("role", "cls", "calls"), [("reward", "ForgetfulReward", "score"), ("actor", "BrokenApply", "apply")]
)
@pytest.mark.parametrize("window_s", [600, 0.001], ids=["quickly", "slowly"])
def test_a_call_that_fails_every_time_is_repeated_after_a_pause_and_fails_the_job(
    make_job, role, cls, calls, window_s
):
    """Two repetitions and a restart are granted to a user's own error, also where a failure takes longer than any
    window."""
    job = make_job(
        roles={role: {"entrypoint": f"{HERE}:{cls}"}},
        run={"groups_per_firing": 8},
        failover={
            "retry": {"max": 2, "window_s": window_s},
            "user_code": {"max": 1, "window_s": window_s},
        },
    )
    called: list[float] = []
    for nth in range(1, 50):
        job.on(f"{role}.{calls}", nth, lambda: called.append(time.monotonic()), vertex=f"{role}-0")
    with job, pytest.raises(UserCodeError):
        job.result(timeout_s=DEADLINE_S)
    attempts = [told.body["attempt"] for told in job.reports_of("OperatorFailed")]
    assert attempts[:4] == [1, 2, 3, 4]
    assert len(attempts) <= len(called) <= 5, (
        "one more may begin before the job has ended, and be heard or not"
    )
    assert called[1] - called[0] >= retries.RETRY_FIRST_S


def test_a_trainer_that_finds_other_data_trains_on_nothing(make_job, monkeypatch):
    monkeypatch.setattr(ToyData, "identity", "the data set a1", raising=False)
    job = make_job(failover=ONE_RESTART)
    job.on("actor.apply", 2, lambda: monkeypatch.setattr(ToyData, "identity", "the data set b2"))
    job.on("actor.apply", 2, job.kill_trainer)
    sentence = "from the data set a1; now they would come from the data set b2"
    with job, pytest.raises(JobFailed, match=sentence):
        job.result(timeout_s=DEADLINE_S)
    assert len(job.reports_of("TrainerFailed")) == 1
    assert len(steps_of(job)) <= 2


NOT_FINITE = {"actor": {"entrypoint": f"{HERE}:NotFiniteOnce"}}


@pytest.mark.parametrize("killed", [None, "actor-0", "trainer-0"])
def test_a_gradient_that_is_not_finite_skips_its_batch(make_job, killed):
    """Its groups are dropped, not trained and not lost, whoever dies after it."""
    job = make_job(roles=NOT_FINITE, run={"checkpoint_every": 10})  # so that ranks that die replay the step
    with job:
        if killed:
            job.wait_for_report("BatchSkipped", timeout_s=DEADLINE_S)
            job.kill(killed)
        result = job.result(timeout_s=DEADLINE_S)
        account = job.account()
    assert result["steps"] == job.spec.run.steps
    assert (account.drawn, account.trained, account.dropped, account.waiting) == (40, 32, 8, 0)
    assert (account.lost, account.trained_twice) == ((), ())
    [told] = job.reports_of("BatchSkipped")
    assert (told.body["step"], told.body["groups"], told.body["role"]) == (2, 8, "actor")
    assert told.body["error"] == "NotFinite: the gradient of step 2 has norm nan. Lower optim.lr."
    assert account.discarded == {"not_finite": told.body["tokens"]}
    assert job.reports_of("OperatorFailed") == []


@pytest.mark.parametrize("most", [0, 2])
def test_a_gradient_that_is_never_finite_ends_the_job(make_job, most):
    job = make_job(
        roles={"actor": {"entrypoint": f"{HERE}:NeverFinite"}}, failover={"not_finite": {"skip_batch": most}}
    )
    with job, pytest.raises(JobFailed, match=rf"NotFinite: the gradient of step {2 + most} has norm nan"):
        job.result(timeout_s=DEADLINE_S)
    assert len(job.reports_of("BatchSkipped")) == most
    # On a busy machine the step may be tried once more while its failure is being judged.
    assert {told.body["code"] for told in job.reports_of("OperatorFailed")} == {"actor.not_finite"}


@pytest.mark.parametrize("most", [2, 1])
def test_passes_that_do_not_fit_into_memory_are_halved(make_job, most):
    """As often as they may be; then the job has failed, with what was said."""
    job = make_job(
        roles={"actor": {"entrypoint": f"{HERE}:HungryActor"}},
        failover={
            "out_of_memory": {"smaller_passes": most},
            "retry": {"max": 0, "window_s": 60},
            "user_code": {"max": 2, "window_s": 60},
        },
    )
    with job:
        if most == 2:
            assert job.result(timeout_s=DEADLINE_S)["steps"] == job.spec.run.steps
        else:
            with pytest.raises(JobFailed, match=r"^toy_policy\.py:\d+: MemoryError: a pass does not fit"):
                job.result(timeout_s=DEADLINE_S)
    assert [told.body["pass_tokens"] for told in job.reports_of("PassesHalved")] == [2048, 1024][:most]
    assert {told.body["code"] for told in job.reports_of("OperatorFailed")} == {"out_of_memory"}


@pytest.mark.parametrize(
    ("actor", "sizes"), [("HungryActor", [(2048, False), (1024, False)]), ("SparingActor", [(4096, True)])]
)
@pytest.mark.parametrize("killed", [("actor-0",), ("trainer-0",), ("actor-0", "trainer-0")], ids="+".join)
def test_what_was_learned_of_passes_outlives_who_learned_it(make_job, undisturbed, killed, actor, sizes):
    """Ranks that come back train again what no checkpoint covers, and run out of memory no more."""
    job = make_job(
        roles={"actor": {"entrypoint": f"{HERE}:{actor}"}},
        run={"checkpoint_every": 10},
        failover={"retry": {"max": 0, "window_s": 60}, "user_code": {"max": 2, "window_s": 60}},
    )
    job.on_report("StepCompleted", 4, lambda: [job.kill(name) for name in killed])
    with job:
        came_to(job, undisturbed)
    halved = [told.body for told in job.reports_of("PassesHalved")]
    assert [(told["pass_tokens"], told.get("recompute", False)) for told in halved] == sizes
    assert [told.body["step"] for told in job.reports_of("GangRestored")][-1:] == [0], "it was restored"
    assert len(job.reports_of("OperatorFailed")) == len(sizes)


def test_a_reward_that_forgets_to_return_is_told_so(make_job):
    with make_job(roles={"reward": {"entrypoint": f"{HERE}:ForgetfulReward"}}) as job:
        told = job.wait_for_report("OperatorFailed", timeout_s=DEADLINE_S)
    assert told.body["user_code"] is True
    assert "ForgetfulReward.score (toy_policy.py:" in told.body["error"]
    assert "returned None, expected the list of groups" in told.body["error"]


def test_a_reward_that_sets_no_reward_is_blamed_itself_and_at_once(make_job):
    """Not the actor, which could not train on such samples and would be restarted for it."""
    with make_job(roles={"reward": {"entrypoint": f"{HERE}:BlindReward"}}) as job:
        told = job.wait_for_report("OperatorFailed", timeout_s=DEADLINE_S)
    assert (told.body["vertex"], told.body["user_code"]) == ("reward-0", True)
    assert re.fullmatch(  # whichever group is scored first
        r"tests\.workloads\.toy_policy:BlindReward\.score \(toy_policy\.py:\d+\) returned "
        r"no reward \(None\): set sample\.reward, a finite real number \(sample 0 of group \d+\)\.",
        told.body["error"],
    )
    assert job.account().trained == 0


def test_a_failing_export_is_told_and_waits_before_it_is_tried_again(make_job, undisturbed):
    """Of one rank of two: the other one lives and works."""
    job = make_job()
    job.on("actor.export_weights", 2, raising("no room"))
    with job:
        came_to(job, undisturbed)
    (told,) = job.reports_of("OperatorFailed")
    assert told.body["vertex"] == "actor-0"
    assert "no room" in told.body["error"]


def test_a_metric_that_is_not_a_number_does_not_end_the_run(make_job, undisturbed):
    with make_job(roles={"actor": {"entrypoint": f"{HERE}:NanActor", "total": 2}}) as job:
        came_to(job, undisturbed)
    assert all("loss" not in row.metrics and "reward_mean" in row.metrics for row in steps_of(job))


def test_prompts_that_bear_another_number_are_refused_by_name(make_job):
    with (
        make_job(roles={"trainer": {"entrypoint": f"{HERE}:OtherPrompts"}}) as job,
        pytest.raises(UserCodeError, match=r"prompt\(0\) gave a group with the id 1000"),
    ):
        job.result(timeout_s=DEADLINE_S)


def test_an_evaluation_line_cut_short_by_a_kill_is_made_again(make_job, undisturbed):
    job = make_job()
    (job.directory / "evaluations.jsonl").write_text('{"version": 0, "accuracy": 0.5, "count": 3}\n{"vers')
    with job:
        result = job.result(timeout_s=DEADLINE_S)
    assert result["accuracy_first"] == 0.5
    lines = (job.directory / "evaluations.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert [json.loads(line)["version"] for line in lines] == [0, 2, 4]


# -- pause, stop, fence -----------------------------------------------------------------------------


def test_stop_ends_with_a_checkpoint_of_the_last_whole_step_and_the_next_trainer_goes_on(make_job):
    job = make_job(run={"steps": 500, "checkpoint_every": 1000, "evaluate_every": 0})
    with job:
        job.wait_for_report("StepCompleted", nth=3, timeout_s=DEADLINE_S)
        job.stop()
        result = job.result(timeout_s=DEADLINE_S)
        (finished,) = job.reports_of("TrainerFinished")
    assert finished.body["stopped"] is True
    assert 3 <= result["steps"] < 500
    assert result["prompts_lost"] == 0
    last = job.reports_of("CheckpointCommitted")[-1]
    assert last.body["step"] == result["steps"]
    assert digests_of(job)[result["steps"]] == result["digest"]


def test_while_paused_nothing_new_is_called(make_job, undisturbed):
    job = make_job()
    job.on_report("StepCompleted", 2, job.pause)
    with job:
        job.wait_for_report("StepCompleted", nth=2, timeout_s=DEADLINE_S)
        with pytest.raises(TimeoutError):
            job.wait_for_report("StepCompleted", nth=3, timeout_s=0.5)
        calls: list[str] = []
        for call in ("rollout.generate", "reward.score", "actor.accumulate", "actor.apply"):
            job.on(call, 1, lambda name=call: calls.append(name))
        with pytest.raises(TimeoutError):
            job.result(timeout_s=0.5)
        assert calls == []
        job.resume()
        came_to(job, undisturbed)


def test_a_pause_outlives_the_trainer(make_job, undisturbed):
    job = make_job()
    job.on_report("StepCompleted", 2, job.pause)
    with job:
        job.wait_for_report("StepCompleted", nth=2, timeout_s=DEADLINE_S)
        job.kill_trainer()
        with pytest.raises(TimeoutError):
            job.wait_for_report("StepCompleted", nth=3, timeout_s=0.5)
        job.resume()
        came_to(job, undisturbed)


def test_a_trainer_fenced_by_a_newer_term_says_nothing_more(make_job):
    """Another one took the ledger over: this one stops without a result and without a failure."""
    from gyre.store import open_store

    job = make_job(run={"steps": 500, "evaluate_every": 0})

    def usurp() -> None:
        with open_store(job.store_url) as store:
            store.ledger(job.job_id).take_over(term=99)

    job.on("actor.apply", 6, usurp, when="after")
    with job:
        host = job.vertex("trainer-0").host
        job.wait_for_report("StepCompleted", nth=2, timeout_s=DEADLINE_S)
        assert host.join_fit(DEADLINE_S)
        with pytest.raises(TimeoutError):
            job.result(timeout_s=0.3)
        steps = len(digests_of(job))
    assert [report.body["step"] for report in job.reports_of("StepCompleted")] == list(range(1, steps + 1))
    assert job.reports_of("TrainerFailed") == []
    assert job.reports_of("TrainerFinished") == []


def test_a_trainer_whose_vertices_obey_a_newer_term_says_nothing_more(make_job):
    job = make_job(run={"steps": 500, "evaluate_every": 0})
    usurped = threading.Event()

    def usurp() -> None:
        job.vertex("reward-0").host.call(99, "health")
        usurped.set()

    job.on("reward.score", 9, usurp, when="after")
    with job:
        assert usurped.wait(DEADLINE_S)
        assert job.vertex("trainer-0").host.join_fit(DEADLINE_S)
    assert job.reports_of("TrainerFailed") == []
    assert job.reports_of("OperatorFailed") == []


def test_the_trainer_never_stands_still_through_the_fault_of_others(make_job):
    """A gang that takes long to start must not make the trainer look stuck."""
    job = make_job()
    job.on("actor.warm_start", 1, lambda: job.hang("actor-1"), vertex="actor-1")
    with job:
        deadline = time.monotonic() + DEADLINE_S
        host = job.vertex("trainer-0").host
        while job.vertex("actor-0").host.watch(1, 0, 0.0).busy != "warm_start":
            assert time.monotonic() < deadline
        assert host.watch(1, 0, 0.05).busy == ""
        job.wake("actor-1")
        job.result(timeout_s=DEADLINE_S)


def test_a_job_whose_setup_raises_says_whose_fault_it_is(make_job):
    job = make_job(failover=ONE_RESTART, run={"data": "tests.workloads.toy_policy:NoSuchData"})
    with pytest.raises(JobFailed, match=r"^AttributeError.*NoSuchData.* \(trainer-0: start_failed"):
        job.start()
