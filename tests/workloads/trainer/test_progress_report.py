"""The account in a run's result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gyre.rollouts.trainer.sample_ledger import PromptAccount
from gyre.workloads.trainer.progress_report import ProgressReport

PER_STEP = 8


@pytest.mark.parametrize(
    ("planned", "step", "drawn", "trained", "dropped", "gaps", "lost"),
    [
        (10, 10, 80, 80, 0, (), 0),
        (10, 10, 80, 79, 0, (), 1),
        (10, 10, 83, 80, 3, (), 0),
        (30, 51, 424, 408, 0, (), 0),  # it was stopped at step 51, and goes on with fewer steps
        (52, 52, 424, 416, 0, (), 0),
        (52, 52, 424, 415, 0, (7,), 1),
    ],
)
def test_what_was_drawn_for_steps_that_are_planned_no_more_is_not_lost(
    planned: int, step: int, drawn: int, trained: int, dropped: int, gaps: tuple[int, ...], lost: int
) -> None:
    groups = SimpleNamespace(step=step, tokens=0, digests={})
    none = cast(Any, SimpleNamespace(rows=[], first_set=None))
    report = ProgressReport(
        cast(Any, groups),
        none,
        none,
        none,
        {},
        steps_planned=planned,
        prompts_per_step=PER_STEP,
        shown_by=none,
    )
    account = PromptAccount(drawn, trained, drawn - trained - dropped, gaps, (), dropped)
    assert report.result(account, stopped=False)["prompts_lost"] == lost
