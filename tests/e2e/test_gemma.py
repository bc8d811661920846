"""A model that only transformers computes, in a whole job: FSDP2 trains it, the embedded engine serves each version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Shared
from tests.e2e.test_fsdp import ended, fsdp_job
from tests.engines.embedded.tiny_transformers import write_folder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_job_trains_and_serves_a_gemma(shared: Shared, tmp_path: Path) -> None:
    view = ended(shared.submit(fsdp_job(write_folder(tmp_path / "model", "gemma3_text"))))
    assert view["incidents"] == []
    assert view["job"]["result"]["digest"]
