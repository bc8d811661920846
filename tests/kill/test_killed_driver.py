"""Nothing is left of a killed `gyre` command 10 s later, whenever the kill comes and whatever its home is called."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre.api.home import home
from gyre.process_identity import ProcessIdentity
from gyre.weights.owned_dirs import DRIVER_FILE, default_root

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


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize("after_s", [1.0, 4.0, 10.0, 20.0])
def test_nothing_is_left_of_a_killed_command(odd_home: Path, after_s: float) -> None:
    folder = home(odd_home).ray_temp_dir()
    with subprocess.Popen(
        [sys.executable, "-m", "gyre.api", "demo", "--steps", "500"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "GYRE_HOME": str(odd_home), "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    ) as command:
        driver = ProcessIdentity.of(command.pid)
        assert driver is not None
        time.sleep(after_s)  # the kill comes at any moment of the start or of training
        assert command.poll() is None
        command.kill()
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := what_is_left(odd_home, folder, driver):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
