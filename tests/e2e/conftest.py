"""The suite's Ray cluster for the tests that can share one, and `gyre` as a process with a terminal's Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from gyre.api.cli import main
from gyre.api.handle import JobHandle
from gyre.store import open_store

ENDS_WITHIN_S = 110.0
GYRE = (sys.executable, "-m", "gyre.api")
HERE = Path(__file__).parent


@pytest.fixture
def short_home() -> Iterator[Path]:
    """A GYRE_HOME of its own; short, for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="ge", dir="/tmp") as folder:
        yield Path(folder)


@dataclass
class Shared:
    """The suite's Ray cluster, and the home of its jobs."""

    address: str
    home: Path

    def gyre(self, *arguments: str, timeout_s: float = ENDS_WITHIN_S) -> Ended:
        """Run a verb in a process of its own, until it ends."""
        return Process.start(self.home, *arguments, ray_address=self.address).end(timeout_s)

    def verb(self, *arguments: str) -> Ended:
        """Run a verb in this process, which is another one than any job's."""
        result = CliRunner(env={"GYRE_HOME": str(self.home)}).invoke(main, arguments)
        return Ended(result.exit_code, result.stdout, result.stderr)

    def submit(self, builder: Any, name: str = "") -> JobHandle:
        handle: JobHandle = builder.build().submit(name or f"e2e-{uuid.uuid4().hex[:8]}", home_path=self.home)
        return handle


@pytest.fixture(scope="package")
def shared(ray_cluster: str) -> Iterator[Shared]:
    with tempfile.TemporaryDirectory(prefix="ge", dir="/tmp") as folder:
        yield Shared(ray_cluster, Path(folder))


@dataclass
class Ended:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


@dataclass
class Process:
    """`gyre` (or a script) in the foreground of a terminal: a process group of its own, which Ctrl-C reaches whole."""

    process: subprocess.Popen[str]
    home: Path
    seen: set[psutil.Process] = field(default_factory=set)

    @classmethod
    def start(
        cls, home: Path, *arguments: str, ray_address: str = "", command: tuple[str, ...] = GYRE
    ) -> Process:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "GYRE_"))}
        environment = {**kept, "GYRE_HOME": str(home), "PYTHONPATH": str(HERE.parents[1])}
        if ray_address:
            environment["RAY_ADDRESS"] = ray_address
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        return cls(process, home)

    def ctrl_c(self) -> None:
        self.look()
        os.killpg(self.process.pid, signal.SIGINT)

    def look(self) -> None:
        """Remember every process that came from this one: also those that change their parent later."""
        try:
            self.seen.update(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return

    def until(self, what: Callable[[], Any], timeout_s: float = ENDS_WITHIN_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            self.look()
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"{what.__name__} did not come true in {timeout_s:g} s"
            time.sleep(0.1)
        return found

    def end(self, timeout_s: float = ENDS_WITHIN_S) -> Ended:
        self.look()
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {timeout_s:g} s: {out}{err}") from None
        return Ended(self.process.returncode, out, err)

    def nothing_left(self, within_s: float = 60.0) -> None:
        """No process that it started, no process of its home, no Ray session, no job that is still open."""
        self.no_process_left(within_s)
        assert list((self.home / "ray").glob("session_*")) == []
        if (self.home / "gyre.db").exists():
            with open_store(f"sqlite:///{self.home / 'gyre.db'}") as store:
                assert store.jobs(live=True) == []

    def no_process_left(self, within_s: float, *, but_agents: bool = False) -> None:
        """`but_agents`: two small agents of Ray's own look for a killed cluster for a minute; they hold nothing."""
        deadline = time.monotonic() + within_s
        while left := [
            process for process in self._left() if _alive(process) and not (but_agents and _is_agent(process))
        ]:
            assert time.monotonic() < deadline, [command_of(process)[:200] for process in left]
            time.sleep(0.1)

    def kill_agents(self) -> None:
        for process in self.seen:
            if _alive(process) and _is_agent(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _left(self) -> set[psutil.Process]:
        found = set(self.seen)
        for process in psutil.process_iter(["cmdline"]):
            if any(str(self.home) in part for part in process.info["cmdline"] or ()):
                found.add(process)
        return found


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> str:
    """Its command line; nothing once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_agent(process: psutil.Process) -> bool:
    return "agent" in command_of(process).lower()
