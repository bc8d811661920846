"""A step's line: what it has, and what it leaves out."""

from __future__ import annotations

import pytest

from gyre.workloads.trainer.learning.step_line import step_line

STEP = {
    "step": 482,
    "reward_mean": 0.031,
    "reward_std": 0.17,
    "loss": 0.015,
    "old_kl": 1.3e-14,
    "entropy": 2.46,
    "grad_norm": 0.2,
    "prompt_tokens_mean": 7.0,
    "completion_tokens_mean": 4.69,
    "cut_off_ratio": 0.47,
    "groups": 8,
    "samples": 32,
    "flat_groups": 7,
    "staleness_max": 0,
    "tokens_per_s": 1800.0,
}


@pytest.mark.parametrize("width", [60, 80, 100, 140, 240])
def test_a_line_fits_a_terminal_and_keeps_whole_facts(width: int) -> None:
    whole = step_line(STEP, steps=4000, waits={"actor waits for rollout (generating)": 0.9})
    line = step_line(STEP, steps=4000, waits={"actor waits for rollout (generating)": 0.9}, width=width)
    assert len(line) <= width
    assert line.startswith("step 482/4000  reward 0.031 ±0.17")
    assert set(line.split("  ")) <= set(whole.split("  "))
    assert (line == whole) == (len(whole) <= width)


def test_groups_of_one_sample_are_not_called_flat() -> None:
    assert "flat 7/8" in step_line(STEP)
    assert "flat" not in step_line(STEP | {"samples": 8, "flat_groups": 8})


def test_a_role_that_is_not_there_waits_for_nobody() -> None:
    waits = {"actor waits for itself (nobody there)": 0.5, "actor waits for reward (scoring)": 0.2}
    assert step_line(STEP, waits=waits).endswith("actor waits 20 % for reward")
