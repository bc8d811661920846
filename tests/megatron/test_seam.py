"""What Megatron's import brings along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gyre.workloads.megatron.model.seam import UNUSED

SCRIPT = """
import sys, torch
from gyre.workloads.megatron.model.seam import open_seam
open_seam(torch.device("cpu"))
import gyre.workloads.megatron.policy
from megatron.core.inference.contexts.dynamic_context import HAVE_FLASHINFER
print(HAVE_FLASHINFER, [name for name in {names!r} if name in sys.modules])
import flashinfer
print(flashinfer.WHO)
"""


def test_what_nobody_uses_is_not_imported_and_stays_importable(tmp_path: Path) -> None:
    for name in UNUSED:
        (tmp_path / f"{name}.py").write_text("WHO = 'the package'\n")
    script = SCRIPT.format(names=UNUSED)
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.splitlines() == ["False []", "the package"], found.stderr
