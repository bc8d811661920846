"""Nothing is left of a killed `gyre` command 10 s later, in whichever of its states the kill finds it and whatever its
home is called."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gyre.api.home import home
from gyre.api.local_ray.sweeper import RECORD
from gyre.errors import StoreError
from gyre.process_identity import ProcessIdentity
from gyre.store import open_store
from gyre.weights.owned_dirs import DRIVER_FILE, default_root
from tests.e2e.conftest import command_of
from tests.waits import GENEROUS_S

GONE_WITHIN_S = 10.0


def what_is_left(place: Path, folder: Path, driver: ProcessIdentity) -> list[str]:
    left = [str(path) for path in folder.glob(f"*{driver.pid}*")]
    for owner in default_root().glob(f"*gyre-weights-*/{DRIVER_FILE}"):
        if owner.read_text() == str(driver):
            left.append(str(owner.parent))
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or ProcessIdentity.of(int(entry.name)) is None:
            continue
        try:
            environment, command = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(f"GYRE_HOME={place}") in environment or os.fsencode(folder) in command:
            left.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return left


@pytest.fixture
def odd_home(tmp_path: Path) -> Path:
    return tmp_path / "gr\u00f6\u00dfe ?#%20 'x'\n"


@pytest.fixture
def folder(odd_home: Path) -> Iterator[Path]:
    """Where the command's Ray will be: not below such a home."""
    made = home(odd_home).ray_temp_dir()
    yield made
    shutil.rmtree(made)


def commands_below(command: subprocess.Popen[bytes]) -> list[str]:
    return [command_of(child) for child in psutil.Process(command.pid).children(recursive=True)]


def before_ray(command: subprocess.Popen[bytes], place: Path, folder: Path) -> bool:
    """The fork server runs, and nothing of Ray's."""
    return any("local_ray.fork_server" in one for one in commands_below(command))


def in_rays_start(command: subprocess.Popen[bytes], place: Path, folder: Path) -> bool:
    """The sweeper's record is there and Ray's first server runs, but `ray.init` has not returned."""
    record = any(folder.glob(f"{RECORD}*{command.pid}*"))
    return record and any("gcs_server" in one for one in commands_below(command))


def while_one_of_its_dead_is_started_anew(
    command: subprocess.Popen[bytes], place: Path, folder: Path
) -> bool:
    """It trains, with weights in shared memory; a vertex has died, and its successor is on its way."""
    if not (place / "gyre.db").exists():
        return False
    with contextlib.suppress(StoreError), open_store(home(place).database_url(), read_only=True) as store:
        events = [event for row in store.jobs() for event in store.journal(row.job_id).events()]
        lost = sum(event.kind == "VertexLost" for event in events)
        return lost > sum(event.kind == "VertexStarted" and event.body["incarnation"] > 1 for event in events)
    return False  # the store is just being made


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("moment", [before_ray, in_rays_start, while_one_of_its_dead_is_started_anew])
def test_nothing_is_left_of_a_killed_command(
    odd_home: Path, folder: Path, moment: Callable[[subprocess.Popen[bytes], Path, Path], bool]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "gyre.api", "demo", "--chaos", "--steps", "40"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "GYRE_HOME": str(odd_home), "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    ) as command:
        driver = ProcessIdentity.of(command.pid)
        assert driver is not None
        try:
            deadline = time.monotonic() + 2 * GENEROUS_S
            while not moment(command, odd_home, folder):
                assert command.poll() is None, "it ended before it was killed"
                assert time.monotonic() < deadline, "the moment did not come"
                time.sleep(0.01)
            assert len(what_is_left(odd_home, folder, driver)) > 1, "nothing but itself, so nothing is to go"
        finally:
            command.kill()
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := what_is_left(odd_home, folder, driver):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
