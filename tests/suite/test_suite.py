"""What runs the tests: nothing that was not proved is green, and nothing outlives it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.skips import is_allowed
from tests.suite.__main__ import ROOT, Run
from tests.suite.parts import Bundle, Part
from tests.suite.verdict import MOST_FLAKES, Result, Verdict, judge, worth_another_run
from tests.waits import GENEROUS_S

ONCE = """
from pathlib import Path
def test_it():
    first = not Path("was-here").exists()
    Path("was-here").touch()
    assert not first
"""

FAMILY = """
import os, subprocess, sys
from pathlib import Path
def test_family():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path("child").write_text(str(child.pid))
    child.returncode = 0
def test_alone():
    assert not Path("/proc", Path("child").read_text()).exists()
"""

QUICK = {
    "PYTHONPATH": str(ROOT),
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_ADDOPTS": "-p pytest_timeout",
}
"""A start of pytest without the plug-ins that these tests do not need takes a third of the time."""


def run(root: Path, files: dict[str, str], **of_part: object) -> tuple[Run, Verdict]:
    """The verdict on a tree with these tests, each file a bundle."""
    for name, source in files.items():
        (root / name).write_text(source)
    bundles = tuple(Bundle(Path(name).stem, (name,)) for name in files)
    options = {"limit_s": GENEROUS_S, "select": "", "environment": QUICK} | of_part
    made = Run([Part("small", bundles, **options)], root / "out", root=root)  # type: ignore[arg-type]
    made.go()
    failed = [test for test in made.tests() if test.outcome == "failed"]
    again = made.again(worth_another_run(failed))
    return made, judge(made.tests(), again, made.problems, may_skip=is_allowed)


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {test.id.rpartition("::")[2]: test.outcome for test in verdict.tests}


def test_what_passes_is_counted(tmp_path: Path) -> None:
    _, verdict = run(tmp_path, {"test_a.py": "def test_a(): pass", "test_b.py": "def test_b(): pass"})
    assert verdict.green
    assert verdict.closing_line() == "2 passed, 0 failed, 0 skipped"


def test_what_fails_twice_is_red_and_what_passes_by_itself_is_a_flake(tmp_path: Path) -> None:
    _, verdict = run(tmp_path, {"test_red.py": "def test_red(): assert 1 == 2", "test_once.py": ONCE})
    assert outcomes(verdict) == {"test_red": "failed", "test_it": "flaky"}
    assert not verdict.green
    assert "assert 1 == 2" in verdict.of("failed")[0].text
    assert "assert not first" in verdict.of("flaky")[0].text


def test_what_it_left_is_ended_before_a_test_is_run_again(tmp_path: Path) -> None:
    made, verdict = run(tmp_path, {"test_family.py": FAMILY})
    assert outcomes(verdict) == {"test_family": "passed", "test_alone": "flaky"}
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))
    assert "ended what was left" in made.ended[0].log.read_text()


def test_a_process_that_dies_takes_one_test_along_and_the_rest_is_run(tmp_path: Path) -> None:
    dies = "import os\ndef test_a(): pass\ndef test_b(): os._exit(0)\ndef test_c(): pass"
    _, verdict = run(tmp_path, {"test_dies.py": dies})
    assert outcomes(verdict) == {"test_a": "passed", "test_b": "failed", "test_c": "passed"}
    assert not verdict.green


def test_one_that_never_gives_the_interpreter_back_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.suite.__main__.BEYOND_LIMIT_S", 1.0)
    monkeypatch.setattr("tests.suite.reaper.INTERRUPTED_S", 1.0)
    hangs = (
        "import ctypes, pytest\n@pytest.mark.timeout(1)\n"
        "def test_hangs(): ctypes.PyDLL(None).sleep(600)\ndef test_after(): pass"
    )
    begun = time.monotonic()
    _, verdict = run(tmp_path, {"test_hangs.py": hangs})
    assert outcomes(verdict) == {"test_hangs": "failed", "test_after": "passed"}
    assert time.monotonic() - begun < 2 * GENEROUS_S


def test_a_part_that_does_not_end_in_time_has_failed(tmp_path: Path) -> None:
    slow = "import time\ndef test_a(): pass\ndef test_slow(): time.sleep(600)\ndef test_after(): pass"
    _, verdict = run(tmp_path, {"test_slow.py": slow}, limit_s=8.0)
    assert not verdict.green
    (late, left) = verdict.problems
    assert "did not end within 8 s" in late
    assert "tests were not run" in left


@pytest.mark.parametrize(
    "source", ["", "import nothing_of_this_name", "def test_a(:"], ids=["no test", "no module", "no Python"]
)
def test_nothing_run_is_red(tmp_path: Path, source: str) -> None:
    _, verdict = run(tmp_path, {"test_fine.py": "def test_fine(): pass", "test_none.py": source})
    assert not verdict.green


def test_a_skip_is_red_where_it_could_have_been_run() -> None:
    skipped = Result("a", "skipped", "Skipped: there is no Chromium on this machine")
    tests = [Result("b", "passed"), skipped]
    assert judge(tests, {}, [], may_skip=lambda _: True).green
    assert not judge(tests, {}, [], may_skip=lambda reason: "GPU" in reason).green


def test_nothing_but_skips_is_red() -> None:
    assert not judge([Result("a", "skipped", "Skipped: no GPU")], {}, [], may_skip=lambda _: True).green


def test_many_flakes_are_red_and_many_failures_are_not_run_again() -> None:
    def flakes(count: int) -> Verdict:
        first = [Result(str(number), "failed", "why") for number in range(count)]
        return judge(
            first, {test.id: Result(test.id, "passed") for test in first}, [], may_skip=lambda _: True
        )

    assert flakes(MOST_FLAKES).green
    assert not flakes(MOST_FLAKES + 1).green
    failed = [Result(str(number), "failed") for number in range(MOST_FLAKES + 1)]
    assert worth_another_run(failed) == []
    assert worth_another_run(failed[1:]) == ["1", "2", "3"]


def test_the_command_says_it_by_its_status_and_its_last_line(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "tests.suite",
        "fast",
        "--out",
        str(tmp_path),
        "--",
        "tests/test_philox.py",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=GENEROUS_S * 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "3 passed, 0 failed, 0 skipped"
    none = subprocess.run(
        [*words, "-k", "nothing"], cwd=ROOT, capture_output=True, text=True, timeout=GENEROUS_S * 2
    )
    assert none.returncode == 1
    assert none.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"
