"""What the demo's exit status is of."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.api.demo import keeps_its_promise

KEPT = {"steps": 80, "prompts": 1280, "prompts_lost": 0, "trained_twice": 0}


def view_of(phase: str = "succeeded", **changed: Any) -> dict[str, Any]:
    return {"job": {"phase": phase, "result": {**KEPT, **changed}}}


def test_a_demo_that_accounts_for_every_prompt_keeps_its_promise() -> None:
    assert keeps_its_promise(view_of())


@pytest.mark.parametrize(
    "view",
    [
        view_of("stopped"),
        view_of("failed"),
        view_of(prompts_lost=1),
        view_of(trained_twice=1),
        view_of(prompts_lost=None),
        view_of(trained_twice=None),
        view_of(prompts=0),
        {"job": {"phase": "succeeded", "result": {}}},
    ],
    ids=str,
)
def test_one_that_did_not_or_of_which_nothing_is_known_does_not(view: dict[str, Any]) -> None:
    assert not keeps_its_promise(view)
