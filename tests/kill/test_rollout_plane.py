"""Real processes of the rollout plane are killed, and every sample comes out as if nothing had happened, bit by bit.

One manager, two agents with the embedded engine, and a trainer's client in this process. Each test asks for the same
samples under another name and disturbs their generation; the first does not disturb, and is what all are compared
with.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import psutil
import pytest

from gyre.errors import GyreError
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.plane_client import HearsOfRollouts, RolloutClient
from gyre.weights.version.model_folder import list_model_folder
from tests.engines.tiny_model import write_tiny_model

pytestmark = [pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

GROUPS, N, TOKENS = 8, 2, 240
LASTS_S = 1.0
"""Samples are made longer until generating them takes so long, for something is to be killed while it goes on."""
MOST_TOKENS = 3840
"""Of a sample; the model's context is a little longer."""
MANAGER = Path(__file__).with_name("plane_manager.py")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


class Fleet(HearsOfRollouts):
    manager_kind: ClassVar[tuple[str, ...]] = ()
    """Arguments of the manager's process, behind its folder and term."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.term = 0
        self.manager: subprocess.Popen[bytes] | None = None
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.came: dict[str, dict[int, Group]] = {}
        self.errors: list[GyreError] = []
        self.changed = threading.Condition()
        self.calm: dict[int, Group] = {}
        self.tokens = TOKENS
        self.client = RolloutClient(self, self, term=1)

    def where(self) -> tuple[str, str] | None:
        try:
            told = json.loads((self.directory / "rollouts.json").read_text())
            return told["url"], told["token"]
        except OSError:
            return None

    def trust(self) -> None:
        return None

    def groups_delivered(self, purpose: str, groups: list[Group]) -> None:
        with self.changed:
            self.came.setdefault(purpose, {}).update({group.id: group for group in groups})
            self.changed.notify_all()
        self.client.taken(purpose, [group.id for group in groups])

    def failed(self, error: GyreError) -> None:
        self.errors.append(error)

    def start_manager(self) -> None:
        self.term += 1
        with open(self.directory / "manager.log", "ab") as log:
            argv = [sys.executable, str(MANAGER), str(self.directory), str(self.term), *self.manager_kind]
            self.manager = subprocess.Popen(argv, env=ENVIRONMENT, stdout=log, stderr=log)

    def start_agent(self, name: str) -> None:
        with open(self.directory / f"{name}.log", "ab") as log:
            argv = [sys.executable, "-m", "gyre.api.cli", "join", str(self.directory), "--name", name]
            argv += ["--engine", "embedded", "--max-running", "8", "--drain-deadline", "5"]
            argv += ["--notice-file", str(self.directory / f"{name}.notice")]
            self.agents[name] = subprocess.Popen(argv, env=ENVIRONMENT, stdout=log, stderr=log)

    def engine_of(self, name: str) -> psutil.Process:
        for process in psutil.Process(self.agents[name].pid).children(recursive=True):
            if "gyre.engines.embedded" in process.cmdline() and "-I" not in process.cmdline():
                return process
        raise AssertionError(f"{name} has no engine")

    def status(self) -> dict[str, Any]:
        where = self.where()
        assert where is not None
        headers = {"Authorization": f"Bearer {where[1]}"}
        return dict(httpx.get(f"{where[0]}/v1/status", headers=headers, timeout=5.0).json())

    def until(self, condition: Callable[[], Any], within_s: float = 40.0) -> None:
        end = time.monotonic() + within_s
        while True:
            try:
                if condition():
                    return
            except (httpx.HTTPError, AssertionError, psutil.Error):
                pass
            assert time.monotonic() < end, f"not within {within_s} s: {self.events()[-5:]}"
            time.sleep(0.03)

    def ready(self) -> None:
        """Both agents serve, started again if they are gone."""
        for name in ("r0", "r1"):
            if name not in self.agents or self.agents[name].poll() is not None:
                self.start_agent(name)
        self.until(
            lambda: (
                [one["version"] for one in self.status()["instances"] if one["state"] == "idle"] == [0, 0]
            ),
            within_s=100.0,  # two processes that load torch, on a machine that may be busy with others
        )

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        try:
            told = [json.loads(line) for line in (self.directory / "events.jsonl").read_text().splitlines()]
        except OSError:
            return []
        return [event for event in told if kind in (None, event["kind"])]

    def generate(self, purpose: str, *disturbances: Callable[[], Any]) -> dict[int, Group]:
        """The samples, with something done to those who generate them at a quarter, at a half, …"""
        before = self.status()["account"]["generated"]
        self.client.request(
            purpose,
            [Group(index, np.arange(1, 6 + index % 3, dtype=np.int32)) for index in range(GROUPS)],
            n=N,
            sampling={"max_new_tokens": self.tokens, "temperature": 1.0, "ignore_eos": True},
            seed=11,
            min_version=0,
        )
        for at, disturb in enumerate(disturbances, 1):
            wanted = before + at * GROUPS * N * self.tokens // (len(disturbances) + 3)
            self.until(lambda wanted=wanted: self.status()["account"]["generated"] >= wanted)
            disturb()
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.came.get(purpose, {})) == GROUPS, 45.0), (
                self.events()[-8:]
            )
        self.until(lambda: self.status()["open_groups"] == 0)
        account = self.status()["account"]
        assert account["missing"] == 0
        assert account["in_flight"] == 0
        assert account["generated"] == account["delivered"] + sum(account["discarded"].values())
        assert set(account["discarded"]) <= {"superseded"}
        assert not self.events("SampleQuarantined")
        assert not self.events("PeerRefused")
        assert not self.events("Fatal")
        assert not self.errors
        return self.came[purpose]

    def be_calm(self) -> None:
        """What is generated undisturbed, of such a length that there is time to disturb it."""
        while True:
            began = time.monotonic()
            self.calm = self.generate(f"calm-{self.tokens}")
            if time.monotonic() - began >= LASTS_S or self.tokens == MOST_TOKENS:
                return
            self.tokens *= 2

    def same(self, groups: dict[int, Group]) -> None:
        assert groups.keys() == self.calm.keys()
        for index, group in groups.items():
            calm = self.calm[index]
            assert np.array_equal(group.prompt_ids, calm.prompt_ids)
            for one, other in zip(group.samples, calm.samples, strict=True):
                assert one.token_ids.tobytes() == other.token_ids.tobytes()
                assert one.logprobs.tobytes() == other.logprobs.tobytes()
                assert one.versions == other.versions
                assert one.finish_reason == other.finish_reason

    def stop(self) -> None:
        self.client.close()
        processes = [*self.agents.values(), *([self.manager] if self.manager is not None else [])]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5.0)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("plane")
    fleet = Fleet(directory)
    try:
        fleet.start_manager()
        model = write_tiny_model(directory / "v0", seed=0)
        folder = list_model_folder(model, version=0)
        fleet.client.publish(0, folder.checksum, model)
        fleet.ready()
        fleet.be_calm()
        assert all(len(s.token_ids) == fleet.tokens for group in fleet.calm.values() for s in group.samples)
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture(autouse=True)
def both(fleet: Fleet) -> None:
    fleet.ready()


def test_undisturbed_runs_agree(fleet: Fleet) -> None:
    fleet.same(fleet.generate("again"))


def test_an_engine_is_killed(fleet: Fleet) -> None:
    fleet.same(fleet.generate("engine", lambda: fleet.engine_of("r0").kill()))
    fleet.until(lambda: fleet.events("EngineDied"))
    died = fleet.events("EngineDied")[-1]
    assert died["instance"] == "r0"
    assert "SIGKILL" in died["error"]
    assert died["tail"]


def test_an_agent_is_killed_and_takes_its_engine_along(fleet: Fleet) -> None:
    engine = fleet.engine_of("r1")
    fleet.same(fleet.generate("agent", lambda: fleet.agents["r1"].kill()))
    fleet.until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
    assert fleet.events("InstanceLeft")[-1]["reason"] == "connection_lost"


def test_the_manager_is_killed_and_the_agents_go_on(fleet: Fleet) -> None:
    def kill() -> None:
        assert fleet.manager is not None
        fleet.manager.kill()
        fleet.manager.wait()
        time.sleep(0.3)
        fleet.start_manager()

    before = fleet.status()["account"]
    fleet.same(fleet.generate("manager", kill))
    back = [event for event in fleet.events("InstanceJoined") if event["term"] == fleet.term]
    assert len(back) == 2
    assert all(event["kept"] == event["held"] for event in back)
    assert sum(event["kept"] for event in back) > 0
    after = fleet.status()["account"]
    assert after["discarded"] == before["discarded"], "something was generated twice"
    assert after["generated"] - before["generated"] == GROUPS * N * fleet.tokens


def test_an_agent_is_stopped_and_goes_on_later(fleet: Fleet) -> None:
    stopped = fleet.agents["r0"]
    fleet.same(fleet.generate("silent", lambda: stopped.send_signal(signal.SIGSTOP)))
    assert fleet.events("InstanceLeft")[-1]["reason"] == "silent"
    stopped.send_signal(signal.SIGCONT)
    fleet.until(lambda: [event["back"] for event in fleet.events("InstanceJoined")[-1:]] == [False])
    fleet.ready()
    assert stopped.poll() is None


def test_a_preemption_notice_hands_over_within_a_second(fleet: Fleet) -> None:
    began: list[float] = []

    def notice() -> None:
        began.append(time.time())
        (fleet.directory / "r0.notice").write_text("")

    fleet.same(fleet.generate("notice", notice))
    assert fleet.agents["r0"].wait(20.0) == 0
    left = fleet.events("InstanceLeft")[-1]
    assert (left["instance"], left["reason"], left["moved"]) == ("r0", "drained", 0)
    (fleet.directory / "r0.notice").unlink()


def test_everything_at_once(fleet: Fleet) -> None:
    def engine_and_manager() -> None:
        assert fleet.manager is not None
        fleet.engine_of("r0").kill()
        fleet.manager.kill()
        fleet.manager.wait()
        fleet.agents["r1"].kill()
        fleet.agents["r1"].wait()
        fleet.start_agent("r1")
        fleet.start_manager()

    def stop_one() -> None:
        fleet.agents["r0"].send_signal(signal.SIGSTOP)
        threading.Timer(2.0, fleet.agents["r0"].send_signal, [signal.SIGCONT]).start()

    fleet.same(fleet.generate("everything", engine_and_manager, stop_one))


def test_sigterm_drains_and_exits_with_0(fleet: Fleet) -> None:
    fleet.agents["r1"].terminate()
    assert fleet.agents["r1"].wait(20.0) == 0
    fleet.until(lambda: len(fleet.status()["instances"]) == 1)
