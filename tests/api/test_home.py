"""GYRE_HOME is any path that the file system takes, and its owner's alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gyre.api.home import home
from gyre.errors import ConfigError
from gyre.store import open_store

ODD = [
    "with spaces",
    "größe-家",
    "a?b=c#d%20e&f",
    "%3F",
    "'quotes\" and `$(x)`",
    "new\nline",
    "back\\slash",
    "x" * 200,
    "a:b@c",
]


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_the_store_of_a_home_is_within_it(tmp_path: Path, name: str) -> None:
    place = home(tmp_path / name)
    place.check_writable()
    open_store(place.database_url()).close()
    assert (tmp_path / name / "gyre.db").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_rays_folder_is_short_and_plain(tmp_path: Path, name: str) -> None:
    folder = home(tmp_path / name).ray_temp_dir()
    try:
        assert str(folder).isascii()
        assert " " not in str(folder)
        assert len(str(folder)) <= 42
        assert folder.stat().st_mode & 0o777 == 0o700
        assert home(tmp_path / name).ray_temp_dir() == folder
    finally:
        folder.rmdir()


def test_a_folder_of_another_is_not_taken_for_rays(tmp_path: Path) -> None:
    place = home(tmp_path / "x y")
    foreign = place.ray_temp_dir()
    foreign.rmdir()
    (tmp_path / "trap").mkdir()
    foreign.symlink_to(tmp_path / "trap")
    other = None
    try:
        other = place.ray_temp_dir()
        assert other != foreign
        assert other.stat().st_mode & 0o777 == 0o700
    finally:
        foreign.unlink()
        if other is not None:
            other.rmdir()
    assert list((tmp_path / "trap").iterdir()) == []


def test_a_home_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by every user"):
        home(tmp_path).check_writable()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_home_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 4711, 4711)
        code = (
            "import os, sys; from gyre.api.home import home; from gyre.errors import ConfigError\n"
            "os.setuid(4712)\n"
            "try: home(sys.argv[1]).check_writable()\n"
            "except ConfigError as error: print(error)"
        )
        told = subprocess.run(
            [sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    assert "belongs to another user (uid 4711)" in told


def test_a_new_home_is_its_owners_alone(tmp_path: Path) -> None:
    home(tmp_path / "new").check_writable()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    home(tmp_path / "newer").job_directory("job")
    assert (tmp_path / "newer").stat().st_mode & 0o777 == 0o700


def test_a_home_whose_path_is_no_text_is_refused_and_a_link_to_it_is_taken(tmp_path: Path) -> None:
    (tmp_path / "\udcff").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        home(tmp_path / "\udcff")
    (tmp_path / "link").symlink_to(tmp_path / "\udcff")
    place = home(tmp_path / "link")
    place.check_writable()
    open_store(place.database_url()).close()
    assert (tmp_path / "\udcff" / "gyre.db").is_file()
