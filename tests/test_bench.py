"""The benches for GPUs, as far as a machine without one can tell: they begin, and every part they name is there."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"

ASK = """
import json
from gpu_plane import conduct as rollouts
from training_loop import conduct as loop

for parts, bench in ((rollouts.PARTS, rollouts.RolloutBench), (loop.PARTS, loop.Loop)):
    print(json.dumps([name for name, _, _ in parts if not callable(getattr(bench, name, None))]))
for parts, names in ((rollouts.PARTS, rollouts.NAMES), (loop.PARTS, loop.NAMES)):
    print(json.dumps(sorted({name for _, _, needed_by in parts for name in needed_by} ^ set(names))))
"""


@pytest.mark.parametrize("script", ["loop_gpu.py", "rollouts_gpu.py"])
def test_a_gpu_bench_tells_its_parts(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / script), "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"python bench/{script} --out DIR --dry-run" in done.stdout


def test_every_part_of_a_gpu_bench_is_a_method_and_is_needed_by_a_name() -> None:
    environment = {"PYTHONPATH": f"{BENCH}:{BENCH.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=60, env=environment
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[], [], [], []], done.stderr


@pytest.mark.parametrize("package", ["gpu_plane", "training_loop"])
def test_what_modules_of_a_bench_import_from_each_other_is_there(package: str) -> None:
    """Also where it is imported in a function, and no module imports an entry, which would take its place."""
    for path in (BENCH / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            assert not (BENCH / f"{node.module}.py").exists(), f"{path.name} imports {node.module}"
            if node.module.split(".")[0] in ("gpu_plane", "training_loop"):
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
