"""Sessions in words, also at the edges: none yet, no agent, faults in a row, nonsense in a report."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.master.session_words import sessions_fact, sessions_sentence


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({}, "No session runs or waits."),
        ({"waiting": 1, "workers": 0}, "1 session waits for an agent, and none is connected."),
        (
            {"waiting": 0, "running": 1, "workers": 1, "at_engine": 1, "with_agent": 0},
            "1 session runs on 1 worker: 1 at an engine, 0 with an agent or its tools.",
        ),
        (
            {"waiting": 1200, "running": 12, "workers": 2, "at_engine": 5, "with_agent": 7},
            "12 sessions run on 2 workers: 5 at an engine, 7 with an agent or its tools. "
            "1,200 sessions wait for an agent.",
        ),
        (
            {"failed_groups": 1, "pause_s": 4.0},
            "No session runs or waits. Infrastructure ended several in a row, so sessions are handed out one at a "
            "time, after pauses of 4 s. 1 group cannot be generated.",
        ),
        (
            {
                "branches": {"template": 2, "retokenised": 1},
                "since_start": {
                    "outcomes": {"scored": 1, "truncated": 0, "policy_fault": 0, "infra_fault": 1},
                    "turns": 1,
                    "drawn_again": 1,
                    "faults": [{"session": "train-0-0-0", "reason": ""}],
                },
            },
            "No session runs or waits. Since the manager started 2 sessions ended, 1 scored, 1 for a fault of "
            "infrastructure; 1 was drawn again; 1 turn was answered. Branches: 1 by retokenised, 2 by template. "
            "The newest fault, of train-0-0-0: no reason was given",
        ),
        (
            {"waiting": "many", "since_start": {"outcomes": 3, "faults": ["?"]}, "branches": []},
            "No session runs or waits.",
        ),
    ],
)
def test_a_sentence(told: dict[str, Any], sentence: str) -> None:
    assert sessions_sentence(told) == sentence


def test_the_short_form() -> None:
    told = {"waiting": 20, "running": 12, "at_engine": 5, "with_agent": 7}
    assert sessions_fact(told) == "sessions 5 at an engine, 7 with an agent, 20 waiting"


def test_the_short_form_says_why_sessions_are_held_back() -> None:
    since = {"faults": [{"session": "train-0-0-0", "reason": "solve.py, line 3: KeyError: 'prompt'"}]}
    told = {"waiting": 20, "pause_s": 2.0, "since_start": since}
    assert sessions_fact(told).endswith("20 waiting, held back: solve.py, line 3: KeyError: 'prompt'")
    assert sessions_fact({**told, "pause_s": 0.0}).endswith("20 waiting")
