"""Silence is not death: processes that report nothing for long and are well, and one that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre.api.home import home
from tests.kill.conftest import Run
from tests.kill.jobs import STEPS
from tests.kill.silent import HELD_S
from tests.machine import ControlGroup, control_group
from tests.observe.own_sinks import told

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[..., Run]

SILENT = "tests.kill.silent"

HELD_BYTES = 1 << 30
"""Of memory, for who loads three times as much: it stands still in the middle of its call."""

COMES_WITHIN_S = 60.0


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    with control_group() as made:
        yield made


def bodies(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event["body"] for event in run.handle.events() if event["kind"] == kind]


def test_nobody_who_is_silent_and_well_is_taken_for_dead(
    start: Start, kill_home: Path, tmp_path: Path, group: ControlGroup, undisturbed_digest: str
) -> None:
    """The lock is kept for 40 s in a rank's setup, in a call of the other, in a reward and in a sink; then one fills
    gigabytes in a call, and the machine lets it have no memory for it: no budget is spent, and each silence is counted
    as the false alarm that it was."""
    lines = tmp_path / "told.jsonl"
    run = start(
        actor=(SILENT, "LockedActor"),
        reward=(SILENT, "LockedReward"),
        reward_total=2,
        rollout_total=1,
        stall_timeout_s=1.5 * HELD_S,
        observe={"sinks": [{"kind": f"{SILENT}:LockedSink", "to": str(lines)}]},
    )
    run.faults.reach_step(4)
    loader = run.faults.find("reward-0")
    group.take(loader.pid)
    group.hold(HELD_BYTES)
    (home(kill_home).job_directory(run.handle.job_id) / "load").touch()
    run.gate.open()

    def fell_silent(_: dict[str, Any]) -> dict[str, Any] | None:
        return next((one for one in bodies(run, "VertexFellSilent") if one["vertex"] == "reward-0"), None)

    seen = run.faults.until(fell_silent, "silence of reward-0", timeout_s=COMES_WITHIN_S)
    assert seen["life"] == "busy"
    assert "the machine does not let it run" in seen["detail"]
    group.release()

    view = run.end()
    assert view["job"]["result"]["digest"] == undisturbed_digest
    assert view["incidents"] == []
    assert {vertex["incarnation"] for vertex in view["vertices"]} == {1}
    silences = {one["vertex"]: one["life"] for one in bodies(run, "VertexFellSilent")}
    assert silences == {"actor-1": "hung", "reward-1": "hung", "reward-0": "busy"}
    alarms = {vertex["id"]: vertex["false_alarms"] for vertex in view["vertices"] if vertex["false_alarms"]}
    assert alarms == dict.fromkeys(silences, 1)
    heard = {one["vertex"]: one["silent_s"] for one in bodies(run, "VertexHeardAgain")}
    assert heard.keys() == silences.keys()
    assert min(heard["actor-1"], heard["reward-1"]) > HELD_S / 2

    def steps() -> list[int]:
        return [line[1] for line in told(lines) if line[0] == "step"]

    run.faults.until(
        lambda _: STEPS in steps() or None, "the last step at the sink", timeout_s=COMES_WITHIN_S
    )
    assert steps() == list(range(1, STEPS + 1)), "each once"


def test_who_is_stuck_in_c_is_given_up_at_its_stall_timeout_with_its_native_stack(
    start: Start, undisturbed_digest: str
) -> None:
    limit_s = 10.0
    run = start(reward=(SILENT, "StuckReward"), rollout_total=1, stall_timeout_s=limit_s)
    view = run.end()
    assert view["job"]["result"]["digest"] == undisturbed_digest
    (incident,) = view["incidents"]
    assert (incident["vertex"], incident["cause"]) == ("reward-0", "silent")
    assert limit_s <= incident["detected_after_s"] < 3 * limit_s
    assert incident["evidence"]["life"] == "hung"
    assert "pthread_mutex_lock" in incident["evidence"]["stack"], "what it waits in is no code of Python's"
    assert "StuckReward.score" in incident["evidence"]["stack"] or "score" in incident["evidence"]["stack"]
    (reward,) = (vertex for vertex in view["vertices"] if vertex["role"] == "reward")
    assert (reward["incarnation"], reward["false_alarms"], reward["silent"]) == (2, 0, "")
