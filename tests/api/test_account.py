"""Where prompts and tokens are: counted from the ledger and the plane's last word, and from the series at the end."""

from __future__ import annotations

from typing import Any

from gyre.api.account import account_of, last_account

AUDIT = {
    "counts": {"queued": 3, "done": 2, "trained": 90, "dropped": 1},
    "duplicates": {7: [1, 2]},
    "gaps": [(10, 11), (20, 20)],
    "cursor": 99,
    "discarded": {"too_old": 5},
}
SERIES = {
    "series": {
        "plane": {
            "account/generated": [[1.0, 5.0], [2.0, 73977.0]],
            "account/delivered": [[2.0, 72782.0]],
            "account/discarded/quarantined": [[2.0, 12.0]],
            "queued": [[2.0, 4.0]],
        }
    }
}


def view(health: dict[str, Any]) -> dict[str, Any]:
    return {"vertices": [{"role": "rollout_manager", "fields": {"health": health}}] if health else []}


def nothing() -> dict[str, Any]:
    raise AssertionError("the view has it")


def test_prompts_are_counted_from_the_ledger() -> None:
    found = account_of(view({}), AUDIT, dict)
    assert found["prompts"] == {
        "drawn": 99,
        "trained": 90,
        "dropped": 1,
        "in_flight": 5,
        "lost": 3,
        "twice": 1,
    }
    assert found["tokens"]["generated"] is None
    assert found["tokens"]["not_trained"] == {"too_old": 5}


def test_tokens_are_those_of_the_view_where_the_plane_answers() -> None:
    said = {"generated": 9, "delivered": 5, "in_flight": 3, "discarded": {"x": 1}, "missing": 0}
    assert account_of(view({"account": said}), AUDIT, nothing)["tokens"].items() >= said.items()


def test_of_an_ended_job_they_are_the_last_of_the_series() -> None:
    found = account_of(view({}), AUDIT, lambda: SERIES)["tokens"]
    assert (found["generated"], found["delivered"]) == (73977, 72782)
    assert found["discarded"] == {"quarantined": 12}
    assert last_account({"series": {}}) == {}
