"""Environments that were written for others, with the packages that `make gyms` installs: what a model learns in one of
`verifiers`, by a job and over a fleet, and the adapters of the others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import ENDS_WITHIN_S, Shared
from tests.e2e.fleets import fleet_on

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "gyms"
PYTHON = ROOT / ".venv-gyms" / "bin" / "python"
ADAPTERS_S, PUPIL_S, JOB_S, TRAINED_S = 300.0, 240.0, 600.0, 500.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gyms,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make gyms makes the environment"),
]


def start(*arguments: str | Path, **env: str) -> subprocess.Popen[str]:
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "GYRE_", "PYTHON"))
    }
    return subprocess.Popen(
        [str(PYTHON), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept | {"HF_HUB_OFFLINE": "1"} | env,
        cwd=ROOT,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], within_s: float) -> str:
    """What it printed. It and its children are ended when it is not done by then."""
    try:
        out, complaints = process.communicate(timeout=within_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, out[-3000:] + complaints[-3000:]
    return out


def test_the_adapters_run_what_they_adapt() -> None:
    """None of their tests is skipped there."""
    out = ended(start("-m", "pytest", "-p", "no:cacheprovider", "tests/agents/test_adapters.py"), ADAPTERS_S)
    assert re.search(r"^=+ \d+ passed in ", out, re.MULTILINE), out[-500:]


def test_a_tool_environment_of_verifiers_is_trained_by_a_job() -> None:
    """As a user runs it, with a Ray of its own."""
    with tempfile.TemporaryDirectory(prefix="ge", dir="/tmp") as home:
        job = start("-m", "gyre.api", "run", HERE / "calculator_job.py", "--json", GYRE_HOME=home)
        view = json.loads(ended(job, JOB_S))
    result = view["job"]["result"]
    assert (result["prompts"], result["prompts_lost"], result["trained_twice"]) == (8 * 32, 0, 0)
    assert result["accuracy_first"] < 0.4
    assert result["accuracy_last"] > 0.8


@pytest.mark.ray
def test_verifiers_own_client_trains_over_a_fleet_whose_manager_is_killed(
    shared: Shared, tmp_path: Path
) -> None:
    """The fleet's log-probs are those of the trainer, whose versions it serves; and what it learns is learnt."""
    ended(start(HERE / "fleet_trainer.py", "begin", tmp_path), PUPIL_S)
    with fleet_on(shared, tmp_path / "0", "for-verifiers", tmp_path, instances=1) as fleet:
        trainer = start(HERE / "fleet_trainer.py", "train", tmp_path, fleet.url, GYRE_FLEET_KEY=fleet.key)
        assert trainer.stdout is not None
        first: dict[str, Any] = json.loads(trainer.stdout.readline() or "{}")
        if first:
            faults = ProcessFaults(fleet.handle)
            (victim,) = faults.kill("rollout_manager-0")
            assert faults.replaced(victim, timeout_s=ENDS_WITHIN_S).pid != victim.pid
        told = [first, *map(json.loads, ended(trainer, TRAINED_S).splitlines())]
    before, *steps, after = told
    assert [one["step"] for one in steps] == list(range(1, 9))
    assert max(one["logprobs_apart"] for one in steps) < 1e-3
    assert before["success"] < 0.4
    assert after["success"] > 0.8, told
