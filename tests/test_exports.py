"""What packages export: every name is there, whether it is imported at once or on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import gyre

_ROOT = Path(gyre.__file__).parent


def _exporting() -> list[str]:
    """The packages that say what they export, or have exports that are resolved on first use."""
    found = []
    for file in sorted(_ROOT.rglob("__init__.py")):
        names = {
            target.id
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        if names & {"__all__", "_EXPORTS"}:
            found.append(".".join(("gyre", *file.parent.relative_to(_ROOT).parts)))
    return found


@pytest.mark.parametrize("package", _exporting())
def test_every_exported_name_is_there(package: str) -> None:
    module = import_module(package)
    assert set(getattr(module, "_EXPORTS", ())) <= set(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


PUBLIC = {
    "gyre": [
        "BaseTrainer",
        "BaseWorkload",
        "Group",
        "GyreError",
        "JobHandle",
        "Progress",
        "RLJob",
        "RLJobBuilder",
        "Sample",
        "VersionRun",
        "WorkloadContext",
        "__version__",
        "operator",
    ],
    "gyre.api": ["AsyncJobHandle", "GyreClient", "JobHandle", "RLJob", "RLJobBuilder", "load_job_file"],
}
"""What users may import; a name that goes breaks their jobs."""


@pytest.mark.parametrize("package", PUBLIC)
def test_what_users_import_is_exactly_this(package: str) -> None:
    module = import_module(package)
    assert list(module.__all__) == PUBLIC[package]
    assert set(module._MODULES) == set(PUBLIC[package]) - {"__version__"}
    without = [name for name in module.__all__ if name != "__version__" and not getattr(module, name).__doc__]
    assert without == [], "these have no docstring"


def test_the_front_door_costs_nothing() -> None:
    """`import gyre` and `import gyre.api` import none of what they export."""
    code = "import sys, gyre, gyre.api; print(sorted(n for n in sys.modules if n.startswith('gyre.')))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "['gyre.api', 'gyre.lazy_exports', 'gyre.version']"
