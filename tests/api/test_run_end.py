"""The last lines about a job, and the lines of its steps as a watcher prints them."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.api.terminal.live import LiveProgress, StepLines, door_lines
from gyre.api.terminal.run_end import last_lines, nothing_left
from gyre.errors import StoreError
from tests.doubles.standing_job import StandingJob

STEP = {"step": 80, "reward_mean": 0.96}


def view_of(phase: str = "succeeded", **other: Any) -> dict[str, Any]:
    job = {
        "name": "demo",
        "phase": phase,
        "reason": "",
        "message": other.pop("message", ""),
        "submitted_at": 1000.0,
        "ended_at": 1071.0,
        "result": other.pop("result", {}),
    }
    return {
        "job": job,
        "progress": {},
        "incidents": [],
        "vertices": [],
        "training": {},
        "warnings": [],
        "master": {"url": "", "answering": True},
    } | other


TRAINED = {"first": {"step": 1, "reward_mean": 0.34}, "last": STEP, "tokens": 412_345}
ROWS = [{"accuracy": 0.34, "reward_mean": 0.3}, {"accuracy": 0.97, "reward_mean": 0.9}]
COUNTS = {"steps": 0, "prompts": 16, "prompts_lost": 0, "trained_twice": 0}
ACCOUNT = COUNTS | {"accuracy_first": 0.34, "accuracy_last": 0.97}


@pytest.mark.parametrize(
    ("view", "line"),
    [
        (
            view_of(training=TRAINED, evaluations={"held_out": ROWS}, result=ACCOUNT),
            "demo succeeded after 1 min 11 s: 80 steps, reward 0.34 -> 0.96, held-out 34 % -> 97 %, 0.4 M tokens; "
            "0 prompts lost, 0 trained twice",
        ),
        (
            view_of(training=TRAINED, result=ACCOUNT),
            "demo succeeded after 1 min 11 s: 80 steps, reward 0.34 -> 0.96, held-out 34 % -> 97 %, 0.4 M tokens; "
            "0 prompts lost, 0 trained twice",
        ),
        (
            view_of(
                training=TRAINED,
                evaluations={
                    "held_out": [
                        {"accuracy": None, "reward_mean": 0.3},
                        {"accuracy": 0.5, "reward_mean": 0.4},
                    ],
                    "hard": ROWS,
                    "one": ROWS[:1],
                    "none": [],
                },
            ),
            "demo succeeded after 1 min 11 s: 80 steps, reward 0.34 -> 0.96, held-out reward 0.3 -> 0.4, "
            "hard 34 % -> 97 %, one 34 %, 0.4 M tokens",
        ),
        (
            view_of(
                training=TRAINED,
                evaluations={
                    "verl": [row | {"right_by": "reward.acc"} for row in ROWS],
                    "changed": [ROWS[0] | {"threshold": 1.0}, ROWS[1] | {"right_by": "reward.acc"}],
                },
            ),
            "demo succeeded after 1 min 11 s: 80 steps, reward 0.34 -> 0.96, verl 34 % -> 97 % (reward.acc), "
            "changed reward 0.3 -> 0.9, 0.4 M tokens",
        ),
        (
            view_of("stopped", message="interrupted by Ctrl-C", training=TRAINED),
            "demo stopped by Ctrl-C after 1 min 11 s: 80 steps, reward 0.34 -> 0.96, 0.4 M tokens",
        ),
        (view_of("stopped", message="enough"), "demo stopped after 1 min 11 s (enough)"),
        (
            view_of("failed", message="the reward\nraised", training=TRAINED),
            "demo failed after 1 min 11 s: 80 steps, reward 0.34 -> 0.96, 0.4 M tokens; the reward raised",
        ),
        (
            view_of(
                training=TRAINED | {"continued_at": 1061.0, "continued_step": 40, "continued_reward": 0.7},
            ),
            "demo succeeded after 10 s: 40 steps (80 in all), reward 0.7 -> 0.96, 0.4 M tokens",
        ),
        (
            view_of(
                training=TRAINED | {"continued_at": 1061.0, "continued_step": 40, "continued_reward": 0.7},
                evaluations={
                    "math": [
                        row | {"version": at} for at, row in zip((0, 30, 60), (*ROWS, ROWS[0]), strict=True)
                    ],
                    "code": [row | {"version": at} for at, row in zip((0, 40), ROWS, strict=True)],
                },
            ),
            "demo succeeded after 10 s: 40 steps (80 in all), reward 0.7 -> 0.96, math 97 % -> 34 %, code 97 %, "
            "0.4 M tokens",
        ),
        (
            view_of(result={"best": 0.123456, "model": "a\nb", "n": 5, "lists": [1], "x": "y" * 99}),
            f"demo succeeded after 1 min 11 s: best 0.1235, model a b, n 5, x {'y' * 39}…",
        ),
        (
            view_of("stopped", message="interrupted by SIGTERM", result=COUNTS),
            "demo stopped by SIGTERM after 1 min 11 s: 0 steps; 0 prompts lost, 0 trained twice",
        ),
        (
            view_of("stopped", message="enough", result=COUNTS | {"prompts": 0}),
            "demo stopped after 1 min 11 s (enough): 0 steps; no prompt was drawn",
        ),
        (view_of(result={}), "demo succeeded after 1 min 11 s"),
    ],
)
def test_the_last_line(view: dict[str, Any], line: str) -> None:
    assert last_lines(view) == [line]


def test_incidents_and_warnings_that_hold_are_in_the_last_lines() -> None:
    warning = {"code": "cut_off", "step": 3, "message": "half of it was cut off"}
    incidents = [{"at": 2.0, "recovered_at": 3.0}, {"at": 4.0, "recovered_at": None}]
    assert last_lines(view_of(warnings=[warning], incidents=incidents)) == [
        "demo succeeded after 1 min 11 s; 2 incidents, 1 recovered",
        "! learning: half of it was cut off",
    ]
    [line] = last_lines(view_of(incidents=incidents, training={"continued_at": 3.5}))
    assert line.endswith("; 1 incident, 0 recovered"), "those of the run before are in its own last line"


def test_a_finished_job_has_nothing_left_unless_it_is_given_more() -> None:
    done = view_of(training=TRAINED)
    assert nothing_left(done, {"run": {"steps": 80}}) == [
        "There is nothing left to do: all 80 steps of demo are trained.",
        "For more: gyre resume demo --set run.steps=160",
    ]
    assert nothing_left(done, {"run": {"steps": 81}}) == []
    own = view_of(result={"loss": 0.25})
    assert nothing_left(own, {}, changed=False) == [
        "There is nothing left to do: fit() of demo has returned.",
        "To call it again with other settings: gyre resume demo --set KEY=VALUE",
    ]
    assert nothing_left(own, {}, changed=True) == []
    assert nothing_left(view_of("stopped", result={"loss": 0.25}), {}, changed=False) == []
    assert nothing_left(view_of("stopped", training=TRAINED), {"run": {"steps": 80}}) == []
    assert nothing_left(view_of(), {"run": {"steps": 80}}) == [], (
        "the steps of a user's own trainer are unknown"
    )


# -- the lines of steps -----------------------------------------------------------------------------


def seen(step: int, *, ended: bool = False) -> dict[str, Any]:
    view = view_of("succeeded" if ended else "running", training={"last": {"step": step}} if step else {})
    view["job"]["ended_at"] = 1.0 if ended else None
    return view | {"progress": {"steps": 99}}


def test_each_step_has_a_line_also_those_that_no_look_saw() -> None:
    asked: list[int] = []

    def read(after: int) -> list[dict[str, Any]]:
        asked.append(after)
        return [{"step": step} for step in range(after + 1, 60)]  # the job is ahead of the view

    lines = StepLines()
    assert lines.lines_of(seen(0), 0.0, read) == []
    assert lines.lines_of(seen(1), 1.0, read) == ["step 1/99"]
    assert lines.lines_of(seen(1), 3.0, read) == []
    assert lines.lines_of(seen(2), 4.0, read) == ["step 2/99"]
    assert lines.lines_of(seen(50), 5.0, read) == [f"step {step}/99" for step in range(3, 51)]
    assert asked == [2], "the ledger is read only where a look has missed steps"
    assert lines.lines_of(seen(50, ended=True), 9.0, read) == []


def test_steps_that_cannot_be_read_are_counted() -> None:
    def read(after: int) -> list[dict[str, Any]]:
        raise StoreError("the store is locked")

    lines = StepLines()
    assert lines.lines_of(seen(1), 1.0, read) == ["step 1/99"]
    assert lines.lines_of(seen(5), 2.0, read) == ["step 5/99  (3 steps before it not shown)"]


def test_who_comes_later_is_told_the_last_step_alone() -> None:
    assert StepLines().lines_of(seen(30), 0.0) == ["step 30/99"]


def test_a_job_that_goes_on_has_no_line_for_the_steps_of_before() -> None:
    def going_on(step: int) -> dict[str, Any]:
        view = seen(step)
        return view | {"training": view["training"] | {"continued_step": 30}}

    lines = StepLines()
    assert lines.lines_of(going_on(30), 0.0) == []
    assert lines.lines_of(going_on(31), 0.5) == ["step 31/99"]


def test_a_line_in_a_pipe_is_one_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveProgress("title")
    live.say("word " * 200)
    live.close()
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_warning_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveProgress("title")
    view = seen(3) | {"warnings": [{"code": "cut_off", "step": 3, "message": "too short"}]}
    live.show(view)
    live.show(view)
    live.close()
    assert capsys.readouterr().err.splitlines() == ["title", "step 3/99", "! learning: too short"]


def test_a_fleets_door_is_told_once_with_the_command_that_makes_a_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StandingJob() as job:
        view = job.view()
    assert door_lines(view) == []
    health = {"door": {"open": 0, "url": "https://10.0.0.7:7171"}}
    manager = {**view["vertices"][0], "role": "rollout_manager", "fields": {"health": health}}
    view["vertices"] = [*view["vertices"], manager]
    live = LiveProgress("title")
    live.show(view)
    live.show(view)
    live.close()
    told = capsys.readouterr().err
    assert told.count("door https://10.0.0.7:7171") == 1
    assert "gyre token create small --name lab --scope generate --scope publish" in told
