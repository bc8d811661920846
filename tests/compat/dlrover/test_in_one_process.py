"""The RL job in one process, under the real master: its calls, and deaths at chosen moments."""

from __future__ import annotations

from pathlib import Path

from gyre.testing import InProcessJob
from tests.compat.dlrover import ppo


def test_the_trainer_drives_and_workers_call_each_other(tmp_path: Path) -> None:
    job = ppo.described(tmp_path, alone=True)
    with InProcessJob(job.to_gyre("ppo").spec, tmp_path) as run:
        result = run.result(timeout_s=60)
    assert len(result["weights"]) == 3
    assert result["said"] == [
        "ACTOR_2-0_2-0 is the actor",
        "ACTOR_2-1_2-1 is the actor",
        "ROLLOUT_2-0_1-0 is the rollout",
        "ROLLOUT_2-1_1-0 is the rollout",
    ]
    assert result["answers"][0] == "prompt 2.0 xxx by 0 with 2"
    assert result["answers"][4] == "prompt 2.4 xxx by 1 with 2"
