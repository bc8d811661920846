"""The sentence about a job: each state has its words, and the verdict on learning is no more than the numbers say."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.api.now import learns, now_of


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
        (view(store={"error": "gyre.db is gone."}), "bad", "The store is out of reach: gyre.db is gone."),
        (view(master={"answering": False, "url": ""}), "attention", "The master does not answer"),
        (
            view("starting", vertices=[vertex("actor-0"), vertex("rollout-0", "starting")]),
            "good",
            "Starts: 1 of 2 vertices run; rollout-0 is still starting.",
        ),
        (view("failed", job={"message": "out of memory", "ended_at": 160.0}), "bad", "out of memory."),
        (view("succeeded", job={"ended_at": 160.0}), "over", "Succeeded after 1 min: 41 steps"),
    ],
)
def test_each_state_has_its_sentence(given: dict[str, Any], tone: str, words: str) -> None:
    now = now_of(given, [], 200.0)
    assert now["tone"] == tone
    assert words in now["sentence"]
    assert now["sentence"].endswith((".", "…"))


def steps(*rewards: float) -> list[dict[str, Any]]:
    return [{"step": number, "reward_mean": reward} for number, reward in enumerate(rewards, 1)]


def test_a_rise_beyond_chance_is_learning_and_less_is_not() -> None:
    rising = steps(*(0.1 + 0.02 * number for number in range(30)))
    assert learns(view(), rising)["verdict"] == "yes"
    noise = steps(*(0.5 + 0.1 * (-1) ** number for number in range(30)))
    assert learns(view(), noise)["verdict"] == "unknown"
    falling = steps(*(0.9 - 0.02 * number for number in range(30)))
    assert learns(view(), falling)["verdict"] == "no"


def test_a_few_steps_are_too_early() -> None:
    assert learns(view(), steps(0.1, 0.9))["verdict"] == "too early"


def test_equal_rewards_are_no_learning() -> None:
    assert learns(view(), steps(*[0.0] * 20))["verdict"] == "unknown"


def evaluation(version: int, accuracy: float | None, reward: float = 0.0, count: int = 512) -> dict[str, Any]:
    return {
        "version": version,
        "accuracy": accuracy,
        "reward_mean": reward,
        "reward_std": 0.4,
        "count": count,
    }


@pytest.mark.parametrize(
    ("first", "last", "verdict"),
    [
        (evaluation(0, 0.34), evaluation(80, 0.99), "yes"),
        (evaluation(0, 0.34), evaluation(80, 0.36), "unknown"),
        (evaluation(0, 0.90), evaluation(80, 0.30), "no"),
        (evaluation(0, None, 0.1), evaluation(80, None, 0.9), "yes"),
        (evaluation(0, 0.3, count=4), evaluation(80, 0.6, count=4), "unknown"),
    ],
)
def test_evaluations_go_before_rewards(first: dict[str, Any], last: dict[str, Any], verdict: str) -> None:
    given = view(evaluations={"held_out": [first, last]})
    assert learns(given, steps(*[0.0] * 20))["verdict"] == verdict


def test_a_warning_goes_before_everything() -> None:
    given = view(
        warnings=[{"code": "no_gradient", "step": 3, "message": "the gradient is 0"}],
        evaluations={"held_out": [evaluation(0, 0.3), evaluation(80, 0.9)]},
    )
    assert learns(given, [])["verdict"] == "no"


def test_every_fact_names_a_view() -> None:
    found = now_of(view(incidents=[incident(outcome="recovered", recovered_at=151.0)]), [], 200.0)["facts"]
    assert {fact["label"]: fact["value"] for fact in found}["incidents"] == "1, 1 recovered"
    assert all(fact["view"] and fact["value"] for fact in found)
