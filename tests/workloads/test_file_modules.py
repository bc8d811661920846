"""What a user's file defines is there for the processes that its functions start, too."""

from __future__ import annotations

import multiprocessing
import stat
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from gyre.workloads import file_modules
from gyre.workloads.file_modules import module_of_file


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "gyre_file_of_a_test"
    sys.modules.pop("gyre_file_of_a_test", None)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_pool_of_new_processes_finds_its_functions(name: str, tmp_path: Path, method: str) -> None:
    """Its processes died at the import, and were replaced for ever."""
    file = tmp_path / "own.py"
    file.write_text(
        "from pathlib import Path\nHERE = Path(__file__).name\ndef square(x): return HERE, x * x\n"
    )
    module = module_of_file(name, file)
    with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as pool:
        assert list(pool.map(module.square, [2, 3], timeout=60)) == [("own.py", 4), ("own.py", 9)]


def test_what_does_not_load_leaves_nothing(name: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("raise ValueError('mine')\n")
    before = list(sys.path)
    with pytest.raises(ValueError, match="mine"):
        module_of_file(name, file)
    with pytest.raises(ImportError, match="no Python file"):
        module_of_file(name, tmp_path / "gone.py")
    assert name not in sys.modules
    assert sys.path == before


def test_a_place_that_others_may_write_to_is_not_used(name: str, tmp_path: Path) -> None:
    """Whoever can write there could have code run by the pool's processes."""
    file = tmp_path / "own.py"
    file.write_text("x = 1\n")
    module_of_file(name, file)
    (root,) = (tmp_path / "temporary").iterdir()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o777)
    with pytest.raises(OSError, match="another user's"):
        file_modules._let_others_import(name, file)
    assert module_of_file(name, file).x == 1, "without it everything else works"
