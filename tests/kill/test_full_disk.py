"""A real job on a small disk that fills and empties at random moments, with deaths meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.machine import sweep

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("seed", [0])
def test_a_disk_that_fills_and_empties_costs_no_prompt_and_no_budget(seed: int) -> None:
    """In a process of its own: it starts a cluster on the disk. `python -m tests.kill.full_disk SEED` repeats it."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.kill.full_disk", str(seed)],
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
    finally:
        sweep()
    if "mounting is not permitted" in done.stderr:
        pytest.skip("mounting is not permitted here")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
