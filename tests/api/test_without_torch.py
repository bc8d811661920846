"""An installation without extras: torch, SGLang and Megatron cannot be imported, and jobs are planned, submitted and
watched all the same.

A `sitecustomize` marks the packages as absent, also in processes that a verb starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.api.home import Home
from tests.api.conftest import Seed
from tests.waits import GENEROUS_S

pytestmark = pytest.mark.landing

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "grpo_arithmetic.py")
ELSEWHERE = ("--ray-address", "192.0.2.1:6379")  # an address that is no machine's (RFC 5737)

HIDDEN = (
    "torch",
    "sglang",
    "megatron",
    "transformers",
    "tokenizers",
    "pyarrow",
    "jinja2",
    "math_verify",
    "psycopg",
)
"""What no dependency of `gyre-rl` itself brings."""

HIDE = """
import importlib.metadata, sys
sys.modules.update(dict.fromkeys({hidden!r}))
find = importlib.metadata.Distribution.from_name
def found(name):
    if name.partition("-")[0] in {hidden!r} or name == "math-verify":
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)
importlib.metadata.Distribution.from_name = found
"""
"""The `sitecustomize`: neither the packages nor the distributions that hold them are to be found."""

SEVERAL = """
import contextlib, io, json, sys
from gyre.api.cli import main
outcomes = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
    outcomes.append([code or 0, out.getvalue(), err.getvalue()])
json.dump(outcomes, sys.stdout)
"""
"""Commands given as JSON, one after the other in one process. Prints of each its exit code, stdout and stderr."""

Outcome = tuple[int, str, str]
Commands = Callable[..., list[Outcome]]


@pytest.fixture
def commands(tmp_path: Path, home: Home) -> Commands:
    """Runs command lines in a process in which nothing of `HIDDEN` can be imported."""
    folder = tmp_path / "hidden"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE.format(hidden=HIDDEN))
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*lines: tuple[str, ...]) -> list[Outcome]:
        done = subprocess.run(
            [sys.executable, "-c", SEVERAL],
            input=json.dumps(lines),
            env={**os.environ, "PYTHONPATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=GENEROUS_S,
        )
        assert done.returncode == 0, done.stderr
        return [(code, out, err) for code, out, err in json.loads(done.stdout)]

    return run


def test_the_packages_are_hidden(commands: Commands) -> None:
    ((code, _, err),) = commands(("export", ".", "out"))
    assert (code, err) == (
        2,
        "error: This command needs the package torch, which is not installed.\n"
        "       pip install 'gyre-rl[torch]'.\n",
    )


def test_jobs_are_planned_for_other_machines(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "gsm8k.yaml").write_text((ROOT / "examples" / "grpo_gsm8k.yaml").read_text())
    outcomes = commands(
        ("plan", EXAMPLE),
        ("plan", *ELSEWHERE, EXAMPLE),
        ("plan", "--json", *ELSEWHERE, "gsm8k.yaml"),
        ("plan", "--json", str(ROOT / "examples" / "custom_workload.py")),
    )
    assert [code for code, _, _ in outcomes] == [0] * 4, outcomes
    needs = "TorchActor needs torch, which is not installed. The machines that run the job must have it."
    for _, out, err in outcomes[:2]:
        assert out.splitlines()[-1].startswith("Yes: ")
        assert needs in err
    assert any("needs megatron-core" in note for note in json.loads(outcomes[2][1])["notes"])
    assert json.loads(outcomes[3][1])["notes"] == []  # its classes need no torch


def test_a_job_that_would_train_here_is_refused_with_what_to_install(commands: Commands) -> None:
    for code, _, err in commands(("run", EXAMPLE), ("submit", EXAMPLE), ("demo",)):
        assert code == 2
        assert "TorchActor needs torch, which is not installed." in err
        assert err.endswith(
            "pip install 'gyre-rl[torch]'; or --ray-address of a cluster whose machines have it.\n"
        )


def test_a_job_for_a_cluster_is_refused_for_the_cluster_alone(commands: Commands) -> None:
    ((code, _, err),) = commands(("submit", "--ray-address", "127.0.0.1:1", EXAMPLE))
    assert code == 3, err
    assert "127.0.0.1:1" in err
    assert "torch" not in err


def test_a_class_of_ones_own_that_imports_torch_is_refused_with_what_to_install(
    commands: Commands, tmp_path: Path
) -> None:
    (tmp_path / "with_torch.py").write_text(
        "import torch\nfrom gyre.workloads import BaseTrainer\nclass Mine(BaseTrainer):\n    def fit(self): ...\n"
    )
    (tmp_path / "job.yaml").write_text("roles: {trainer: {entrypoint: 'with_torch:Mine'}}\n")
    ((code, _, err),) = commands(("plan", "job.yaml"))
    assert code == 2
    assert "roles.trainer.entrypoint: module with_torch does not import" in err
    assert err.endswith("       pip install 'gyre-rl[torch]'\n")


def test_jobs_are_watched(commands: Commands, seed: Seed, home: Home) -> None:
    seed("rollout_lost")
    (home.logs("golden-1") / "rollout-1.2.log").write_text("back\n")
    watching = [
        ("ls", "--all"),
        ("show", "golden"),
        ("events", "golden"),
        ("logs", "golden"),
        ("replay", "golden"),
        ("models",),
        ("doctor", "--json"),
    ]
    outcomes = dict(zip([line[0] for line in watching], commands(*watching), strict=True))
    checks = {check["name"]: check for check in json.loads(outcomes.pop("doctor")[1])}
    assert {verb: code for verb, (code, _, _) in outcomes.items()} == dict.fromkeys(outcomes, 0), outcomes
    assert "back" in outcomes["logs"][1]
    assert checks["torch"]["status"] == "ok"
    assert checks["torch"]["advice"] == "pip install 'gyre-rl[torch]'"


def test_an_engine_in_torch_joins_no_job(commands: Commands) -> None:
    ((code, _, err),) = commands(("join", "--engine", "embedded", "--token", "t", "http://127.0.0.1:1"))
    assert code == 2
    assert "The embedded engine needs the package torch, which is not installed." in err
