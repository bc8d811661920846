"""The live panel: at every width and height each row is there, whole, and the panel fits the terminal."""

from __future__ import annotations

import io
import os
import re
from copy import deepcopy
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from gyre.api.terminal.live import LivePanel, LiveProgress, line_of
from gyre.api.terminal.panel import SHOWN_INCIDENTS, draw_panel, share_rows
from gyre.api.terminal.run_history import RunHistory
from gyre.master.master_api import View
from gyre.workloads.trainer.bottleneck import bottleneck_of
from tests.doubles.standing_job import StandingJob
from tests.examples import examples

WIDTHS = (60, 80, 100, 120, 140, 200)
STEP_S = 5.0


@cache
def standing(*, failed: bool) -> View:
    """The view of a job that runs, or in which a rollout died and then a reward function raised."""
    with StandingJob() as job:
        if failed:
            detail = "The actor died.\n\tpid: 12\nWorker exit detail: it was killed by SIGKILL."
            job.do(job.world.kill, "rollout-0", detail)
            job.run_until(lambda view: view["incidents"])
            error = {
                "incarnation": 1,
                "vertex": "reward-0",
                "vertex_incarnation": 1,
                "operator": "reward.score",
                "error": "ValueError: no rewards",
                "traceback": 'Traceback\n  File "/jobs/myjob.py", line 5\nValueError: no',
                "user_code": True,
            }
            job.do(job.world.report, "trainer-0", "OperatorFailed", error)
            job.run_until(lambda view: len(view["incidents"]) == 2)
        return job.view()


def small_view(rollouts: int = 2, *, failed: bool = False) -> View:
    """That view with this many rollouts; those that run generate."""
    view = deepcopy(standing(failed=failed))
    vertices = view["vertices"]
    at = [vertex["id"] for vertex in vertices].index("rollout-1")
    more = [{**vertices[at], "id": f"rollout-{rank}", "rank": rank} for rank in range(1, rollouts)]
    vertices[at : at + 1] = more
    for vertex in vertices:
        if vertex["role"] == "rollout" and vertex["phase"] == "running":
            vertex["busy"] = "rollout.generate"
    return view


def run_to(view: View, step: int) -> RunHistory:
    """The history of a watcher who saw every step up to this one, `STEP_S` each."""
    history = RunHistory()
    for number in range(1, step + 1):
        view["progress"] = {
            "step": number,
            "steps": 60,
            "reward": number / 60,
            "accuracy": 0.305,
            "tokens_per_s": 1234.5,
            "version": number - 1,
            "checkpoint_step": 10,
            "times": {"actor": {"waits for rollout (generating)": 0.62, "training": 0.38}},
        }
        view["bottleneck"] = bottleneck_of("running", view["progress"])
        history.observe(view, number * STEP_S)
    return history


def drawn(view: View, history: RunHistory, *, width: int, height: int, now: float) -> list[str]:
    out = io.StringIO()
    panel = draw_panel(
        view, history, at=view["job"]["submitted_at"] + 80.0, now=now, width=width, height=height
    )
    Console(file=out, width=width, height=height).print(panel)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_row_is_there_and_whole_at_every_width(width: int) -> None:
    view = small_view(failed=True)
    history = run_to(view, 30)
    lines = drawn(view, history, width=width, height=40, now=30 * STEP_S)
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
        "bottleneck: rollout; the actor waits 62 % of",
    ):
        assert text.count(fact) == 1
    (reward,) = (line for line in inside if line.startswith("reward "))
    assert re.fullmatch(r"reward 0\.500  ▁[▁▂▃▄▅▆▇█]{28}█", reward)
    pids = {vertex["id"]: vertex["pid"] for vertex in view["vertices"]}
    rows = [
        r"VERTEX +# +PID +STATE +DOING",
        rf"master +1 +{os.getpid()} +answering",
        rf"actor-0 +1 +{pids['actor-0']} +running",
        rf"actor-1 +1 +{pids['actor-1']} +running",
        rf"reward-0 +1 +{pids['reward-0']} +running",
        r"rollout-0 +2 +– +starting",
        rf"rollout-1 +1 +{pids['rollout-1']} +running +rollout\.generate",
        rf"trainer-0 +1 +{pids['trainer-0']} +running",
        r"INCIDENTS +CAUSE +TOOK +MESSAGE",
        r"rollout-0 +process_died +open +it was kill.*",
        r"reward-0 +user_code +called again +ValueError: no.*",
    ]
    assert [
        row for row in rows if not re.fullmatch(row, inside.pop(len(inside) - len(rows) + rows.index(row)))
    ] == []


def test_a_long_message_is_cut_with_an_ellipsis_and_a_wide_panel_has_all_of_it() -> None:
    view = small_view(failed=True)
    history = run_to(view, 1)
    narrow = drawn(view, history, width=60, height=40, now=0.0)
    wide = drawn(view, history, width=140, height=40, now=0.0)
    assert narrow[-2].rstrip("│ ").endswith("…")
    assert "ValueError: no rewards (myjob.py:5)" in wide[-2]


@pytest.mark.parametrize("width", WIDTHS)
def test_forty_rollouts_are_one_row_with_counts(width: int) -> None:
    view = small_view(40, failed=True)
    history = run_to(view, 30)
    lines = drawn(view, history, width=width, height=24, now=30 * STEP_S)
    assert len(lines) <= 24
    (row,) = (line for line in lines if "rollout ×40" in line)
    assert "39 running, 1 start" in row
    assert any("reward-0" in line and "running" in line for line in lines)


@pytest.mark.parametrize("rollouts", [9, 400])
def test_a_large_role_is_folded_however_high_the_terminal_is(rollouts: int) -> None:
    rows, _ = share_rows(small_view(rollouts), 1000)
    assert [row[0] for row in rows] == [
        "master",
        "actor-0",
        "actor-1",
        "reward-0",
        f"rollout ×{rollouts}",
        "trainer-0",
    ]


def test_what_replicas_do_is_counted_with_the_most_frequent_first() -> None:
    view = small_view(rollouts=9)
    view["vertices"][6]["busy"] = "rollout.load_weights"
    rows, _ = share_rows(view, 40)
    assert rows[4] == ("rollout ×9", "", "", "9 running", "rollout.generate ×8, rollout.load_weights ×1")


@given(
    width=st.integers(30, 220),
    height=st.integers(5, 60),
    rollouts=st.integers(1, 50),
    roles=st.integers(0, 12),
    incidents=st.integers(0, 12),
)
@settings(max_examples=examples(60), deadline=None)
def test_it_fits_whatever_the_terminal_and_the_job(
    width: int, height: int, rollouts: int, roles: int, incidents: int
) -> None:
    view = small_view(rollouts)
    history = run_to(view, 3)
    last = view["vertices"][-1]
    view["vertices"] += [{**last, "id": f"judge_{n}-0", "role": f"judge_{n}"} for n in range(roles)]
    view["incidents"] = standing(failed=True)["incidents"][:1] * incidents
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
    view = small_view(rollouts=8)
    Console(file=out, width=80, height=16).print(LivePanel(view, run_to(view, 2)))
    assert len(out.getvalue().splitlines()) <= 15


# -- what was seen before ---------------------------------------------------------------------------


def test_a_trainer_that_restarts_takes_nothing_back() -> None:
    view = small_view()
    history = run_to(view, 10)
    view["progress"] = {}
    history.observe(view, 51.0)
    assert history.progress["step"] == 10
    view["progress"] = {"step": 8, "steps": 60, "reward": 0.9}
    history.observe(view, 55.0)
    assert len(history.rewards) == 10
    view["progress"] = {"step": 11, "steps": 60, "reward": 0.7}
    history.observe(view, 60.0)
    assert (history.rewards[-1], len(history.rewards)) == (0.7, 11)


def test_the_end_is_estimated_from_the_pace_of_late() -> None:
    view = small_view()
    history = run_to(view, 30)
    assert history.step_s() == pytest.approx(STEP_S)
    assert history.remaining_s(30 * STEP_S) == pytest.approx(30 * STEP_S)
    assert history.remaining_s(30 * STEP_S + 2.0) == pytest.approx(30 * STEP_S - 2.0)
    assert history.remaining_s(30 * STEP_S + 600.0) == pytest.approx(29 * STEP_S), (
        "a stuck step is not progress"
    )
    view["job"]["phase"] = "paused"
    history.observe(view, 30 * STEP_S)
    assert history.remaining_s(30 * STEP_S) is None


def test_one_step_is_paced_by_the_trainers_own_word() -> None:
    history, view = RunHistory(), small_view()
    view["progress"] = {"step": 0, "steps": 4, "step_s": 3.0}
    history.observe(view, 0.0)
    assert history.step_s() is None
    view["progress"] = {"step": 1, "steps": 4, "step_s": 3.0}
    history.observe(view, 90.0)
    assert history.remaining_s(90.0) == pytest.approx(9.0)


def test_the_line_is_the_same_while_only_time_passes() -> None:
    view = small_view()
    history = run_to(view, 2)
    line = line_of(view, history)
    assert line == (
        "running · step 2/60 · reward 0.03 · held-out 30.5% · 1,234 tok/s · policy v1 · checkpoint at step 10"
        " · bottleneck: rollout; the actor waits 62 % of its time for samples · 0 incidents"
    )
    history.observe(view, 1000.0)
    assert line_of(view, history) == line


def test_an_incident_is_said_once_and_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveProgress("title")
    for _ in range(2):
        live.show(small_view(failed=True))
    live.close()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("!")]
    assert said == [
        "! rollout-0: process_died: it was killed by SIGKILL. → restart rollout-0",
        "! reward-0: user_code in the job's own code: ValueError: no rewards (myjob.py:5) → call reward.score again",
    ]
