"""An adapter in a whole job: FSDP2's ranks train it, its versions are the adapter alone, and the embedded engine serves
them beside the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Shared
from tests.e2e.test_fsdp import ended, fsdp_job
from tests.engines.embedded.tiny_transformers import write_folder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_job_trains_and_serves_an_adapter(shared: Shared, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "gemma3_text")
    job = fsdp_job(
        folder,
        lora={"rank": 1, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]},
        loss={"tis_imp_ratio_cap": 2.0},
        optim={"lr": 1e-2},
    )
    view = ended(shared.submit(job))
    assert view["incidents"] == []
    assert view["job"]["result"]["digest"]
