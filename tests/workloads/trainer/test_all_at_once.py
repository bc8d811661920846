"""A whole job in one process, with the real rollout and weight planes: all who have the newest policy die at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.api import RLJobBuilder
from gyre.testing.in_process import InProcessJob

DEADLINE_S = 100.0
DIES_AT = 2
"""The version that actor and rollouts die with."""


def make(tmp_path: Path) -> InProcessJob:
    tiny = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 32, "max_positions": 32}
    config = {
        "seed": 7,
        "task": {"digits": 1},
        "model": tiny,
        "sampling": {"n": 2, "max_new_tokens": 4},
        "optim": {"lr": 1e-3},
        "warm_start": {"max_steps": 2, "batch": 8, "lr": 3e-3, "stop_at": 0.68, "slips": 0.62},
    }
    run = {"steps": 4, "prompts_per_step": 4, "groups_per_firing": 2, "groups_per_micro_batch": 2}
    spec = (
        RLJobBuilder()
        .recipe("grpo")
        .config(config)
        .run(**run, checkpoint_every=3, evaluate_every=0)
        .rollouts(max_running=8, kv_tokens=2048, report_interval_s=0.05)
        .actor()
        .total(1)
        .rollout()
        .total(2)
        .reward()
        .total(1)
        .build()
        .plan()
        .spec
    )
    return InProcessJob(spec.model_dump(mode="json"), tmp_path)


def lose_machine(job: InProcessJob) -> None:
    """The trainer and the rollout manager stand elsewhere. With the actor go its chunk server and what it held."""
    source = job.vertex("actor-0").host._workload._source
    job.kill("actor-0", "rollout-0", "rollout-1", no_room=True)
    source.close()
    job.make_room("actor-0", "rollout-0", "rollout-1")


@pytest.mark.slow
def test_when_actor_and_rollouts_die_with_a_version_the_next_actor_serves_it(tmp_path: Path) -> None:
    job = make(tmp_path)
    job.on_report("WeightsPublished", DIES_AT + 1, lambda: lose_machine(job))
    with job:
        result = job.result(timeout_s=DEADLINE_S)
    assert (result["steps"], result["prompts_lost"], result["trained_twice"]) == (4, 0, 0)
    published = [report.body["version"] for report in job.reports_of("WeightsPublished")]
    # Told twice, if the files go before the manager has looked at them: it refuses the trainer, which begins anew.
    assert sorted(published) == published
    assert set(published) == {0, 1, 2, 3, 4}
    assert job.reports_of("OperatorFailed") == []
    (restored,) = [report.body for report in job.reports_of("GangRestored")]
    assert (restored["source"], restored["step"]) == ("disk", 0)
