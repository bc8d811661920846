"""The sentence about a job: each state has its words."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.api.now import now_of


def view(phase: str = "running", **changes: Any) -> dict[str, Any]:
    job = {
        "name": "grpo",
        "job_id": "grpo-1",
        "phase": phase,
        "reason": "",
        "message": "",
        "step": 41,
        "version": 41,
        "submitted_at": 100.0,
        "ended_at": None,
        "result": {},
        "checkpoint_step": 40,
        "error": "",
    }
    base: dict[str, Any] = {
        "job": job,
        "master": {"answering": True, "pid": 7, "epoch": 1, "url": "", "node": ""},
        "vertices": [],
        "incidents": [],
        "progress": {"step": 41, "steps": 80, "tokens_per_s": 5200.0},
        "evaluations": {},
        "training": {"first": {"step": 1}, "last": {"step": 41, "reward_mean": 0.5}, "tokens": 9},
        "warnings": [],
        "bottleneck": "rollout; the actor waits 38 % of its time for samples",
        "store": {"error": ""},
    }
    base["job"] |= changes.pop("job", {})
    return base | changes


def vertex(name: str, phase: str = "running", no_room: str = "") -> dict[str, Any]:
    return {"id": name, "phase": phase, "no_room": no_room}


def incident(**changes: Any) -> dict[str, Any]:
    return {
        "id": "actor-0/1/vertex",
        "at": 150.0,
        "vertex": "actor-0",
        "cause": "process_died",
        "decision": "restart the gang",
        "evidence": {"exit": "killed by signal 9"},
        "user_code": False,
        "recovered_at": None,
        "recovery_s": None,
        "outcome": "open",
    } | changes


@pytest.mark.parametrize(
    ("given", "tone", "words"),
    [
        (
            view(),
            "good",
            "Trains at step 41 of 80, 5.2k tok/s; the actor waits 38 % of its time for samples.",
        ),
        (
            view(warnings=[{"code": "cut_off", "step": 9, "message": "30 % are cut"}]),
            "attention",
            "30 % are cut",
        ),
        (view(incidents=[incident()]), "attention", "Recovers for 50 s from actor-0: process died"),
        (view("recovering"), "attention", "Recovers at step 41"),
        (view("paused"), "attention", "Paused after step 41."),
        (view(job={"reason": "no_room", "message": "needs 8 GPUs, 4 are free"}), "attention", "needs 8 GPUs"),
        (view(master={"answering": False, "url": ""}), "attention", "The master does not answer"),
        (
            view("starting", vertices=[vertex("actor-0"), vertex("rollout-0", "starting")]),
            "good",
            "Starts: 1 of 2 vertices run; rollout-0 is still starting.",
        ),
        (view("failed", job={"message": "out of memory", "ended_at": 160.0}), "bad", "Out of memory."),
        (view("succeeded", job={"ended_at": 160.0}), "over", "Succeeded after 1 min: 41 steps"),
    ],
)
def test_each_state_has_its_sentence(given: dict[str, Any], tone: str, words: str) -> None:
    now = now_of(given, [], 200.0)
    assert now["tone"] == tone
    assert words in now["sentence"]
    assert now["sentence"].endswith((".", "…"))


def test_every_fact_names_a_view() -> None:
    found = now_of(view(incidents=[incident(outcome="recovered", recovered_at=151.0)]), [], 200.0)["facts"]
    assert {fact["label"]: fact["value"] for fact in found}["incidents"] == "1 incident, 1 recovered"
    assert all(fact["view"] and fact["value"] for fact in found)


def test_a_long_reason_is_cut_where_a_sentence_ends() -> None:
    first, second = "the reward raised KeyError: 'answer' " + "x" * 120, "y" * 200
    whole = now_of(view("failed", job={"message": f"{first}. {second}", "ended_at": 160.0}), [], 200.0)[
        "sentence"
    ]
    assert whole.endswith(f"{first[0].upper()}{first[1:]}.")
    endless = now_of(view("failed", job={"message": "z" * 500, "ended_at": 160.0}), [], 200.0)["sentence"]
    assert endless.endswith("z…")
