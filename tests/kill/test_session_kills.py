"""Real processes are killed while sessions run, and every row comes out as if nothing had happened, bit by bit.

One manager, two agents with the embedded engine, a worker of sessions, and a trainer's client in this process. Each
test asks for the same groups, and disturbs who makes them; the first run is what all are compared with.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.plane_client import RolloutClient
from gyre.weights.version.model_folder import list_model_folder
from tests.engines.tiny_model import write_tiny_model
from tests.kill.session_worker import TURNS
from tests.kill.test_rollout_plane import ENVIRONMENT, Fleet

pytestmark = [pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

GROUPS, N, TOKENS = 6, 2, 120
STARTS_WITHIN_S = 100.0
"""An engine, a worker and a manager that were killed at once load their modules at once, too, on a machine that may be
busy with others: an engine alone took 14 s then."""

WORKER = Path(__file__).with_name("session_worker.py")


class SessionFleet(Fleet):
    manager_kind: ClassVar[tuple[str, ...]] = ("sessions",)

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.trainer_term = 1

    def start_worker(self, name: str = "w") -> None:
        with open(self.directory / f"{name}.log", "ab") as log:
            argv = [sys.executable, str(WORKER), str(self.directory), name]
            self.workers[name] = subprocess.Popen(argv, env=ENVIRONMENT, stdout=log, stderr=log)

    def kill_manager(self) -> None:
        assert self.manager is not None
        self.manager.kill()
        self.manager.wait()
        time.sleep(0.2)
        self.start_manager()

    def kill_worker(self) -> None:
        self.workers["w"].kill()
        self.workers["w"].wait()
        self.start_worker()

    def new_trainer(self) -> None:
        self.client.close()
        self.trainer_term += 1
        self.client = RolloutClient(self, self, term=self.trainer_term)
        self.request()

    def request(self) -> None:
        self.client.request(
            "train",
            [Group(index, np.arange(1, 6 + index % 3, dtype=np.int32)) for index in range(GROUPS)],
            n=N,
            sampling={"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True},
            seed=11,
            min_version=0,
        )

    def sessions(self) -> dict[str, Any]:
        return dict(self.status()["sessions"])

    def train(self, *disturbances: Callable[[], Any]) -> dict[int, Group]:
        """The groups, with something done to those who make them at a third, at a half, …"""
        before = self.begin()
        for at, disturb in enumerate(disturbances, 1):
            wanted = before["generated"] + at * GROUPS * N * TURNS * TOKENS // (len(disturbances) + 2)
            self.until(lambda wanted=wanted: self.status()["account"]["generated"] >= wanted, STARTS_WITHIN_S)
            disturb()
        return self.whole(before)

    def begin(self) -> dict[str, Any]:
        """Ask for the groups. Returns the account before."""
        self.until(lambda: self.status()["open_groups"] == 0)
        before = self.status()["account"]
        self.came.clear()
        self.request()
        return dict(before)

    def whole(self, before: dict[str, Any], *discarded: str) -> dict[int, Group]:
        """The groups, when all are there, and the account is exact: so much was delivered as there is to train on, and
        what was drawn besides was discarded for one of these reasons."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.came.get("train", {})) == GROUPS, 90.0), (
                self.events()[-8:],
                self.sessions(),
            )
        self.until(lambda: self.status()["open_groups"] == 0)
        account = self.status()["account"]
        assert (account["missing"], account["in_flight"]) == (0, 0)
        assert account["generated"] == account["delivered"] + sum(account["discarded"].values())
        assert set(account["discarded"]) <= {"superseded", *discarded}, (
            "something that was drawn is not trained"
        )
        came = self.came["train"]
        masked = sum(sample.drawn for group in came.values() for sample in group.samples)
        assert account["delivered"] - before["delivered"] == masked == GROUPS * N * TURNS * TOKENS
        for kind in ("SampleQuarantined", "PeerRefused", "SessionFault", "Fatal"):
            assert not self.events(kind)
        assert not self.errors
        return came

    def same(self, groups: dict[int, Group]) -> None:
        super().same(groups)
        for index, group in groups.items():
            for one, other in zip(group.samples, self.calm[index].samples, strict=True):
                assert one.mask is not None
                assert other.mask is not None
                assert one.mask.tobytes() == other.mask.tobytes()
                assert (one.reward, one.rollout) == (other.reward, other.rollout)

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.wait(10.0)
        super().stop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionFleet]:
    directory = tmp_path_factory.mktemp("sessions")
    fleet = SessionFleet(directory)
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


@pytest.fixture(autouse=True)
def all_there(fleet: SessionFleet) -> None:
    fleet.ready()


def test_undisturbed_runs_agree(fleet: SessionFleet) -> None:
    fleet.same(fleet.train())


def test_the_manager_is_killed_again_and_again(fleet: SessionFleet) -> None:
    """In the middle of turns, and between the turns of some sessions: tools take a part of the time."""
    fleet.same(fleet.train(fleet.kill_manager, fleet.kill_manager, fleet.kill_manager))


def test_a_worker_is_killed_and_its_sessions_are_run_again(fleet: SessionFleet) -> None:
    fleet.same(fleet.train(fleet.kill_worker))


def test_an_engine_is_killed(fleet: SessionFleet) -> None:
    fleet.same(fleet.train(lambda: fleet.engine_of("r0").kill()))


def test_an_agent_of_an_engine_is_killed(fleet: SessionFleet) -> None:
    fleet.same(fleet.train(lambda: fleet.agents["r1"].kill()))


def test_the_trainer_is_another_one(fleet: SessionFleet) -> None:
    fleet.same(fleet.train(fleet.new_trainer))


def test_everything_at_once(fleet: SessionFleet) -> None:
    def all_of_them() -> None:
        fleet.engine_of("r0").kill()
        fleet.kill_worker()
        fleet.kill_manager()

    fleet.same(fleet.train(all_of_them, fleet.new_trainer))
