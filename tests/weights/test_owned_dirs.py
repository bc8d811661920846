"""Folders of weights go with their owners, however these end, or to who continues their work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gyre.weights.owned_dirs import OwnedDir, remove_left
from tests.waits import GENEROUS_S

HOLD = (
    "import sys, time; from pathlib import Path; from gyre.weights.owned_dirs import OwnedDir\n"
    "claim = OwnedDir(Path(sys.argv[1]), 'first'); (claim.path / 'model').write_bytes(b'x' * 1000)\n"
    "print(claim.path, flush=True); time.sleep(60)"
)


@pytest.fixture
def dead(tmp_path: Path):
    """Starts an owner; what it gives kills it and waits."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().decode().strip())

        def kill() -> Path:
            other.kill()
            other.wait(GENEROUS_S)
            return path

        yield kill
        other.kill()


def test_a_living_owners_folder_stays_and_a_killed_ones_goes_with_the_next(dead, tmp_path: Path) -> None:
    mine = OwnedDir(tmp_path, "mine")
    assert len(list(tmp_path.iterdir())) == 2
    dead()
    third = OwnedDir(tmp_path, "third")
    assert set(tmp_path.iterdir()) == {mine.path, third.path}
    mine.close()
    third.close()
    assert list(tmp_path.iterdir()) == []


def test_the_successor_takes_over_what_was_there(dead, tmp_path: Path) -> None:
    assert OwnedDir(tmp_path, "first").path != dead()
    successor = OwnedDir(tmp_path, "first")
    assert (successor.path / "model").read_bytes() == b"x" * 1000
    successor.close()


def test_two_owners_of_one_purpose_have_two_folders(tmp_path: Path) -> None:
    one, two = OwnedDir(tmp_path, "same"), OwnedDir(tmp_path, "same")
    assert one.path != two.path
    one.close(keep=True)
    assert OwnedDir(tmp_path, "same").path == one.path
    two.close()


def test_when_nobody_will_come_what_the_dead_left_goes_and_the_living_keep_theirs(
    dead, tmp_path: Path
) -> None:
    living, other = OwnedDir(tmp_path, "first"), OwnedDir(tmp_path, "other")
    other.close(keep=True)  # of another job, whose successor may come
    assert remove_left(tmp_path, ["first"]) == []
    path = dead()
    assert remove_left(tmp_path, ["first", "never was"]) == [path]
    assert set(tmp_path.iterdir()) == {living.path, other.path}
    living.close()
    assert remove_left(tmp_path / "nowhere", ["first"]) == []


def test_who_is_about_to_be_ended_takes_its_folder_away_and_keeps_its_place(tmp_path: Path) -> None:
    owned = OwnedDir(tmp_path, "first")
    (owned.path / "model").write_bytes(b"x" * 1000)
    owned.unlink()
    assert list(tmp_path.iterdir()) == []
    assert OwnedDir(tmp_path, "first").path != owned.path
    owned.close()


def test_a_link_that_lies_in_a_dead_owners_place_is_neither_followed_nor_emptied(
    dead, tmp_path: Path
) -> None:
    strangers = tmp_path.parent / "strangers"
    strangers.mkdir()
    (strangers / "precious").write_bytes(b"x")
    left = dead()
    (left / "model").unlink()
    left.rmdir()
    left.symlink_to(strangers)
    successor = OwnedDir(tmp_path, "first")
    assert not successor.path.is_symlink()
    assert (strangers / "precious").exists()
    successor.close()
    remove_left(tmp_path, [])
    assert (strangers / "precious").exists()


def test_a_folder_that_others_may_write_to_is_not_taken_over(dead, tmp_path: Path) -> None:
    left = dead()
    left.chmod(0o777)
    assert OwnedDir(tmp_path, "first").path != left
