"""The real SGLang, in an environment of its own: `make test-long PART=sglang` makes it and runs these tests.

They are left out of every other run: only `-m sglang` selects them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

for name in ("tests.engines.conformance", "tests.engines.adapter_contract", "tests.engines.job_contract"):
    if name not in sys.modules:  # it is, where the whole suite is collected
        pytest.register_assert_rewrite(name)

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.sglang)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))
    if "sglang" not in config.option.markexpr:
        items[:] = [item for item in items if item not in here]
        config.hook.pytest_deselected(items=here)


@pytest.fixture(scope="session")
def sglang_python() -> str:
    python = os.environ.get("GYRE_SGLANG_PYTHON", ".venv-sglang/bin/python")
    if not Path(python).exists():
        pytest.fail(f"There is no {python}: run `make test-long PART=sglang`, which installs SGLang.")
    return str(Path(python).absolute())
