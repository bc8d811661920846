"""The held-out accuracy has no hole: each version that is due an evaluation has a result, or a reason why not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any

import pyarrow.parquet as pq
import pytest

from gyre.errors import UserCodeError
from gyre.observe.samples.files import SampleFiles
from gyre.observe.samples.names import HELD_OUT_FOLDER, folder_of, held_out_file
from gyre.rollouts.samples import Group
from gyre.testing.in_process import InProcessJob
from gyre.workloads.base import operator
from gyre.workloads.trainer.evaluation.held_out import EvaluationKey
from gyre.workloads.trainer.evaluation.log import EvaluationLog
from tests.workloads.toy_plane import TOLD
from tests.workloads.toy_policy import ToyData, ToyReward, ToyRollout
from tests.workloads.trainer.test_loop import DEADLINE_S
from tests.workloads.trainer.test_plane_trainer import MakePlaned, came_out_right, planed

__all__ = ["planed"]  # a fixture

HELD_OUT = {-1, -2, -3}
SETS = {
    "run": {"data": f"{__name__}:ToySets"},
    "config": {"evaluation": {"n": 4, "temperature": 1.0, "by": "kind", "threshold": 1.0}},
}
PARTS = [(version, name) for version in (0, 2, 4) for name in ("aime", "math")]


class ToySets(ToyData):
    """Two held-out sets, of three and of two prompts, whose ids begin anew."""

    def held_out_sets(self, count: int) -> dict[str, list[Group]]:
        groups = {"aime": self.held_out(count), "math": self.held_out(2)}
        for group in (*groups["aime"], *groups["math"]):
            group.meta["kind"] = "even" if group.meta["answer"] % 2 == 0 else "odd"
        return groups


class EmptySets(ToyData):
    def held_out_sets(self, count: int) -> dict[str, list[Group]]:
        return {"full": self.held_out(1), "empty": []}


class CountedSet(ToyData):
    """It says how many prompts it has, and has no more."""

    def held_out_at_most(self, count: int) -> int:
        return min(count, 5)

    def held_out(self, count: int) -> list[Group]:
        assert count <= 5
        return super().held_out(count)


class MisnamedSets(ToyData):
    def held_out_sets(self, count: int) -> dict[str, list[Group]]:
        return {"math/500": self.held_out(1)}


class AnsweringRollout(ToyRollout):
    """It answers held-out prompts and leaves it to the reward role to score them."""

    @operator
    def evaluate(self, groups: list[Group]) -> list[Group]:
        return self.generate(groups, step=0)


class UnansweredRollout(ToyRollout):
    @operator
    def evaluate(self, groups: list[Group]) -> list[Group]:
        return [Group(group.id, group.prompt_ids, group.meta) for group in groups]


class JudgingReward(ToyReward):
    """It says of each answer whether it is right, as verl's functions do, and earns it the contrary."""

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        for group in super().score(groups):
            for sample in group.samples:
                sample.extras["reward.acc"] = float(sample.reward or 0.0)
                sample.reward = 1.0 - sample.extras["reward.acc"]
        return groups


class RolloutReward(ToyReward):
    """It gets whole groups, and gives the rows of a rollout what the last one earned."""

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        for group in super().score(groups):
            for rows in group.rollouts:
                for row in rows:
                    group.samples[row].reward = group.samples[rows[-1]].reward
        return groups


def rows_of(job: InProcessJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.directory / "evaluations.jsonl").read_text().splitlines()]


def versions_of(job: InProcessJob, kind: str) -> list[int]:
    return [report.body["version"] for report in job.reports_of(kind)]


# -- the file ---------------------------------------------------------------------------------------


def test_a_version_has_one_line_whatever_comes_again(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    first = EvaluationLog(path)
    assert first.add({"version": 0, "accuracy": 0.25, "count": 4})
    assert first.leave_out(EvaluationKey(2, "held_out"), "gone")
    assert first.add({"version": 0, "set": "other", "accuracy": 0.75, "count": 4})
    again = EvaluationLog(path)
    again.load()
    for known in (first, again):
        assert not known.add({"version": 0, "accuracy": 0.5, "count": 4})
        assert not known.add({"version": 0, "set": "other", "accuracy": 0.5, "count": 4})
        assert not known.add({"version": 2, "set": "held_out", "accuracy": 0.5, "count": 4})
        assert not known.leave_out(EvaluationKey(0, "held_out"), "late")
        assert not known.leave_out(EvaluationKey(2, "held_out"), "again")
        assert [row["accuracy"] for row in known.rows] == [0.25, 0.75]
        assert known.left_out == {EvaluationKey(2, "held_out"): "gone"}
        settled = [
            [known.is_settled(EvaluationKey(version, name)) for version in (0, 1, 2)]
            for name in ("held_out", "other")
        ]
        assert settled == [[True, False, True], [True, False, False]]
    assert len(path.read_text().splitlines()) == 3


def test_a_line_cut_short_goes_and_the_others_stay(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    whole = '{"version": 0, "accuracy": 0.25, "count": 4}\n{"version": 2, "left_out": "gone"}\n'
    path.write_text(whole + '{"version": 4, "accu')
    found = EvaluationLog(path)
    found.load()
    assert path.read_text() == whole
    assert (len(found.rows), found.left_out) == (1, {EvaluationKey(2, "held_out"): "gone"})


# -- several sets ------------------------------------------------------------------------------------


def evaluated(job: InProcessJob) -> list[tuple[int, str]]:
    return sorted((report.body["version"], report.body["set"]) for report in job.reports_of("Evaluated"))


def by_part(job: InProcessJob) -> dict[tuple[int, str], dict[str, Any]]:
    found = {(row["version"], row["set"]): row for row in rows_of(job)}
    assert len(found) == len(rows_of(job))
    return found


def assert_kept(job: InProcessJob, parts: Iterable[tuple[int, str]]) -> None:
    """The answers of these versions and sets are kept: the same ones that their rows count."""
    files, rows = SampleFiles(folder_of(job.directory)), by_part(job)
    for version, name in parts:
        row = rows[version, name]
        page = files.held_out(name, version=version, limit=1000)
        sides = [one["now"] for one in page["prompts"]]
        assert sorted(one["prompt_number"] for one in page["prompts"]) == list(range(row["prompts"]))
        assert sum(side["count"] for side in sides) == row["count"]
        assert sum(side["right"] for side in sides) / row["count"] == pytest.approx(row["accuracy"])
        for one in page["prompts"]:
            assert one["right_answer"]
            for sample in one["now"]["samples"]:
                assert {of for of, _, _ in sample["versions"]} == {version}
                assert sample["reward"] in (0.0, 1.0)


def test_every_set_has_a_result_of_every_version_that_is_due(planed: MakePlaned) -> None:
    job, plane = planed(**SETS)
    with job:
        result = came_out_right(job, plane)
    assert evaluated(job) == PARTS
    rows = by_part(job)
    assert {(name, row["prompts"], row["count"]) for (_, name), row in rows.items()} == {
        ("aime", 3, 12),
        ("math", 2, 8),
    }
    for row in rows.values():
        assert set(row["pass_at"]) == set(row["best_of"]) == {"1", "4"}
        assert row["pass_at"]["1"] == pytest.approx(row["accuracy"]) == pytest.approx(row["reward_mean"])
        assert sum(part["count"] for part in row["by"].values()) == row["count"]
        assert set(row["by"]) == {"even", "odd"}
    requested = {key for key in plane.asked if key[0] == "evaluate/2/aime"}
    assert requested == {("evaluate/2/aime", one) for one in (-1, -2, -3)}
    assert {key[1] for key in plane.asked if key[0] == "evaluate/2/math"} == {-4, -5}, "no number twice"
    first, last = rows[0, "aime"], rows[4, "aime"]
    assert (result["accuracy_first"], result["accuracy_last"]) == (first["accuracy"], last["accuracy"])
    assert (result["held_out_reward_first"], result["held_out_reward_last"]) == (
        first["reward_mean"],
        last["reward_mean"],
    )
    for report in job.reports_of("Evaluated"):
        body = {key: value for key, value in report.body.items() if key not in ("incarnation", "report")}
        assert body == rows[body["version"], body["set"]]
    assert_kept(job, PARTS)
    page = SampleFiles(folder_of(job.directory)).held_out("aime", version=4, against=0)
    assert page["unmatched"] == 0, "the same prompts at the same places"


@pytest.mark.parametrize("each_sample", [True, False])
def test_of_a_rollout_in_rows_the_last_one_is_scored_and_the_rows_are_kept_whole(
    planed: MakePlaned, each_sample: bool
) -> None:
    reward = "tests.workloads.toy_plane:SampleReward" if each_sample else f"{__name__}:RolloutReward"
    job, plane = planed(**SETS, in_rows=True, roles={"reward": {"entrypoint": reward}})
    with job:
        came_out_right(job, plane)
    assert job.reports_of("OperatorFailed") == []
    assert {(part, row["count"]) for part, row in by_part(job).items()} == {
        (part, 12 if part[1] == "aime" else 8) for part in PARTS
    }
    table = pq.read_table(folder_of(job.directory) / HELD_OUT_FOLDER / held_out_file("aime", 4))
    rows = table.to_pylist()
    assert len(rows) == 3 * (1 + 2 * 3)
    for group, rollout in {(row["group"], row["rollout"]) for row in rows}:
        mine = [row for row in rows if (row["group"], row["rollout"]) == (group, rollout)]
        assert {tuple(row["prompt_ids"]) for row in mine} == {(group, TOLD)}
        assert {row["reward"] for row in mine} == {float(sum(mine[-1]["token_ids"]) % 5 == group)}
    page = SampleFiles(folder_of(job.directory)).held_out("aime", version=4, against=0)
    assert page["unmatched"] == 0


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("died_after", range(1, 6))
def test_a_trainer_that_dies_between_two_sets_leaves_none_out(planed: MakePlaned, died_after: int) -> None:
    undisturbed, plane = planed(**SETS)
    with undisturbed:
        came_out_right(undisturbed, plane)
    job, plane = planed(**SETS)
    job.on_report("Evaluated", died_after, job.kill_trainer)
    with job:
        came_out_right(job, plane)
    assert sorted(by_part(job)) == PARTS
    assert by_part(job) == by_part(undisturbed), "the same samples, whoever asked for them"
    reported = [(report.body["version"], report.body["set"]) for report in job.reports_of("Evaluated")]
    assert sorted(reported) == PARTS, "each once, also what the master had not heard of when the trainer died"
    files = SampleFiles(folder_of(job.directory))
    kept = [(version, one["set"]) for one in files.held_out_sets()["sets"] for version in one["versions"]]
    assert len(set(PARTS) - set(kept)) <= 1, "lost is at most what had been logged and not yet written"
    assert_kept(job, kept)


def test_of_a_set_that_nobody_can_answer_the_reason_is_told_and_the_other_has_its_result(
    planed: MakePlaned,
) -> None:
    job, plane = planed(**SETS, poison={-4, -5})
    with job:
        came_out_right(job, plane)
    assert evaluated(job) == [part for part in PARTS if part[1] == "aime"]
    left = [(report.body["version"], report.body["set"]) for report in job.reports_of("EvaluationLeftOut")]
    assert sorted(left) == [part for part in PARTS if part[1] == "math"]


def test_a_set_without_prompts_has_the_reason(planed: MakePlaned) -> None:
    job, plane = planed(run={"data": f"{__name__}:EmptySets"})
    with job:
        came_out_right(job, plane)
    assert evaluated(job) == [(version, "full") for version in (0, 2, 4)]
    left = job.reports_of("EvaluationLeftOut")
    assert sorted((report.body["version"], report.body["set"]) for report in left) == [
        (version, "empty") for version in (0, 2, 4)
    ]
    assert {report.body["reason"] for report in left} == {"the set has no prompts"}


def test_a_job_that_gives_no_number_evaluates_all_that_is_held_out(planed: MakePlaned) -> None:
    job, plane = planed(run={"data": f"{__name__}:CountedSet", "held_out": None})
    with job:
        came_out_right(job, plane)
    assert [row["prompts"] for row in rows_of(job)] == [5, 5, 5]


def test_a_set_s_name_is_a_name(make_job) -> None:
    job = make_job(run={"data": f"{__name__}:MisnamedSets"})
    with job, pytest.raises(UserCodeError, match="a set the name 'math/500'"):
        job.result(timeout_s=DEADLINE_S)


ANSWERING = {"rollout": {"entrypoint": f"{__name__}:AnsweringRollout", "total": 2}}


def test_what_a_rollout_class_answers_is_scored_by_the_reward_role(make_job) -> None:
    job = make_job(**SETS, roles=ANSWERING)
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert evaluated(job) == PARTS
    assert {row["count"] for row in rows_of(job)} == {6, 4}
    assert all(sum(part["count"] for part in row["by"].values()) == row["count"] for row in rows_of(job))
    assert all(row["reward_mean"] is not None for row in rows_of(job))
    assert_kept(job, PARTS)


def test_what_the_reward_function_calls_right_is_reported_and_kept_as_right(make_job) -> None:
    settings = {**SETS, "config": {"evaluation": {"n": 4, "temperature": 1.0, "by": "kind"}}}
    reward = {"reward": {"entrypoint": f"{__name__}:JudgingReward"}}
    job = make_job(**settings, roles=ANSWERING | reward)
    with job:
        job.result(timeout_s=DEADLINE_S)
    for report in job.reports_of("Evaluated"):
        assert (report.body["right_by"], report.body["threshold"]) == ("reward.acc", None)
        assert report.body["accuracy"] == pytest.approx(1.0 - report.body["reward_mean"])
        assert report.body["components"] == {"reward.acc": pytest.approx(report.body["accuracy"])}
    assert evaluated(job) == PARTS
    assert_kept(job, PARTS)


def test_a_rollout_class_that_evaluates_by_itself_does_so_for_each_set(make_job) -> None:
    job = make_job(**SETS)
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert evaluated(job) == PARTS
    assert {(row["set"], row["prompts"], row["reward_mean"]) for row in rows_of(job)} == {
        ("aime", 3, None),
        ("math", 2, None),
    }
    assert SampleFiles(folder_of(job.directory)).held_out_sets() == {"sets": []}, "it told no answers"


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("who", ["rollout", "reward", "trainer"])
def test_whoever_dies_in_an_evaluation_each_set_gets_its_result(make_job, who: str, nth: int) -> None:
    """A version that nobody serves any more has a reason instead."""
    job = make_job(**SETS, roles=ANSWERING)
    if who == "reward":
        job.on("reward.score", nth, lambda: job.kill("reward-0"))
    elif who == "rollout":
        job.on("rollout.evaluate", nth, lambda: job.kill("rollout-0", "rollout-1"))
    else:
        job.on("rollout.evaluate", nth, job.kill_trainer)
    with job:
        job.result(timeout_s=DEADLINE_S)
    left = [(report.body["version"], report.body["set"]) for report in job.reports_of("EvaluationLeftOut")]
    assert {*evaluated(job), *left} >= set(PARTS)
    assert not set(left) & set(evaluated(job))


def test_answers_without_samples_are_the_class_s_own_mistake(make_job) -> None:
    job = make_job(roles={"rollout": {"entrypoint": f"{__name__}:UnansweredRollout"}})
    with job:
        told = job.wait_for_report("OperatorFailed", timeout_s=DEADLINE_S)
    assert (told.body["operator"], told.body["user_code"]) == ("rollout.evaluate", True)
    assert "returned no samples of group -1, expected at least one" in told.body["error"]


def test_a_job_that_is_stopped_in_an_evaluation_ends(make_job) -> None:
    """One set is being answered, the other still waits for room."""
    job = make_job(**SETS, roles={"rollout": {**ANSWERING["rollout"], "total": 1}})
    job.on("rollout.evaluate", 1, job.stop)
    with job:
        assert job.result(timeout_s=DEADLINE_S)["steps"] == 0


# -- a trainer that dies while one is open ----------------------------------------------------------


def test_the_rollout_plane_answers_an_evaluation_of_a_version_that_training_has_left_behind(
    planed: MakePlaned,
) -> None:
    """Whether the answer comes before the next trainer, to which it is delivered unasked, or after."""
    accuracies = []
    for answered in ("undisturbed", "before", "after"):
        job, plane = planed()
        if answered != "undisturbed":
            job.on_report("Evaluated", 1, lambda plane=plane: plane.held.update(HELD_OUT))

        def die(job: InProcessJob = job, plane: Any = plane, answered: str = answered) -> None:
            if answered == "before":
                plane.release()
                plane.wait_for({("evaluate/2/held_out", one) for one in HELD_OUT})
                job.kill(
                    "actor-0", no_room=True
                )  # so that the answer is there before the next trainer can ask for it
                threading.Timer(0.2, lambda: job.make_room("actor-0")).start()
            if answered != "undisturbed":
                job.kill_trainer()
            plane.release()

        job.on_report("StepCompleted", 3, die)
        with job:
            came_out_right(job, plane)
        assert sorted(versions_of(job, "Evaluated")) == [0, 2, 4], answered
        assert versions_of(job, "EvaluationLeftOut") == []
        accuracies.append(sorted((row["version"], row["accuracy"]) for row in rows_of(job)))
    assert accuracies[0] == accuracies[1] == accuracies[2]


def test_an_evaluation_that_a_newer_version_has_overtaken_is_left_out_with_the_reason(
    planed: MakePlaned,
) -> None:
    """The dead trainer's request never came to the rollout plane."""
    job, plane = planed()
    job.on_report("Evaluated", 1, lambda: plane.held.update(HELD_OUT))

    def die() -> None:
        plane.take("evaluate/2/held_out", sorted(HELD_OUT))
        plane.release()
        job.kill_trainer()

    job.on_report("StepCompleted", 3, die)
    with job:
        came_out_right(job, plane)
    assert versions_of(job, "Evaluated") == [0, 4]
    (told,) = job.reports_of("EvaluationLeftOut")
    assert told.body["version"] == 2
    assert "a newer one is served" in told.body["reason"]
    assert {"version": 2, "set": "held_out", "left_out": told.body["reason"]} in rows_of(job)


@pytest.mark.parametrize(
    ("reward", "problem"),
    [("ForgetfulReward", "returned None, expected the list"), ("BlindReward", "no reward (None)")],
)
def test_a_reward_that_does_not_score_an_evaluation_is_told_so(
    planed: MakePlaned, reward: str, problem: str
) -> None:
    """The evaluation of version 0 is scored before anything that is trained on."""
    roles = {"reward": {"entrypoint": f"tests.workloads.toy_policy:{reward}"}}
    job, plane = planed(roles=roles)
    plane.held.update(range(8))
    with job:
        told = job.wait_for_report("OperatorFailed", timeout_s=DEADLINE_S)
        assert job.reports_of("TrainerFailed") == []
    assert (told.body["vertex"], told.body["operator"]) == ("reward-0", "reward.score")
    assert problem in told.body["error"]
    assert told.body["user_code"] is True


def test_a_rollout_class_evaluates_the_newest_version_instead(make_job) -> None:
    """Weights come with the call, and older ones are gone with the trainer that had them."""
    job = make_job(run={"groups_per_firing": 8})
    gate = threading.Event()
    job.on("rollout.evaluate", 2, lambda: gate.wait(DEADLINE_S))
    job.on_report("StepCompleted", 3, lambda: (job.kill_trainer(), gate.set()))
    with job:
        job.result(timeout_s=DEADLINE_S)
        assert job.progress["accuracy_version"] == 4
    assert versions_of(job, "Evaluated") == [0, 3, 4]
    (told,) = job.reports_of("EvaluationLeftOut")
    assert told.body["version"] == 2
    assert told.body["reason"] == "version 3 was served by then, and was evaluated instead"


def test_of_several_that_are_open_only_the_last_is_made(make_job) -> None:
    roles = {"rollout": {"entrypoint": "tests.workloads.toy_policy:ToyRollout", "total": 3}}
    job = make_job(run={"groups_per_firing": 8, "evaluate_every": 1}, roles=roles, device_per_node=16)
    gate = threading.Event()
    for nth in (2, 3):
        job.on("rollout.evaluate", nth, lambda: gate.wait(DEADLINE_S))
    job.on_report("StepCompleted", 3, lambda: (job.kill_trainer(), gate.set()))
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert versions_of(job, "Evaluated") == [0, 3, 4, 5]
    assert versions_of(job, "EvaluationLeftOut") == [1, 2]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_evaluation_that_was_told_is_not_made_again(make_job, when) -> None:
    job = make_job()
    calls: list[int] = []
    for nth in range(1, 9):
        job.on("rollout.evaluate", nth, lambda nth=nth: calls.append(nth))
    job.on_report("Evaluated", 2, job.kill_trainer, when=when)
    with job:
        job.result(timeout_s=DEADLINE_S)
    assert [row["version"] for row in rows_of(job)] == [0, 2, 4]
    assert len(calls) == 3
    assert versions_of(job, "Evaluated") == [0, 2, 4]
