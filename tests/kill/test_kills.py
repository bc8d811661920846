"""Real kills on a real Ray cluster. Whatever dies, the job ends with the very weights of an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from gyre.store.write_lock import holder_of
from gyre.testing.processes import Victim
from tests.kill.conftest import Run

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.timeout(180)]

Start = Callable[..., Run]

PATIENT = {"silence_timeout_s": 30.0}
"""Nobody is stopped in such a job, and on a busy machine a process that starts may be silent for seconds."""

ENGINE = "an engine"


Deaths = tuple[tuple[int, str, str], ...]

EACH_KIND: Deaths = (
    (2, "rollout-0", "vertex"),
    (4, "actor-0", "region"),
    (6, "trainer-0", "vertex"),
    (8, "rollout_manager-0", "vertex"),
    (11, "reward-0", "vertex"),
)
"""After which step, between two checkpoints, who is killed, and what is started anew for it."""

ENGINE_AFTER = 9
MASTER_AFTER = 18


def test_whatever_is_killed_is_replaced_alone_and_the_weights_come_out_the_same(
    start: Start, undisturbed_digest: str
) -> None:
    """One of each kind, each when the last is back; an engine, which is started again under the same agent; and the
    master, which takes over again while the data plane goes on."""
    run = start(failover=PATIENT)
    deaths = [death[:2] for death in EACH_KIND] + [(ENGINE_AFTER, ENGINE), (MASTER_AFTER, "master")]
    for step, name in sorted(deaths):
        run.faults.reach_step(step)
        before = incarnations(run)
        if name == ENGINE:
            run.faults.until(serves, "rollout-1 serving", timeout_s=60.0)
            engine_of(run.faults.find("rollout-1")).kill()
            continue
        (victim,) = run.faults.kill(name)
        successor = run.faults.replaced(victim)
        assert successor.pid != victim.pid
        if name == "master":
            assert successor.incarnation == victim.incarnation + 1
            assert incarnations(run) == before, "it took a vertex along"
    view = run.end()
    assert view["job"]["result"]["digest"] == undisturbed_digest
    everybody = ("actor-0", "actor-1", "reward-0", "rollout-0", "rollout-1", "rollout_manager-0", "trainer-0")
    assert incarnations(run) == {name: 1 + deaths_of(name) for name in everybody}, [
        (incident["vertex"], incident["incarnation"], incident["cause"]) for incident in view["incidents"]
    ]
    (of_engine,) = (one for one in view["incidents"] if one["cause"] == "engine_died")
    assert (of_engine["vertex"], of_engine["outcome"]) == ("rollout-1", "recovered")
    assert of_engine["evidence"]["last_words"], "an engine says at its start what it serves"
    *vertices, master = (one for one in view["incidents"] if one is not of_engine)
    assert [(one["vertex"], one["scope"]) for one in vertices] == [death[1:] for death in EACH_KIND]
    assert master["vertex"] == "master"
    for incident in vertices:
        assert incident["cause"] == "process_died"
        assert incident["evidence"]["error"]
        assert incident["vertex"] != "trainer-0" or incident["evidence"]["last_words"], "it prints each step"
        assert incident["recovery_s"] is not None
    told = [event["body"] for event in run.handle.events() if event["kind"] == "RolloutsChanged"]
    (death,) = (body["details"] for body in told if body["what"] == "EngineDied")
    assert death["instance"] == "rollout-1"
    assert death["error"]


def incarnations(run: Run) -> dict[str, int]:
    return {vertex["id"]: vertex["incarnation"] for vertex in run.handle.status()["vertices"]}


def deaths_of(name: str) -> int:
    """How often it is started anew: with one rank of the gang, the other."""
    gang = ("actor-0", "actor-1")
    return sum(dead == name or (dead in gang and name in gang) for _, dead, _ in EACH_KIND)


def serves(view: dict[str, Any]) -> bool | None:
    """On a busy machine it may still be starting."""
    return next((True for v in view["vertices"] if v["id"] == "rollout-1" and v["version"] is not None), None)


def engine_of(agent: Victim) -> psutil.Process:
    """The process that serves under it; its guard has the same words in its command, and others."""
    for child in psutil.Process(agent.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a child that came and went
            words = child.cmdline()
            if "gyre.engines.embedded" in words and not any("guard.py" in word for word in words):
                return child
    raise AssertionError(f"{agent} has no engine")


@pytest.mark.slow
def test_everything_is_killed_at_once_and_some_once_more(start: Start, undisturbed_digest: str) -> None:
    """Every process that the job has; then the gang's other rank, and the trainer again: what was restored from is
    restored from again."""
    run = start(rollout_total=1)
    run.faults.reach_step(7)
    everybody = ("rollout-0", "rollout_manager-0", "reward-0", "actor-0", "actor-1", "trainer-0", "master")
    for victim in run.faults.kill(*everybody):
        run.faults.replaced(victim)
    for step, name in ((11, "actor-1"), (13, "trainer-0")):
        run.faults.reach_step(step)
        (victim,) = run.faults.kill(name)
        assert run.faults.replaced(victim).pid != victim.pid
    view = run.end()
    assert view["job"]["result"]["digest"] == undisturbed_digest
    last = run.incidents_of(view, "actor-1")[-1]  # ranks that die together are one incident, of either
    assert (last["cause"], last["scope"]) == ("process_died", "region")
    assert len(run.incidents_of(view, "trainer-0")) == 2


@pytest.mark.slow
def test_a_stopped_process_is_found_and_replaced_also_in_the_middle_of_a_write(
    start: Start, kill_home: Path, undisturbed_digest: str
) -> None:
    """A vertex by the master, and the master by its vertices, which end it. Who is stopped in a write has the
    database's one write lock, without which nothing can be written of its own replacement."""
    names = ("actor-1", "trainer-0", "rollout-0", "master")
    writers = ("trainer-0", "master")
    run = start(rollout_total=1)
    for turn, name in enumerate(names):
        run.faults.reach_step(2 + 3 * turn)
        run.faults.replaced(run.faults.stop(name))
    for turn, name in enumerate(writers):
        step = 13 + 2 * turn
        run.faults.reach_step(step)
        run.gate.open_to(step + 4)
        victim = run.faults.find(name)
        stop_in_a_write(victim.pid, kill_home / "gyre.db")
        run.faults.replaced(victim)
    view = run.end()
    assert view["job"]["result"]["digest"] == undisturbed_digest
    for name in names:
        incident, *in_a_write = run.incidents_of(view, name)
        assert incident["cause"] == "silent"
        assert "stopped" in incident["evidence"]["stack"]  # the kernel's word for its state
        if name != "master":
            assert 3.0 <= incident["detected_after_s"] < 15.0  # and not by the 20 s of a stall
            assert "host.py" in incident["evidence"]["stack"] or "Thread" in incident["evidence"]["stack"]
        # By which of the two it is told first.
        assert [one["cause"] in ("silent", "killed") for one in in_a_write] == [True] * (name in writers)


def stop_in_a_write(pid: int, database: Path) -> None:
    """SIGSTOP the process while it holds the database's write lock."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        if holder_of(database) == pid:
            os.kill(pid, signal.SIGSTOP)
            if holder_of(database) == pid:
                return
            os.kill(pid, signal.SIGCONT)
    raise TimeoutError(f"process {pid} did not write to {database} within 60 s")


@pytest.mark.slow
def test_a_rollout_class_of_the_users_is_called_again_elsewhere_also_behind_its_weights(start: Start) -> None:
    """With staleness permitted the weights may differ from run to run; the account may not."""
    run = start(steps=12, own_rollouts=True, max_staleness=2)
    run.faults.reach_step(4)
    for victim in run.faults.kill("rollout-0", "actor-0"):
        run.faults.replaced(victim)
    run.faults.kill("trainer-0")
    view: dict[str, Any] = run.end(steps=12)
    lags = [
        event["body"]["metrics"]["staleness_max"]
        for event in run.handle.events()
        if event["kind"] == "StepCompleted"
    ]
    assert max(lags) <= 2
    assert view["job"]["step"] == 12
