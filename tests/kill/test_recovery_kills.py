"""Real agents' processes die at chosen lines, and their sessions go on as `config.agent.recovery` says: from the last
snapshot, bit by bit as if nothing had happened, or anew by another seed, with what was drawn before in the account.

One manager, two agents with the embedded engine, the vertex of the role `agent`, and a trainer's client in this
process. The first run is what all are compared with.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from gyre.rollouts.samples import Group
from gyre.weights.version.model_folder import list_model_folder
from tests.engines.tiny_model import write_tiny_model
from tests.kill.fault_points import END, ENDED, KEEPING, KEPT, TOLD, TOOL, TURN, WRITTEN, FaultPoints
from tests.kill.recovery_worker import TURNS
from tests.kill.test_rollout_plane import ENVIRONMENT
from tests.kill.test_session_kills import GROUPS, STARTS_WITHIN_S, TOKENS, N, SessionFleet

pytestmark = [pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

WORKER = Path(__file__).with_name("recovery_worker.py")

MIDDLE = {TURN: 20, TOOL: 20, KEPT: 15, TOLD: 15, END: 3, ENDED: 3, KEEPING: 15, WRITTEN: 15}
"""At which time that somebody comes to a point they die there: in the middle of all turns, or of all ends."""


class RecoveryFleet(SessionFleet):
    manager_kind: ClassVar[tuple[str, ...]] = ("sessions", "snapshot")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.points = FaultPoints(directory)
        self.recovery = "snapshot"
        self.ranks = 0
        self.deliveries: list[int] = []

    def groups_delivered(self, purpose: str, groups: list[Group]) -> None:
        self.deliveries += [group.id for group in groups]
        super().groups_delivered(purpose, groups)

    def start_manager(self) -> None:
        type(self).manager_kind = ("sessions", self.recovery)
        super().start_manager()

    def start_worker(self, name: str = "w") -> None:
        """A vertex of another rank each time, so that the silence of the one before is its own."""
        with open(self.directory / f"{name}.log", "ab") as log:
            argv = [sys.executable, str(WORKER), str(self.directory), str(self.ranks), self.recovery]
            self.workers[name] = subprocess.Popen(argv, env=ENVIRONMENT, stdout=log, stderr=log)
        self.ranks += 1

    def recover_by(self, recovery: str) -> None:
        if recovery != self.recovery:
            self.recovery = recovery
            self.kill_manager()
            self.kill_worker()

    def disturbed(self, point: str, *discarded: str) -> dict[int, Group]:
        """The groups, while the worker or the manager dies at this point."""
        (self.directory / "calls.jsonl").unlink(missing_ok=True)
        self.deliveries.clear()
        self.points.arm(point, MIDDLE[point])
        before = self.begin()
        assert self.manager is not None
        if point in (KEEPING, WRITTEN, TOLD):
            assert self.manager.wait(STARTS_WITHIN_S) == -signal.SIGKILL
            self.start_manager()
        if point not in (KEEPING, WRITTEN):
            assert self.workers["w"].wait(STARTS_WITHIN_S) == -signal.SIGKILL
            self.start_worker()
        return self.whole(before, *discarded)

    def calls(self) -> dict[str, list[tuple[int, str, int]]]:
        """By session what was called for it, in order: by whom, what, and at which step."""
        found: dict[str, list[tuple[int, str, int]]] = defaultdict(list)
        for line in (self.directory / "calls.jsonl").read_text().splitlines():
            told = json.loads(line)
            found[told["session"]].append((told["pid"], told["call"], told["step"]))
        return found

    def went_on(self) -> dict[str, tuple[list[tuple[str, int]], list[tuple[str, int]]]]:
        """Of the sessions that two processes ran, what the first called and what the second one."""
        found = {}
        for session, calls in self.calls().items():
            pids = list(dict.fromkeys(pid for pid, *_ in calls))
            assert len(pids) <= 2
            if len(pids) == 2:
                first, second = ([call[1:] for call in calls if call[0] == pid] for pid in pids)
                found[session] = first, second
        return found

    def turns_of(self, group: int, member: int) -> list[int]:
        """How many tokens each turn of the undisturbed session has."""
        (row,) = (one for one in self.calm[group].samples if one.rollout == member)
        return [end - drawn for _, _, drawn, end, _ in row.extras["session.path"]]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecoveryFleet]:
    directory = tmp_path_factory.mktemp("recovery")
    fleet = RecoveryFleet(directory)
    try:
        fleet.start_manager()
        model = write_tiny_model(directory / "v0", seed=0)
        folder = list_model_folder(model, version=0)
        fleet.client.publish(0, folder.checksum, model)
        fleet.start_worker()
        fleet.ready()
        fleet.calm = fleet.train()
        yield fleet
    finally:
        fleet.stop()


@pytest.mark.parametrize("point", [TURN, TOOL, KEPT, TOLD, END, ENDED])
def test_an_environment_goes_on_from_its_last_snapshot(fleet: RecoveryFleet, point: str) -> None:
    fleet.recover_by("snapshot")
    fleet.ready()
    fleet.same(fleet.disturbed(point))
    assert sorted(fleet.deliveries) == list(range(GROUPS)), "a group came twice"
    went_on = fleet.went_on()
    assert went_on, "nothing was under way"
    for first, second in went_on.values():
        told = max((step for call, step in first if call == "kept"), default=0)
        sent = max((step for call, step in first if call == "sent"), default=0)
        began, at = second[0]
        assert began == ("restore" if at else "reset")
        assert at in (told, sent), "what was told is kept, and what was only sent may be"
        made = [step for call, step in second if call == "step"]
        assert made == list(range(at + 1, TURNS + 1)), "a step before the snapshot"
    assert any(second[0][0] == "restore" for _, second in went_on.values())


@pytest.mark.parametrize("point", [KEEPING, WRITTEN])
def test_the_manager_dies_with_a_snapshot(fleet: RecoveryFleet, point: str) -> None:
    """Its agent keeps it once more; that nobody may go on from another one is what the kills of agents show."""
    fleet.recover_by("snapshot")
    fleet.ready()
    fleet.same(fleet.disturbed(point))
    assert not fleet.went_on()
    for calls in fleet.calls().values():
        steps = [step for _, call, step in calls if call == "step"]
        assert steps == list(range(1, TURNS + 1)), "an agent that lives made a step again"


@pytest.mark.parametrize("point", [TURN, TOOL, END, ENDED])
def test_a_session_begins_anew_by_another_seed(fleet: RecoveryFleet, point: str) -> None:
    fleet.recover_by("restart")
    fleet.ready()
    before = fleet.status()["account"]["discarded"].get("session", 0)
    groups = fleet.disturbed(point, "session")
    assert sorted(fleet.deliveries) == list(range(GROUPS)), "a group came twice"
    discarded = fleet.status()["account"]["discarded"]["session"] - before
    least = most = 0
    again = 0
    calls = fleet.calls()
    for group in groups.values():
        assert sorted(one.rollout for one in group.samples) == list(range(N))
        for sample in group.samples:
            attempts = [f"train-{group.id}-{sample.rollout}-{at}" for at in range(3)]
            assert attempts[2] not in calls
            turns = fleet.turns_of(group.id, sample.rollout)
            if attempts[1] in calls:
                again += 1
                assert not any(call == "restore" for _, call, _ in calls[attempts[1]])
                made = sum(call == "step" for _, call, _ in calls[attempts[0]])
                least += sum(turns[:made])
                most += sum(turns[: made + 1])
                assert self_differs(fleet, group, sample.rollout), "the same was drawn again"
            else:
                assert not self_differs(fleet, group, sample.rollout)
    assert again, "nothing was under way"
    assert fleet.status()["sessions"]["since_start"]["drawn_again"] >= again
    if point == TOOL:
        assert discarded == least, "all turns were whole"
    else:
        assert least <= discarded <= most


def self_differs(fleet: RecoveryFleet, group: Group, member: int) -> bool:
    def drawn(one: Group) -> Any:
        (row,) = (sample for sample in one.samples if sample.rollout == member)
        assert row.mask is not None
        return row.token_ids[row.mask]

    ours, theirs = drawn(group), drawn(fleet.calm[group.id])
    assert ours.shape == theirs.shape == (TURNS * TOKENS,)
    return not np.array_equal(ours, theirs)
