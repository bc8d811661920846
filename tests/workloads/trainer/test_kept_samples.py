"""What a job keeps of its samples is what it trained: token for token, log-prob bit for bit, whoever dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gyre.observe.samples.files import SampleFiles
from gyre.observe.samples.names import folder_of
from gyre.observe.samples.query import SampleFilter
from gyre.rollouts.samples import Group, unpack_groups
from gyre.testing.in_process import InProcessJob
from tests.waits import GENEROUS_S


def files_of(job: InProcessJob) -> SampleFiles:
    return SampleFiles(folder_of(job.directory))


def kept_of(job: InProcessJob) -> dict[int, list[dict[str, Any]]]:
    """By step, every sample whole."""
    files, found = files_of(job), {}
    for row in files.steps()["steps"]:
        page = files.find(SampleFilter(step=row["step"]), limit=1000)["samples"]
        found[row["step"]] = [files.sample(one["step"], one["group"], one["sample"]) for one in page]
    assert files.problems == {}
    return found


class Watched:
    """The groups that the actor's ranks were given, by step; those of the ledger are gone once a checkpoint covers
    them."""

    def __init__(self, job: InProcessJob) -> None:
        self.groups: dict[int, dict[int, Group]] = {}
        self._job = job
        for nth in range(1, 6):
            job.on_report("StepCompleted", nth, self._look, when="before")

    def _look(self) -> None:
        with self._job.ledger() as ledger:
            for row in ledger.load().groups:
                if row.status == "trained" and row.payload:
                    (group,) = unpack_groups(row.payload)
                    self.groups.setdefault(row.step or 0, {})[group.id] = group


def assert_as_trained(kept: list[dict[str, Any]], groups: dict[int, Group]) -> None:
    assert {(one["group"], one["sample"]) for one in kept} == {
        (group.id, index) for group in groups.values() for index in range(len(group.samples))
    }
    for one in kept:
        group = groups[one["group"]]
        sample = group.samples[one["sample"]]
        assert one["prompt_ids"] == group.prompt_ids.tolist()
        assert one["token_ids"] == sample.token_ids.tolist()
        assert np.array(one["logprobs"], np.float32).tobytes() == sample.logprobs.tobytes()
        assert one["versions"] == [[run.version, run.start, run.end] for run in sample.versions]
        assert one["reward"] == sample.reward
        assert one["finish_reason"] == sample.finish_reason
        assert one["meta"] == group.meta
        assert one["outcome"] == "trained"


def test_what_is_kept_is_what_was_trained(make_job) -> None:
    job = make_job()
    watched = Watched(job)
    with job:
        job.result(timeout_s=GENEROUS_S)
    kept = kept_of(job)
    assert list(kept) == list(watched.groups) == [1, 2, 3, 4, 5]
    for step, samples in kept.items():
        assert_as_trained(samples, watched.groups[step])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_trainer_that_dies_with_a_step_in_the_ledger_leaves_no_hole(make_job, when: str) -> None:
    job = make_job()
    watched = Watched(job)
    job.on_report("StepCompleted", 3, job.kill_trainer, when=when)
    with job:
        job.result(timeout_s=GENEROUS_S)
    kept = kept_of(job)
    assert list(kept) == [1, 2, 3, 4, 5]
    for step, groups in watched.groups.items():
        assert_as_trained(kept[step], groups)


def test_only_as_many_steps_and_groups_are_kept_as_the_job_wants(make_job) -> None:
    with make_job(observe={"samples": {"every": 2, "groups": 3}}) as job:
        job.result(timeout_s=GENEROUS_S)
    rows = files_of(job).steps()["steps"]
    assert [(row["step"], row["groups"], row["samples"]) for row in rows] == [(1, 3, 6), (2, 3, 6), (4, 3, 6)]


def test_a_job_that_keeps_none_makes_no_folder(make_job) -> None:
    with make_job(observe={"samples": {"every": 0}}) as job:
        job.result(timeout_s=GENEROUS_S)
    assert not folder_of(job.directory).exists()
