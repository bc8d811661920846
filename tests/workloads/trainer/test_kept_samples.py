"""What a job keeps of its samples is what it trained: token for token, log-prob bit for bit, whoever dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gyre.config.sections import LossSettings, read_section
from gyre.observe.samples.files import SampleFiles
from gyre.observe.samples.names import folder_of
from gyre.observe.samples.query import SampleFilter
from gyre.observe.samples.writer import SampleWriter
from gyre.rollouts.samples import Group, unpack_groups
from gyre.testing.in_process import InProcessJob
from gyre.workloads.algorithms.advantages import advantages_of
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

    def __init__(self, job: InProcessJob, steps: int = 5) -> None:
        self.groups: dict[int, dict[int, Group]] = {}
        self._job = job
        for nth in range(1, steps + 1):
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


def test_a_trainer_that_dies_between_the_ledger_and_the_samples_leaves_no_hole(
    make_job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    watched = Watched(job)
    handed_over, died = SampleWriter.step_recorded, []

    def hand_over(self: SampleWriter, step: int, *more: Any, **options: Any) -> None:
        if step == 3 and not died:
            died.append(step)
            job.kill_trainer()
        else:
            handed_over(self, step, *more, **options)

    monkeypatch.setattr(SampleWriter, "step_recorded", hand_over)
    with job:
        job.result(timeout_s=GENEROUS_S)
    kept = kept_of(job)
    assert died
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


def test_of_gyre_s_own_roles_texts_advantages_and_both_log_probs_are_kept(make_job) -> None:
    spec = {
        "name": "small",
        "recipe": "grpo",
        "roles": {"actor": {}, "rollout": {}, "reward": {}},
        "config": {
            "seed": 3,
            "model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16, "max_positions": 32},
            "task": {"digits": 1},
            "warm_start": {"batch": 32, "lr": 3e-3, "max_steps": 60},
            "sampling": {"n": 4, "max_new_tokens": 3},
            "optim": {"lr": 1e-3},
        },
        "run": {
            "steps": 2,
            "prompts_per_step": 8,
            "groups_per_firing": 4,
            "groups_per_micro_batch": 4,
            "evaluate_every": 0,
        },
    }
    job = make_job(spec)
    watched = Watched(job, 2)
    with job:
        job.result(timeout_s=GENEROUS_S)
    settings = read_section(LossSettings, spec["config"], "loss")
    with_gradient = 0
    for step, samples in kept_of(job).items():
        assert_as_trained(samples, watched.groups[step])
        for one in samples:
            group = watched.groups[step][one["group"]]
            assert one["advantage"] == float(advantages_of([group], settings)[one["sample"]][0])
            assert one["prompt"].endswith("=")
            assert "".join(one["prompt_pieces"]) == f"<bos>{one['prompt']}"
            assert "".join(piece for piece in one["pieces"] if len(piece) == 1) == one["answer"]
            assert one["instances"] == [["rollout-0", 0, one["tokens"]]]
            if one["advantage"]:
                with_gradient += 1
                assert one["trainer_logprobs"] == pytest.approx(one["logprobs"], abs=1e-4)
            else:
                assert one["trainer_logprobs"] is None, "no gradient, so no pass through the model"
    assert with_gradient


def test_stale_groups_and_those_without_gradient_are_kept_with_the_reason(make_job) -> None:
    """See `tests.workloads.trainer.test_streaming`."""
    with make_job(
        run={"micro_batches": "streamed", "dynamic_sampling": 20, "steps": 3, "prompts_per_step": 4},
        staleness={"policy": "wait"},
        max_staleness=1,
    ) as job:
        job.result(timeout_s=GENEROUS_S)
    replaced = {
        report.body["group"]
        for report in job.reports_of("GroupReplaced")
        if report.body["reason"] == "no_gradient"
    }
    assert replaced
    found = files_of(job).find(SampleFilter(outcome="no_gradient"), limit=1000)["samples"]
    last = max(row["step"] for row in files_of(job).steps()["steps"])
    assert {one["group"] for one in found} <= replaced
    assert {one["group"] for one in found} >= {group for group in replaced if group < 4 * last}
    for one in found:
        whole = files_of(job).sample(one["step"], one["group"], one["sample"])
        assert "all of its samples earned the same" in whole["meta"]["evidence"]
