"""DLRover's own tests of its unified API, run as they lie in its wheel, and again with Gyre in its place.

The wheel has the tests, but not all that they import. So copies are made in a folder of the test's: of the modules, and
of what is here named `copied_…`, the same for both. Nothing of DLRover's is in this repository.

For Gyre, a copy says `gyre_dlrover` where DLRover's says `dlrover.python.unified`, and takes Gyre's error for
pydantic's, too. Both lose the imports of what the wheel lacks, and the tests that need those.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
OWN = ROOT / "integrations" / "gyre-dlrover"
ENVIRONMENT = ROOT / ".venv-dlrover"
PYTHONS = {"dlrover": ENVIRONMENT / "bin" / "python", "gyre": Path(sys.executable)}

RENAMED = {
    "gyre": (
        (r"\bdlrover\.python\.unified\.tests\.base\b", "of_both"),
        (r"\bdlrover\.python\.unified\b", "gyre_dlrover"),
        (r"from pydantic import ValidationError", "from of_both import ValidationError"),
    ),
    "dlrover": ((r"\bdlrover\.python\.unified\.tests\.base\b", "of_both"),),
}

INNER = ("controller", "tests.fixtures", "backend")
"""Below `dlrover.python.unified`: what these modules have is inside DLRover, or not in the wheel."""


def their_tests() -> Path:
    """The folder of DLRover's tests in its environment."""
    [found] = ENVIRONMENT.glob("lib/python*/site-packages/dlrover/python/unified/tests")
    return found


def copy_module(module: Path, to: Path, side: str) -> None:
    """One module, without what imports DLRover's inner modules, and under its side's names."""
    text = without_inner(module.read_text())
    for pattern, name in RENAMED[side]:
        text = re.sub(pattern, name, text)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text)


def without_inner(text: str) -> str:
    """The source without imports of inner modules, and without the functions at the top that use what they import."""
    tree = ast.parse(text)
    lost: set[str] = set()
    cut: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and _is_inner(statement.module or ""):
            lost |= {alias.asname or alias.name for alias in statement.names}
            cut.append(statement)
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            inside = [node for node in ast.walk(statement) if isinstance(node, ast.ImportFrom)]
            if names & lost or any(_is_inner(node.module or "") for node in inside):
                cut.append(statement)
    lines = text.splitlines()
    for statement in cut:
        first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
        for at in range(first - 1, statement.end_lineno or first):
            lines[at] = ""
    return "\n".join(lines) + "\n"


def _is_inner(module: str) -> bool:
    below = module.removeprefix("dlrover.python.unified.")
    return below != module and below.startswith(INNER)


@dataclass
class Ran:
    """How a side's tests ended, by name, and what the user's code printed in all its processes."""

    outcomes: dict[str, str]
    printed: Counter[str]
    told: str


def run(side: str, place: Path, modules: list[str], timeout_s: float) -> Ran:
    """Copy the modules (paths in DLRover's folder of tests; of a package all) and run them by pytest."""
    here = Path(__file__).parent
    # The depth that the modules have in the wheel: one of them looks for a script from there.
    folder = place / "dlrover" / "python" / "unified" / "tests" / "integration_test"
    folder.mkdir(parents=True)
    shutil.copy(here / "copied_conftest.py", folder / "conftest.py")
    shutil.copy(here / "copied_base.py", folder / "of_both.py")
    shutil.copy(here / "copied_plugin.py", folder / "copied_plugin.py")
    theirs = their_tests()
    for module in modules:
        for path in [theirs / module] if module.endswith(".py") else sorted((theirs / module).glob("*.py")):
            package = path.parent.name if not module.endswith(".py") else ""
            copy_module(path, folder / package / path.name, side)
    tests = [str(path) for path in sorted(folder.rglob("*test*.py")) if _is_test(path)]
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RAY_", "PYTEST", "PYTHONPATH"))
    }
    own = {
        "PYTHONPATH": os.pathsep.join([str(folder), *([str(ROOT), str(OWN)] if side == "gyre" else [])]),
        "GYRE_HOME": str(place / "home"),
        "RAY_PLACE": str(place / "r"),
        "OUTCOMES": str(place / "outcomes.json"),
        "RAY_DEDUP_LOGS": "0",
    }
    options = ["-p", "no:cacheprovider", "-p", "no:timeout", "-p", "copied_plugin", "-q"]
    process = subprocess.Popen(
        [str(PYTHONS[side]), "-m", "pytest", *options, "-c", "/dev/null", "--rootdir", str(folder), *tests],
        cwd=folder,
        env=kept | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=timeout_s)
    finally:
        end(process)
    assert (place / "outcomes.json").exists(), told[-4000:]
    outcomes = json.loads((place / "outcomes.json").read_text())
    return Ran(outcomes, printed_in(place, folder), told)


def end(process: subprocess.Popen[str]) -> None:
    """End pytest, which ends its Ray; Ray's processes end with it also where it is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.communicate(timeout=30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _is_test(path: Path) -> bool:
    return path.name.startswith("test_") or path.name.endswith("_test.py")


def printed_in(place: Path, folder: Path) -> Counter[str]:
    """The lines in any process's log that a `print` of the copied modules has written, each as often as it is there."""
    begins = tuple(begin for path in folder.rglob("*.py") for begin in _prints(path.read_text()))
    found: Counter[str] = Counter()
    # Ray has a worker's standard output in a file of its own, Gyre a log of each vertex.
    logs = [*(place / "r").glob("session_2*/logs/worker-*.out"), *(place / "home").rglob("*.log")]
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            for begin in begins:
                at = line.find(begin)
                if at >= 0:
                    found[line[at:]] += 1
                    break
    return found


def _prints(source: str) -> list[str]:
    """What the lines begin with that the source prints."""
    begins = []
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
            and node.args
        ):
            text = node.args[0]
            if isinstance(text, ast.JoinedStr):
                text = text.values[0]
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and len(text.value) > 8:
                begins.append(text.value)
    return begins
