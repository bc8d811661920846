"""The live panel: at every width and height each row is there, whole, and the panel fits the terminal."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from gyre.api.terminal.live import LivePanel, LiveProgress, line_of
from gyre.api.terminal.panel import SHOWN_INCIDENTS, draw_panel, share_rows
from gyre.api.terminal.run_history import RunHistory
from gyre.failover import events as e
from gyre.testing.fake_master import FakeMaster, small_spec

WIDTHS = (60, 80, 100, 120, 140, 200)
STEP_S = 5.0


def small_master(rollouts: int = 2) -> FakeMaster:
    spec = small_spec()
    roles = {**spec.roles, "rollout": spec.roles["rollout"].model_copy(update={"total": rollouts})}
    master = FakeMaster(spec.model_copy(update={"roles": roles}))
    master.start_all()
    master.telemetry = {
        name: {"busy": "rollout.generate"} for name in master.state.vertices if name.startswith("rollout")
    }
    return master


def run_to(master: FakeMaster, step: int) -> RunHistory:
    """The history of a watcher who saw every step up to this one, `STEP_S` each."""
    history = RunHistory()
    for number in range(1, step + 1):
        master.progress = {
            "step": number,
            "steps": 60,
            "reward": number / 60,
            "accuracy": 0.305,
            "tokens_per_s": 1234.5,
            "version": number - 1,
            "checkpoint_step": 10,
            "waits": {"actor waits for rollout": 0.62, "rollout waits for reward": 0.2},
        }
        history.observe(master.view(), number * STEP_S)
    return history


def fail(master: FakeMaster) -> None:
    """A rollout that dies, and a reward function that raises."""
    detail = "The actor died.\n\tpid: 12\nWorker exit detail: it was killed by SIGKILL."
    master.record(e.VertexLost("rollout-0", 1, "process_died", {"error": detail}))
    error, traceback = "ValueError: no rewards", 'Traceback\n  File "/jobs/myjob.py", line 5\nValueError: no'
    master.record(e.OperatorFailed(1, "reward-0", 1, "reward.score", error, traceback, user_code=True))


def drawn(view: dict[str, Any], history: RunHistory, *, width: int, height: int, now: float) -> list[str]:
    out = io.StringIO()
    panel = draw_panel(
        view, history, at=view["job"]["submitted_at"] + 80.0, now=now, width=width, height=height
    )
    Console(file=out, width=width, height=height).print(panel)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_row_is_there_and_whole_at_every_width(width: int) -> None:
    master = small_master()
    history = run_to(master, 30)
    fail(master)
    lines = drawn(master.view(), history, width=width, height=40, now=30 * STEP_S)
    assert {cell_len(line) for line in lines} == {width}
    inside = [line.strip("│ ") for line in lines[1:-1]]
    assert re.fullmatch(r"━+  step 30 of 60", inside[0]), "the bar has a line of its own"
    text = "\n".join(inside)
    for fact in (
        "recovering",
        "elapsed 1 min 20 s",
        "ETA 2 min 30 s",
        "5.0 s a step",
        "held-out 30.5%",
        "1,234 tok/s",
        "policy v29",
        "checkpoint at step 10",
        "actor waits for rollout 62%",
    ):
        assert text.count(fact) == 1
    (reward,) = (line for line in inside if line.startswith("reward "))
    assert re.fullmatch(r"reward 0\.500  ▁[▁▂▃▄▅▆▇█]{28}█", reward)
    rows = [
        r"VERTEX +# +PID +STATE +DOING",
        r"master +1 +4242 +answering",
        r"trainer-0 +1 +1000 +running",
        r"actor-0 +1 +1001 +running",
        r"actor-1 +1 +1002 +running",
        r"rollout-0 +2 +– +starting +rollout\.generate",
        r"rollout-1 +1 +1004 +running +rollout\.generate",
        r"reward-0 +1 +1005 +running",
        r"INCIDENTS +CAUSE +TOOK +MESSAGE",
        r"rollout-0 +process_died +open +it was killed by .*",
        r"reward-0 +user_error +0\.0 s +ValueError: no rewa.*",
    ]
    assert [
        row for row in rows if not re.fullmatch(row, inside.pop(len(inside) - len(rows) + rows.index(row)))
    ] == []


def test_a_long_message_is_cut_with_an_ellipsis_and_a_wide_panel_has_all_of_it() -> None:
    master = small_master()
    history = run_to(master, 1)
    fail(master)
    narrow = drawn(master.view(), history, width=60, height=40, now=0.0)
    wide = drawn(master.view(), history, width=140, height=40, now=0.0)
    assert narrow[-2].rstrip("│ ").endswith("…")
    assert "ValueError: no rewards (myjob.py:5)" in wide[-2]


@pytest.mark.parametrize("width", WIDTHS)
def test_forty_rollouts_are_one_row_with_counts(width: int) -> None:
    master = small_master(rollouts=40)
    history = run_to(master, 30)
    fail(master)
    lines = drawn(master.view(), history, width=width, height=24, now=30 * STEP_S)
    assert len(lines) <= 24
    (row,) = (line for line in lines if "rollout ×40" in line)
    assert "39 running, 1 start" in row
    assert any("reward-0" in line and "running" in line for line in lines)


@pytest.mark.parametrize("rollouts", [9, 400])
def test_a_large_role_is_folded_however_high_the_terminal_is(rollouts: int) -> None:
    rows, _ = share_rows(small_master(rollouts).view(), 1000)
    assert [row[0] for row in rows] == [
        "master",
        "trainer-0",
        "actor-0",
        "actor-1",
        f"rollout ×{rollouts}",
        "reward-0",
    ]


def test_what_replicas_do_is_counted_with_the_most_frequent_first() -> None:
    master = small_master(rollouts=9)
    master.telemetry["rollout-3"] = {"busy": "rollout.load_weights"}
    rows, _ = share_rows(master.view(), 40)
    assert rows[4] == ("rollout ×9", "", "", "9 running", "rollout.generate ×8, rollout.load_weights ×1")


@given(
    width=st.integers(30, 220),
    height=st.integers(5, 60),
    rollouts=st.integers(1, 50),
    roles=st.integers(0, 12),
    incidents=st.integers(0, 12),
)
@settings(max_examples=60, deadline=None)
def test_it_fits_whatever_the_terminal_and_the_job(
    width: int, height: int, rollouts: int, roles: int, incidents: int
) -> None:
    master = small_master(rollouts)
    history = run_to(master, 3)
    view = master.view()
    reward = view["vertices"][-1]
    view["vertices"] += [{**reward, "id": f"judge_{n}-0", "role": f"judge_{n}"} for n in range(roles)]
    fail(master)
    view["incidents"] = [master.view()["incidents"][0]] * incidents
    lines = drawn(view, history, width=width, height=height, now=3 * STEP_S)
    assert len(lines) <= height
    assert {cell_len(line) for line in lines} == {width}
    room = height - 2
    rows, shown = share_rows(view, room)
    assert (len(rows) + 1 if rows else 0) + (shown + 1 if shown else 0) <= room
    assert shown <= min(incidents, SHOWN_INCIDENTS)
    left_out = [int(row[0].split()[1]) for row in rows if row[0].startswith("…")]
    if rows and not left_out:
        replicas = sum(int(row[0].partition("×")[2] or 1) for row in rows)
        assert replicas == 1 + len(view["vertices"])


def test_it_is_as_high_as_the_terminal_leaves_room_for() -> None:
    out = io.StringIO()
    master = small_master(rollouts=8)
    Console(file=out, width=80, height=16).print(LivePanel(master.view(), run_to(master, 2)))
    assert len(out.getvalue().splitlines()) <= 15


# -- what was seen before ---------------------------------------------------------------------------


def test_a_trainer_that_restarts_takes_nothing_back() -> None:
    master = small_master()
    history = run_to(master, 10)
    master.progress = {}
    history.observe(master.view(), 51.0)
    assert history.progress["step"] == 10
    master.progress = {"step": 8, "steps": 60, "reward": 0.9}
    history.observe(master.view(), 55.0)
    assert len(history.rewards) == 10
    master.progress = {"step": 11, "steps": 60, "reward": 0.7}
    history.observe(master.view(), 60.0)
    assert (history.rewards[-1], len(history.rewards)) == (0.7, 11)


def test_the_end_is_estimated_from_the_pace_of_late() -> None:
    master = small_master()
    history = run_to(master, 30)
    assert history.step_s() == pytest.approx(STEP_S)
    assert history.remaining_s(30 * STEP_S) == pytest.approx(30 * STEP_S)
    assert history.remaining_s(30 * STEP_S + 2.0) == pytest.approx(30 * STEP_S - 2.0)
    assert history.remaining_s(30 * STEP_S + 600.0) == pytest.approx(29 * STEP_S), (
        "a stuck step is not progress"
    )
    paused = master.view()
    paused["job"]["phase"] = "paused"
    history.observe(paused, 30 * STEP_S)
    assert history.remaining_s(30 * STEP_S) is None


def test_one_step_is_paced_by_the_trainers_own_word() -> None:
    history, master = RunHistory(), small_master()
    master.progress = {"step": 0, "steps": 4, "step_s": 3.0}
    history.observe(master.view(), 0.0)
    assert history.step_s() is None
    master.progress = {"step": 1, "steps": 4, "step_s": 3.0}
    history.observe(master.view(), 90.0)
    assert history.remaining_s(90.0) == pytest.approx(9.0)


def test_the_line_is_the_same_while_only_time_passes() -> None:
    master = small_master()
    history = run_to(master, 2)
    line = line_of(master.view(), history)
    assert line == (
        "running · step 2/60 · reward 0.03 · held-out 30.5% · 1,234 tok/s · policy v1 · checkpoint at step 10"
        " · actor waits for rollout 62% · 0 incidents"
    )
    history.observe(master.view(), 1000.0)
    assert line_of(master.view(), history) == line


def test_an_incident_is_said_once_and_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    live, master = LiveProgress("title"), small_master()
    fail(master)
    for _ in range(2):
        live.show(master.view())
    live.close()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("!")]
    assert said == [
        "! rollout-0: process_died: it was killed by SIGKILL. → restart rollout-0",
        "! reward-0: user_error in the job's own code: ValueError: no rewards (myjob.py:5) → call reward.score again",
    ]
