"""The sentence on what a job's speed depends on."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.workloads.trainer.bottleneck import bottleneck_of
from gyre.workloads.trainer.rollout_requests import FOR_AGENT, WITH_AGENT

GENERATING, SCORING = "waits for rollout (generating)", "waits for reward (scoring)"


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        ({GENERATING: 0.38, "training": 0.62}, "rollout; the actor waits 38 % of its time for samples"),
        (
            {GENERATING: 0.2, "waits for rollout (delivering)": 0.2, SCORING: 0.3, "training": 0.3},
            "rollout; the actor waits 40 % of its time for samples",
        ),
        (
            {GENERATING: 0.1, "waits for rollout (delivering)": 0.5, "training": 0.4},
            "rollout; the actor waits 60 % of its time for samples (delivering 50 %)",
        ),
        (
            {
                GENERATING: 0.2,
                "waits for rollout (delivering)": 0.2,
                "waits for rollout (starting an engine)": 0.3,
                "waits for rollout (loading weights)": 0.1,
                "training": 0.2,
            },
            "rollout; the actor waits 80 % of its time for samples (starting an engine 30 %, generating 20 %)",
        ),
        (
            {f"waits for rollout ({WITH_AGENT})": 0.5, GENERATING: 0.1, "training": 0.4},
            "agents and their tools; the actor waits 50 % of its time for them",
        ),
        (
            {f"waits for rollout ({FOR_AGENT})": 0.5, "training": 0.5},
            "agents that run the sessions; the actor waits 50 % of its time for them",
        ),
        (
            {f"waits for rollout ({WITH_AGENT})": 0.2, GENERATING: 0.4, "training": 0.4},
            "rollout; the actor waits 60 % of its time for samples",
        ),
        ({SCORING: 0.5, "training": 0.5}, "reward; the actor waits 50 % of its time for scores"),
        (
            {"training": 0.8, "stepping the optimizer": 0.12, GENERATING: 0.08},
            "actor; it trains 92 % of its time",
        ),
        ({"training": 0.8, GENERATING: 0.1, SCORING: 0.1}, "balanced; the actor trains 80 % of its time"),
        (
            {"publishing": 0.5, "training": 0.3, GENERATING: 0.2},
            "publishing weights; it takes 50 % of the actor's time",
        ),
        (
            {"writing a checkpoint": 0.4, "training": 0.6},
            "writing checkpoints; it takes 40 % of the actor's time",
        ),
        (
            {"waits for rollout (evaluating)": 0.6, GENERATING: 0.1, "training": 0.3},
            "evaluations; the actor waits 60 % of its time for them",
        ),
    ],
)
def test_of_a_running_job(shares: dict[str, float], sentence: str) -> None:
    progress = {"step": 7, "steps": 80, "times": {"actor": shares, "rollout": {"idle": 1.0}}}
    assert bottleneck_of("running", progress) == sentence
    assert bottleneck_of("succeeded", progress) == "", "its recent shares are of its end"
    for phase in ("succeeded", "stopped", "failed"):
        spent = {"reward": {"scoring": 9.0}, "actor": {what: 50 * share for what, share in shares.items()}}
        spent["actor"].setdefault("training", 0.0)
        past = bottleneck_of(phase, progress | {"spent_s": spent})
        assert past == sentence.replace("waits", "waited").replace("trains", "trained").replace(
            "takes", "took"
        )
        assert bottleneck_of(phase, {"spent_s": spent}) == "", "no step was made"


@pytest.mark.parametrize(
    ("phase", "progress", "sentence"),
    [
        ("starting", {}, "starting up"),
        ("running", {"step": 0, "steps": 80}, "starting up"),
        (
            "running",
            {"step": 0, "times": {"actor": {"getting ready": 1.0}}},
            "starting up; the actor is getting ready",
        ),
        ("running", {"step": 0, "times": {"actor": {GENERATING: 1.0}}}, "starting up"),
        ("running", {}, ""),
        ("running", {"step": 5, "times": "mine"}, ""),
        ("running", {"step": 5, "times": {"actor": 3}}, ""),
        ("paused", {"step": 5, "times": {"actor": {"training": 1.0}}}, ""),
    ],
)
def test_of_a_job_that_begins_or_reports_something_else(
    phase: str, progress: dict[str, Any], sentence: str
) -> None:
    assert bottleneck_of(phase, progress) == sentence


def test_the_role_that_learns_is_known_from_its_first_seconds() -> None:
    """Of a job that ended soon, the last look saw no training yet: the rollouts' generating is none."""
    spent = {
        "actor": {"getting ready": 0.3, "waits for rollout (starting an engine)": 2.8, GENERATING: 0.3},
        "reward": {"waits for rollout (starting an engine)": 2.8},
        "rollout": {"generating": 0.3, "starting an engine": 2.8},
    }
    said = bottleneck_of("stopped", {"step": 3, "spent_s": spent})
    assert said == "rollout; the actor waited 91 % of its time for samples (starting an engine 82 %)"
