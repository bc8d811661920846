"""A machine dies, with every vertex on it, or goes away for a while."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_vertices_of_a_dead_node_come_back_on_another(undisturbed_digest: str) -> None:
    out = run("tests.kill.node_loss")
    assert out["phase"] == "succeeded"
    assert out["result"]["digest"] == undisturbed_digest
    assert out["result"]["prompts_lost"] == 0
    assert len(out["nodes"]) == 3
    assert out["victims"]
    lost = {incident["vertex"] for incident in out["incidents"] if incident["cause"] == "node_lost"}
    assert lost <= set(out["victims"])
    # Ranks of one gang that die together are one incident, of the first that was noticed.
    assert {name.rpartition("-")[0] for name in lost} == {name.rpartition("-")[0] for name in out["victims"]}
    assert all(incident["outcome"] == "recovered" for incident in out["incidents"])


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_rollout_machine_that_is_away_costs_rollout_speed_and_nothing_else() -> None:
    out = run("tests.kill.machine_away")
    assert out["before"]["rollout-0"] != out["before"]["rollout-1"]
    away = out["away"]
    assert (away["phase"], away["reason"]) == ("running", "no_room"), out
    assert away["step"] > 5, "it trained meanwhile"
    assert list(away["waiting"]) == ["rollout-1"]
    assert "required 3 CPU" in away["message"]
    assert out["used_after_s"] < 20
    end = out["end"]
    assert (end["phase"], end["waiting"]) == ("succeeded", {})
    assert end["incidents"] == [["rollout-1", "node_lost", "vertex", "recovered"]]
    assert end["restarts"] == {"rollout-1": 1}, "waiting takes from no budget"
    assert (end["result"]["prompts_lost"], end["result"]["trained_twice"]) == (0, 0)


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
# Ray's autoscaler brings three machines and takes two away, as slowly as it does.
@pytest.mark.timeout(480)
def test_rays_autoscaler_brings_the_machines_that_a_job_waits_for_and_takes_them_away() -> None:
    out = run("tests.kill.waits_for_machines", timeout_s=460.0)
    assert out["machines_at_first"] == 1
    assert any(note.startswith("The job waits for room, for rollout-0: ") for note in out["notes"])
    assert out["while_it_waits"]["phase"] == "starting"
    assert "required 3 CPU" in out["while_it_waits"]["message"]
    assert out["machines_at_most"] == 4
    assert out["machines_left"] == 2
    assert (out["phase"], out["incidents"], out["groups_left"]) == ("stopped", [], [])


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_machine_that_comes_late_is_used_and_one_that_is_drained_is_left_in_order() -> None:
    out = run("tests.kill.machines_come_and_go")
    assert out["stands_on_the_guest"]
    assert out["used_after_s"] < 60, "in seconds, but for a busy machine"
    assert out["noticed_after_s"] < 10
    assert out["while_drained"] == {"phase": "running", "reason": "no_room"}, out
    assert ["rollout-1", "drained"] in out["left"]
    assert out["phase"] == "succeeded"
    assert (out["incidents"], out["restarts"]) == ([], {}), "to be asked to go is no failure"
    assert (out["result"]["prompts_lost"], out["result"]["trained_twice"]) == (0, 0)


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_partners_on_a_host_come_back_together_where_both_have_room() -> None:
    out = run("tests.kill.host_partners")
    before, after, pair = out["before"], out["after"], ["reward-1", "rollout-1"]
    assert {before[name] for name in pair} == {out["killed"]}
    assert out["waits"] == out["still"] == pair, "not one of them on a machine that holds one"
    assert {after[name] for name in pair} == {out["whole"]}
    assert {after["reward-0"], after["rollout-0"]} == {before["rollout-0"]}, "the other pair stays"
    assert out["used_after_s"] < 20
    assert out["restarts"] == {"reward-1": 1, "rollout-1": 1}
    assert out["phase"] == "succeeded"
    assert (out["result"]["prompts_lost"], out["result"]["trained_twice"]) == (0, 0)


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_second_job_takes_what_is_free_and_waits_for_the_rest() -> None:
    out = run("tests.kill.two_jobs")
    assert out["waits"] == ["rollout-0"], "nobody stands where the first job does"
    assert out["begun"] == [], "a job begins as a whole"
    assert out["phase"] == ["starting", "no_room"]
    assert "required 3 CPU" in out["says"]
    assert "none before the job second, which has waited longer" in out["third_says"], "there is room for it"
    assert out["places"] == {"first": None, "second": 1, "third": 2}
    assert out["third_ran"] == 0
    assert out["first_stays"]
    assert out["used_after_s"] < 20
    assert (out["ends"], out["lost"], out["incidents"]) == (["succeeded"] * 3, [0] * 3, [[]] * 3)


def run(program: str, *words: str, timeout_s: float = 170.0) -> dict[str, Any]:
    """What the program prints at its end."""
    command = [sys.executable, "-m", program, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return out
