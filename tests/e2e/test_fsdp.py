"""FSDP2's gang in a job: two ranks over Gloo train the model of a folder, and the embedded engine serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre.api import RLJobBuilder
from gyre.rollouts.trainer.sample_ledger import account_of
from gyre.store import open_store
from tests.e2e.conftest import ENDS_WITHIN_S, Shared
from tests.engines.embedded.tiny import write_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

STEPS = 4


def fsdp_job(folder: Path, **changes: Any) -> RLJobBuilder:
    """GRPO with sums of token ids as rewards, which differ between samples even of an untrained model."""
    builder = RLJobBuilder().node_num(1).device_per_node(8).device_type("CPU").recipe("grpo").backend("fsdp")
    builder = builder.config(
        {
            "seed": 3,
            "model_path": str(folder),
            "task": {"digits": 1},
            "sampling": {"n": 4, "max_new_tokens": 4},
            "optim": {"lr": 1e-3},
            "fsdp": {"pass_tokens": 128},
            "collective_timeout_s": 60.0,
        }
    )
    builder = builder.run(
        steps=STEPS,
        prompts_per_step=8,
        groups_per_firing=4,
        groups_per_micro_batch=4,
        checkpoint_every=2,
        evaluate_every=0,
    )
    builder = builder.rollouts(max_running=64, kv_tokens=4096, report_interval_s=0.1).actor().total(2)
    return builder.rollout().total(1).reward("tests.e2e.workloads", "TokenSum").end()


def test_a_job_on_fsdp_trains_a_folder(shared: Shared, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen3")
    handle = shared.submit(fsdp_job(folder))
    view = handle.wait(ENDS_WITHIN_S)
    result = view["job"]["result"]
    with open_store(handle.store_url) as store:
        ledger = store.ledger(handle.job_id)
        account = account_of(ledger)
    handle.close()
    assert view["job"]["phase"] == "succeeded"
    assert view["incidents"] == []
    assert result["steps"] == STEPS
    assert (account.trained, account.lost, account.trained_twice) == (STEPS * 8, (), ())
