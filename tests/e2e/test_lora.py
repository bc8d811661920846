"""An adapter in whole jobs: FSDP2's ranks train it, each version is the adapter alone, and the embedded engine serves
it beside the model that all versions share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from gyre.api import RLJobBuilder
from gyre.api.handle import JobHandle
from gyre.api.home import home
from gyre.models.adapters import ADAPTER_CONFIG
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import ENDS_WITHIN_S, Shared
from tests.e2e.test_fsdp import STEPS, ended, fsdp_job
from tests.engines.embedded.tiny_transformers import write_folder
from tests.kill.gate import Gate

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]


def adapter_job(folder: Path, **changes: Any) -> RLJobBuilder:
    return fsdp_job(
        folder,
        lora={"rank": 2, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]},
        loss={"tis_imp_ratio_cap": 2.0, "kl_loss_coef": 0.01},
        optim={"lr": 1e-2},
        **changes,
    )


def learnt_what_was_served(handle: JobHandle) -> None:
    """What the engines said of their samples is what the trainer says of them, and it moves away from the reference."""
    steps = handle.steps()
    assert len(steps) == STEPS
    assert steps[-1]["kl"] > 0
    assert max(abs(step["rollout_kl"]) for step in steps) < 1e-4, steps


@pytest.mark.kill
def test_a_job_trains_serves_and_exports_an_adapter_whatever_is_killed(
    shared: Shared, tmp_path: Path
) -> None:
    """With a KL term and no role for the reference. A rank, an instance with its engine, and the rollout manager are
    killed, one after another: no prompt is lost, and none is trained twice."""
    folder = write_folder(tmp_path / "model", "qwen3")
    handle = shared.submit(adapter_job(folder, gated=True))
    gate, faults = Gate(home(shared.home).job_directory(handle.job_id)), ProcessFaults(handle)
    killed = ("actor-1", "rollout-0", "rollout_manager-0")
    for step, name in enumerate(killed, start=1):
        gate.open_to(step + 1)
        faults.reach_step(step)
        (victim,) = faults.kill(name)
        assert faults.replaced(victim, timeout_s=ENDS_WITHIN_S).pid != victim.pid
    gate.open()
    view = ended(handle)
    assert {one["vertex"] for one in view["incidents"]} == set(killed)
    learnt_what_was_served(handle)
    done = shared.gyre("export", handle.job_id, str(tmp_path / "bare"), "--adapter")
    assert done.code == 0, done.err
    (written,) = (tmp_path / "bare").glob("*.safetensors")
    tensors = load_file(written)
    assert max(np.abs(one).max() for name, one in tensors.items() if ".lora_B" in name) > 0
    config = json.loads((tmp_path / "bare" / ADAPTER_CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(folder)
