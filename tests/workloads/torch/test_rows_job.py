"""A job whose rollouts have several turns, in rows with tokens that nobody drew: PPO with critic and reference,
whatever dies; and what is kept of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gyre.observe.samples.files import SampleFiles
from gyre.observe.samples.names import folder_of
from gyre.observe.samples.query import SampleFilter
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.testing.in_process import InProcessJob
from gyre.workloads.torch.rollout import TorchRollout
from tests.workloads.conftest import digests_of, steps_of
from tests.workloads.torch.test_ppo import PPO_LOSS, RUN, TINY

pytestmark = pytest.mark.landing

TOLD = 4
"""The token of what a tool tells."""


class Turns(TorchRollout):
    """An answer's first token is a turn, which a tool answers; the rest is another. Of every other rollout the second
    turn is a row of its own, which goes on after the first turn alone."""

    def generate(self, groups: list[Group], *, step: int) -> list[Group]:
        return [
            replace(group, samples=[row for at, one in enumerate(group.samples) for row in rows_of(at, one)])
            for group in super().generate(groups, step=step)
        ]


def rows_of(rollout: int, answer: Sample) -> list[Sample]:
    cuts = [slice(0, 1), slice(1, None)] if rollout % 2 and len(answer.token_ids) > 1 else [slice(None)]
    rows = []
    for cut in cuts:
        before = np.zeros(cut.start or 0, np.bool_)
        tokens = np.concatenate([answer.token_ids[: len(before)], [TOLD], answer.token_ids[cut]])
        mask = np.concatenate([before, [False], np.ones(len(answer.token_ids[cut]), np.bool_)])
        logprobs = np.zeros(len(mask), np.float32)
        logprobs[mask] = answer.logprobs[cut]
        run = VersionRun(answer.versions[0].version, 0, len(mask))
        rows.append(
            Sample(
                tokens.astype(np.int32), logprobs, (run,), answer.finish_reason, mask=mask, rollout=rollout
            )
        )
    return rows


class DrawnSum:
    """Differs between rollouts even of an untrained model, and not between their rows."""

    def score(self, groups: list[Any]) -> list[Any]:
        for group in groups:
            for rows in group.rollouts:
                last = group.samples[rows[-1]].token_ids
                for row in rows:
                    group.samples[row].reward = float(last.sum() % 5) / 4
        return groups


SPEC: dict[str, Any] = {
    "name": "rows",
    "recipe": "ppo",
    "roles": {
        "actor": {"total": 1},
        "rollout": {"entrypoint": f"{__name__}:Turns"},
        "reward": {"entrypoint": f"{__name__}:DrawnSum"},
        "critic": {},
        "reference": {},
    },
    "run": {**RUN, "steps": 3},
    "config": TINY | {"loss": {**PPO_LOSS, "loss_agg_mode": "seq-mean-token-mean"}},
}


@pytest.fixture(scope="module")
def undisturbed(empty_store: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("rows")
    shutil.copy(empty_store, folder / "gyre.db")
    with InProcessJob(SPEC, folder) as job:
        job.result(timeout_s=60)
    return job


def test_a_job_trains_what_was_drawn_and_keeps_the_rest_beside_it(undisturbed: Any) -> None:
    n, prompts = TINY["sampling"]["n"], RUN["prompts_per_step"]
    account = undisturbed.account()
    assert (account.trained, account.lost, account.trained_twice) == (3 * prompts, (), ())
    steps = steps_of(undisturbed)
    kept = SampleFiles(folder_of(undisturbed.directory))
    for row in steps:
        assert row.metrics["samples"] == n * prompts
        found = kept.find(SampleFilter(step=row.step), limit=1000)["samples"]
        rows = [kept.sample(row.step, one["group"], one["sample"]) for one in found]
        assert len(rows) > n * prompts
        assert row.metrics["tokens"] == sum(sum(one["mask"]) for one in rows)
        assert {(one["group"], one["rollout"]) for one in rows} == {
            (group, rollout) for group in {one["group"] for one in rows} for rollout in range(n)
        }
        for one in rows:
            mask = np.array(one["mask"])
            assert not mask.all()
            for name in ("logprobs", "trainer_logprobs", "ref_logprobs", "values"):
                if one[name] is not None:
                    assert not np.array(one[name])[~mask].any(), name
                    assert name == "values" or np.array(one[name])[mask].all(), name
        assert row.metrics["critic_value_error"] > 0


@pytest.mark.parametrize(
    ("call", "victim", "nth"),
    [("actor.apply", "actor-0", 2), ("critic.accumulate", "trainer-0", 3), ("reward.score", "reward-0", 2)],
)
def test_whoever_dies_the_job_ends_with_the_same_bits(
    make_job: Any, undisturbed: Any, call: str, victim: str, nth: int
) -> None:
    job = make_job(SPEC)
    job.on(call, nth, lambda: job.kill(victim), when="after")
    with job:
        job.result(timeout_s=60)
    assert job.killed == [victim], "the moment never came"
    assert digests_of(job) == digests_of(undisturbed)
