"""A machine dies, with every vertex on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_vertices_of_a_dead_node_come_back_on_another(undisturbed_digest: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill.node_loss"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["phase"] == "succeeded"
    assert out["result"]["digest"] == undisturbed_digest
    assert out["result"]["prompts_lost"] == 0
    assert len(out["nodes"]) == 3
    assert out["victims"]
    lost = {incident["vertex"] for incident in out["incidents"] if incident["cause"] == "node_lost"}
    assert lost <= set(out["victims"])
    # Ranks of one gang that die together are one incident, of the first that was noticed.
    assert {name.rpartition("-")[0] for name in lost} == {name.rpartition("-")[0] for name in out["victims"]}
    assert all(incident["outcome"] == "recovered" for incident in out["incidents"])
