"""A job under command: from its handle, and from other processes while it holds the foreground of one."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gyre.api.handle import JobHandle
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import ENDS_WITHIN_S, Process, Shared

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]

MODULE = "tests.e2e.workloads"

VERTEX_KEYS = {"id", "role", "rank", "pid", "node", "phase", "reason", "version"}

ENDLESS = f"""
name: endless
roles:
  trainer: {{entrypoint: "{MODULE}:Endless"}}
  rollout: {{entrypoint: "{MODULE}:MyRollout", total: 1, elastic: {{min: 1, max: 3}}}}
"""


def test_each_machine_of_a_cluster_is_checked_and_nothing_stays(shared: Shared) -> None:
    def kept() -> list[str]:
        # SQLite's own files beside the store go when the last of all who have it open closes it.
        return sorted(file.name for file in shared.home.iterdir() if not file.name.endswith(("-shm", "-wal")))

    before = kept()
    checks = shared.gyre("doctor", "--cluster", "--json").json()
    machines = [check for check in checks if check["name"].startswith("machine ")]
    assert [machine["status"] for machine in machines] == ["ok"]
    assert "CPUs" in machines[0]["found"]
    assert kept() == before


def test_kill_ends_a_job_at_once(shared: Shared, tmp_path: Path) -> None:
    """Its trainer's `fit()` does not look whether it should stop."""
    file = tmp_path / "deaf.yaml"
    file.write_text(f'name: deaf\nroles: {{trainer: {{entrypoint: "{MODULE}:Deaf"}}}}\n')
    run = Process.start(shared.home, "run", str(file), "--json", ray_address=shared.address)

    def running() -> bool | None:
        shown = shared.verb("show", "deaf", "--json")
        return (shown.code == 0 and json.loads(shown.out)["job"]["phase"] == "running") or None

    run.until(running)
    assert shared.verb("kill", "deaf").code == 0
    ended = run.end()
    assert ended.code == 0, ended.err
    job = ended.json()["job"]
    assert job["phase"] == "stopped"
    events = shared.verb("events", "deaf", "--json").json()
    (asked,) = (event for event in events if event["kind"] == "StopRequested")
    assert asked["body"]["at_once"]
    assert not [event for event in events if event["kind"] == "TimerFired"], "no drain timeout was waited for"


def test_every_verb_and_a_handle_from_another_process_while_the_job_holds_the_foreground(
    shared: Shared, tmp_path: Path
) -> None:
    file = tmp_path / "endless.yaml"
    file.write_text(ENDLESS)
    run = Process.start(shared.home, "run", str(file), "--json", "--name", "fore", ray_address=shared.address)

    def running() -> dict[str, Any] | None:
        shown = shared.verb("show", "fore", "--json")
        view: dict[str, Any] = json.loads(shown.out) if shown.code == 0 else {}
        return view if view and view["job"]["phase"] == "running" else None

    view = run.until(running)
    assert view["master"].keys() >= {"pid", "epoch", "url"}
    assert view["master"]["answering"]
    assert [vertex["id"] for vertex in view["vertices"]] == ["rollout-0", "trainer-0"]
    assert all(vertex.keys() >= VERTEX_KEYS and vertex["pid"] for vertex in view["vertices"])
    follow = Process.start(shared.home, "events", "-f", "--json", "fore", ray_address=shared.address)
    tail = Process.start(shared.home, "logs", "-f", "fore", "--role", "rollout", ray_address=shared.address)

    assert [job["name"] for job in shared.verb("ls", "--json").json()] == ["fore"]
    job_id = view["job"]["job_id"]
    with closing(JobHandle(job_id, f"sqlite:///{shared.home / 'gyre.db'}")) as handle:
        scales_pauses_and_resumes(handle)
    assert shared.gyre("submit", str(file), "--name", "fore").code == 5
    assert shared.verb("scale", "fore", "rollout=2").code == 0
    assert shared.verb("scale", "fore", "rollout=9").code == 2
    assert shared.verb("scale", "fore", "nobody=1").code == 4
    assert shared.verb("pause").code == 0
    assert shared.verb("resume", "--json").json()["job_id"] == job_id
    assert shared.verb("replay", "fore", "--json").json()["differences"] == []
    assert shared.verb("stop", "fore", "--reason", "seen enough").code == 0

    ended = run.end()
    assert ended.code == 0, ended.err
    last = ended.json()
    assert (last["job"]["phase"], last["job"]["message"]) == ("stopped", "seen enough")
    assert last["job"]["roles"]["rollout"] == 2
    assert last["job"]["result"]["rounds"] > 0
    events = [json.loads(line) for line in follow.end().out.splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert {"ScaleRequested", "PauseRequested", "ResumeRequested", "StopRequested"} <= {
        event["kind"] for event in events
    }
    assert "rollout-0    generates 1" in tail.end().out

    # And when it is over:
    shown = shared.verb("show", "fore", "--json").json()
    assert shown["master"]["answering"] is False
    assert shown["job"]["phase"] == "stopped"
    assert shared.verb("replay", "fore").code == 0
    assert shared.verb("pause", "fore").code == 5
    assert shared.verb("show", "nobody").code == 4
    assert "generates 1" in shared.verb("logs", "fore", "--role", "rollout", "--rank", "0").out


def scales_pauses_and_resumes(handle: JobHandle) -> None:
    """By its own methods; the job starts and ends with one rollout."""
    watch = ProcessFaults(handle)

    def vertices(count: int) -> None:
        watch.until(
            lambda view: view["progress"].get("vertices") == count or None,
            f"{count} vertices called",
            timeout_s=ENDS_WITHIN_S,
        )

    vertices(1)
    handle.scale("rollout", 3)
    vertices(3)
    handle.scale("rollout", 1)
    vertices(1)
    handle.pause()
    watch.until(lambda view: view["job"]["phase"] == "paused" or None, "pause", timeout_s=ENDS_WITHIN_S)
    handle.resume()
    view = watch.until(
        lambda view: view if view["job"]["phase"] == "running" else None, "run", timeout_s=ENDS_WITHIN_S
    )
    watch.reach_step(view["progress"]["step"] + 5)
