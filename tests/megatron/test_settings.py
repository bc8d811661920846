"""The section `config.megatron`: checked, and documented as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.config.sections import MegatronSettings, WorkloadSettings
from gyre.errors import ConfigError


def test_settings_are_checked_with_their_path() -> None:
    assert WorkloadSettings.read({"megatron": {"tensor_parallel": 2}}).megatron.tensor_parallel == 2
    for wrong, sentence in (
        ({"tensor_paralel": 2}, r"config.megatron.tensor_paralel"),
        ({"tensor_parallel": 0}, "should be greater than or equal to 1"),
        ({"sequence_parallel": True}, "needs a tensor_parallel above 1"),
        ({"dtype": "float8"}, "'auto', 'float32' or 'bfloat16'"),
        ({"device": "tpu"}, "'auto', 'cpu' or 'cuda'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            WorkloadSettings.read({"megatron": wrong})


def test_the_documentation_has_every_key_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", page, re.MULTILINE))
    defaults = {name: field.default for name, field in MegatronSettings.model_fields.items()}
    assert list(rows) == list(defaults)
    for key, default in defaults.items():
        told = rows[key].strip("`").strip('"')
        assert told == (str(default).lower() if isinstance(default, bool) else str(default)), key


def test_naming_the_classes_imports_no_megatron() -> None:
    """Whoever submits a job checks its classes, and need not have Megatron."""
    code = (
        "import sys; from gyre.workloads.megatron import MegatronActor, MegatronReference;"
        "sys.exit(any(name.startswith('megatron') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
