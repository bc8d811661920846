"""The bench for GPUs, as far as a machine without one can tell: it begins, and every part it names is there. And README
states what was measured."""

from __future__ import annotations

import ast
import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))
readme: Any = importlib.import_module("readme")

PACKAGES = [folder.name for folder in BENCH.iterdir() if any(folder.glob("*.py"))]


def test_the_gpu_bench_tells_its_parts() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "job_gpu.py"), "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "engine, trainer, colocated, job, kills, chaos" in done.stdout


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


def test_a_kill_costs_what_its_journal_says() -> None:
    """Steps end when the trainer says so, those made again are no progress, and who died unasked is told."""
    told = subprocess.run(
        [sys.executable, "-c", _RECOVERY, str(BENCH)], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stderr
    of_actor, of_master, others = json.loads(told.stdout)
    assert of_actor == {
        "step": 3,
        "next_step_s": 26.0,
        "more_steps_s": 29.0,
        "back_s": 20.0,
        "restored": [{"after_s": 22.0, "role": "actor", "source": "disk", "step": 1, "seconds": 1.5}],
        "steps_redone": 3,
    }
    assert (of_master["step"], of_master["next_step_s"], of_master["more_steps_s"]) == (8, 0.5, None)
    assert of_master["back_s"] == 2.0
    assert others == [{"at_s": 13.0, "vertex": "actor-1", "cause": "silent"}]


_RECOVERY = """
import json, sys
sys.path.insert(0, sys.argv[1])
from job_plane.chaos import Chaos, recovery

def event(at_s, kind, **body):
    return {"at": 1000.0 + at_s, "at_s": at_s, "kind": kind, "body": body}

def step(number, made_s, heard_s=None):
    metrics = {"tokens": 10, "at": 1000.0 + made_s}
    return event(heard_s or made_s, "StepCompleted", step=number, metrics=metrics)

events = [
    event(0.0, "JobSubmitted"),
    *(step(number, 7.0 + number) for number in (1, 2, 3)),
    step(4, 11.01),
    event(12.0, "VertexLost", vertex="actor-0", cause="process_died"),
    event(13.0, "VertexLost", vertex="actor-1", cause="silent"),
    event(31.0, "VertexStarted", vertex="actor-0"),
    event(33.0, "GangRestored", role="actor", source="disk", step=1, seconds=1.5),
    step(3, 36.0),
    *(step(number, 32.0 + number) for number in (5, 6, 7, 8)),
    step(9, 41.5, heard_s=43.0),
    event(43.0, "MasterStarted"),
]
chaos = Chaos(["actor", "master"], 1, 2)
chaos.rows = [
    {"kind": "actor", "vertex": "actor-0", "at_s": 11.0},
    {"kind": "master", "vertex": "master", "at_s": 41.0},
]
told = chaos.summary(events)
of_actor, of_master = ({k: v for k, v in row.items() if k not in chaos.rows[0]} for row in told["kills"])
print(json.dumps([of_actor, of_master, told["deaths_of_others"]]))
"""


@pytest.mark.parametrize(
    "plan", sorted((BENCH / "job_plane" / "plans").iterdir()), ids=lambda plan: plan.stem
)
def test_every_line_of_a_plan_is_a_case(plan: Path) -> None:
    """By the parser of the bench, and by Gyre's own: the job of each is one that `gyre run` takes."""
    done = subprocess.run(
        [sys.executable, "-c", _PLANNED, str(BENCH), str(plan)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


_PLANNED = """
import shlex, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import job_gpu
from gyre.config.parse import apply_overrides, parse_job

lines = [line.split("#")[0].strip() for line in Path(sys.argv[2]).read_text().splitlines()]
cases = [job_gpu.arguments().parse_args(["--out", "out", *shlex.split(line)]) for line in lines if line]
for given in cases:
    case = job_gpu.case_of(given)
    parse_job(apply_overrides(case.spec(Path("model")), given.set))
    assert all(part in job_gpu.PARTS for parts in given.part for part in parts.split("+")), given.part
print(len(cases))
"""


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


_DETACHES = """
import os, subprocess, sys, time
if os.fork():
    sys.exit(0)
os.setsid()
if os.fork():
    sys.exit(0)
until = time.process_time() + 0.4
while time.process_time() < until:
    pass
time.sleep(600)
"""

_COUNTED = """
import json, pathlib, shlex, sys
sys.path.insert(0, sys.argv[1])
import commits
commits.LEAVE_S = 1.5
commits.become_subreaper()
folder = pathlib.Path(sys.argv[2])
(folder / "detaches.py").write_text(sys.argv[3])
side = commits.Side("older", "0", "", folder, sys.executable)
place = commits.Account.place()[0] if sys.argv[4] == "group" else None
account = commits.Account(place)
row = commits.run(side, "{python} " + shlex.quote(str(folder / "detaches.py")), account, folder / "home")
account.close()
print(json.dumps(row | {"left": len(commits.psutil.Process().children(recursive=True))}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")
@pytest.mark.parametrize("how", ["group", "subreaper"])
def test_what_a_command_detaches_is_counted_and_ended(how: str, tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", _COUNTED, str(BENCH), str(tmp_path), _DETACHES, how],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert told.returncode == 0, told.stderr
    row = json.loads(told.stdout)
    assert row["cpu_s"] >= 0.4
    assert row["ended"]
    assert not row["left"]


# -- what README states -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "figure", readme.FIGURES, ids=lambda figure: f"{figure.file}:{figure.name}".replace(" ", "_")
)
def test_a_figure_of_a_document_is_the_one_that_was_measured(figure: Any) -> None:
    said = readme.stated(figure, (readme.ROOT / figure.file).read_text())
    assert readme.shown(figure, readme.measured()) in (said, None), "python bench/readme.py --write"


def test_what_readme_says_of_the_demo_in_words_is_so_if_it_was_measured() -> None:
    text = (readme.ROOT / "README.md").read_text()
    assert readme.DEMO_CLAIM in text
    assert readme.MEMORY_CLAIM in text
    found = readme.measured()
    if "demo/accuracy_last" in found:
        assert 0.28 < found["demo/accuracy_first"] < 0.42
        assert found["demo/accuracy_last"] > 0.8
        assert found["demo/memory_gib"] <= readme.MOST_GIB


def test_the_times_of_readme_are_those_of_the_bench_of_failures() -> None:
    of_bench = readme.recovery_figures(json.loads((readme.RESULTS / "failover.json").read_text()))
    found = readme.measured()
    assert {name: found[name] for name in of_bench} == pytest.approx(of_bench, abs=1e-4)
    assert {figure.name for figure in readme.FIGURES if "/" in figure.name} <= of_bench.keys()


def test_what_readme_says_of_dlrover_is_what_was_measured() -> None:
    runs = json.loads((readme.RESULTS / "dlrover.json").read_text())["runs"]

    def stall(side: str) -> float:
        of_side = [run["stall_s"] for run in runs if (run["side"], run["victim"]) == (side, "actor")]
        return float(statistics.median(of_side))

    told = f"in {stall('dlrover'):.0f} s; the same job here in {stall('gyre'):.1f} s"
    assert told in (readme.ROOT / "README.md").read_text()


def test_new_figures_are_written_where_the_old_ones_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {file: (readme.ROOT / file).read_text() for file in ("README.md", "docs/faults.md")}
    (tmp_path / "docs").mkdir()
    for file, text in old.items():
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    values: dict[str, Any] = {
        figure.name: 1234.0 + at for at, figure in enumerate(readme.FIGURES) if "/" in figure.name
    }
    values |= {"at": "2030-01-02", "commit": "0123abcd"}
    for file in old:
        readme.write_into(tmp_path / file, values)
    for figure in readme.FIGURES:
        assert readme.stated(figure, (tmp_path / figure.file).read_text()) == readme.shown(figure, values)
    for file, text in old.items():
        new = (tmp_path / file).read_text()
        assert len(new.splitlines()) == len(text.splitlines()), "nothing but figures is changed"
