"""The bench for GPUs, as far as a machine without one can tell: it begins, and every part it names is there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"

PACKAGES = [folder.name for folder in BENCH.iterdir() if any(folder.glob("*.py"))]


def test_the_gpu_bench_tells_its_parts() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "job_gpu.py"), "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "engine, trainer, colocated, job, kills" in done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_what_modules_of_a_bench_import_from_each_other_is_there(package: str) -> None:
    """Also where it is imported in a function, and no module imports an entry, which would take its place."""
    for path in (BENCH / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            assert not (BENCH / f"{node.module}.py").exists(), f"{path.name} imports {node.module}"
            if node.module.split(".")[0] in PACKAGES:
                names = {alias.name for alias in node.names}
                assert names <= _names_in(BENCH / node.module.replace(".", "/")), (
                    f"{path.name}: {node.module}"
                )


def _names_in(module: Path) -> set[str]:
    """What can be imported from a module, or from a folder of modules."""
    if module.is_dir():
        return {path.stem for path in module.glob("*.py")}
    names: set[str] = set()
    for node in ast.parse(module.with_suffix(".py").read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {
                    one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)
                }
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.ImportFrom(names=imported):
                names |= {alias.name for alias in imported}
    return names
