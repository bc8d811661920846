"""A real job whose engine cannot start: three attempts, then its last words on the screen, whoever asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Shared

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]

GRPO = """
name: engineless
recipe: grpo
config:
  task: {digits: 1}
  model: {layers: 1, hidden: 32, heads: 2, kv_heads: 1, mlp: 64}
  sampling: {n: 2}
  optim: {lr: 1.0e-3}
run: {steps: 3, prompts_per_step: 4, groups_per_firing: 2, groups_per_micro_batch: 4, evaluate_every: 0}
rollouts: {engine: "tests.e2e.workloads:engine_that_cannot_start"}
roles:
  trainer:
  actor:
  rollout:
  reward:
"""

SAID = "ModuleNotFoundError: No module named 'no_such_engine'"


def test_an_engine_that_cannot_start_ends_the_job_with_its_last_words_first(
    shared: Shared, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GRPO)
    ended = shared.gyre("run", str(file))
    assert ended.code == 1, ended.err
    before, traceback, after = ended.err.partition("Traceback (most recent call last):")
    assert traceback, ended.err
    assert SAID in after
    assert "3 starts in a row" in after
    assert "To do: install what is missing" in after
    assert f"error: Job engineless failed: {SAID}" in after
    assert "1 of 3 attempts have failed" in before or SAID in before  # the incident, while it ran
    view = shared.verb("show", "engineless", "--json").json()
    assert view["job"]["reason"] == "engine_not_started"
    assert view["job"]["error"].startswith("Traceback (most recent call last):")
    (incident,) = view["incidents"]
    assert (incident["vertex"], incident["cause"], incident["outcome"]) == (
        "rollout-0",
        "engine_start_failed",
        "gave up",
    )
    assert incident["evidence"]["attempts"] == 3
    assert incident["evidence"]["error"] == SAID
    assert all(vertex["restarts"] == 0 for vertex in view["vertices"])
    shown = shared.verb("show", "engineless").out
    assert SAID in shown
