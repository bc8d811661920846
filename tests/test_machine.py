"""What tests make on the machine is bounded, named for its owner, and removed after an owner that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import machine
from tests.machine import ControlGroup, control_group, is_abandoned, owned_folder, owned_name, small_disk
from tests.waits import GENEROUS_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts and control groups are Linux's")

SUITE = """
import time
from pathlib import Path
from tests.machine import control_group, small_disk

def test_holds_what_it_made():
    with small_disk(256) as disk, control_group() as group:
        Path("made").write_text(f"{disk.path}\\n{group.path}")
        Path("made").rename("ready")
        time.sleep(600)
"""


def test_a_small_disk_is_full_without_a_byte_written_and_has_room_again() -> None:
    with small_disk(1024) as disk:
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.path / "more").write_bytes(b"x" * 8192)
        disk.resize(1024)
        (disk.path / "more").write_bytes(b"x" * 8192)
    assert not disk.path.exists()


def test_a_disk_is_taken_off_after_a_failure_and_under_an_open_file() -> None:
    made = small_disk(64)
    disk = made.__enter__()
    with (disk.path / "held").open("w"):
        assert not made.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert disk.path not in machine._mounts()
    assert not disk.path.parent.exists()


def test_a_control_group_goes_with_those_in_it() -> None:
    with control_group() as group, subprocess.Popen(["sleep", "600"]) as sleeper:
        group.take(sleeper.pid)
        machine._remove_group(group.path)
        assert sleeper.wait(GENEROUS_S) == -signal.SIGKILL
        assert not group.path.exists()
        group.path.mkdir()  # for the end of the block


@pytest.mark.parametrize(
    ("name", "abandoned"),
    [
        (owned_name("disk"), False),
        (f"{owned_name('disk')}.x8s_1", False),
        (f"gt.disk.{os.getpid()}.{machine.started(os.getpid()) + 1}", True),
        ("gt.disk.99999999.1", True),
        ("gt.disk.1.x", False),
        ("gt.disk", False),
        ("other", False),
    ],
    ids=["mine", "mine with a suffix", "a pid given again", "nobody's", "no time", "no owner", "foreign"],
)
def test_what_is_abandoned(name: str, abandoned: bool) -> None:
    assert is_abandoned(name) is abandoned


def test_a_sweep_leaves_alone_what_is_owned() -> None:
    with owned_folder("disk") as folder:
        assert str(folder) not in machine.sweep()
        assert folder.is_dir()


def test_the_next_run_removes_what_a_killed_run_made(tmp_path: Path) -> None:
    (tmp_path / "test_holding.py").write_text(SUITE)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_holding.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        deadline = time.monotonic() + GENEROUS_S
        while not (tmp_path / "ready").exists():
            if run.poll() is not None:
                assert run.stdout is not None
                said = run.stdout.read().decode()
                assert run.returncode == 0, said
                assert " skipped" in said, said
                pytest.skip(f"mounts or control groups cannot be made here: {said}")
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGKILL)
    disk, group = map(Path, (tmp_path / "ready").read_text().splitlines())
    assert disk in machine._mounts()
    assert group.is_dir()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/test_machine.py"],
        cwd=Path(__file__).parents[1],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=GENEROUS_S,
    )
    assert disk not in machine._mounts()
    assert not disk.parent.exists()
    assert not group.exists()


def test_a_starved_group_kills_who_is_in_it() -> None:
    hungry = "import sys; sys.stdin.readline(); held = [bytes(range(256)) * 4096 for _ in range(64)]"
    with (
        control_group() as group,
        subprocess.Popen([sys.executable, "-c", hungry], stdin=subprocess.PIPE) as one,
    ):
        assert isinstance(group, ControlGroup)
        group.take(one.pid)
        group.starve()
        one.communicate(b"\n", timeout=GENEROUS_S)
        assert one.returncode == -signal.SIGKILL
