"""The Python of docs/samples.md does what the page says; its table has every column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from gyre.observe.samples.table import SCHEMA
from tests.observe.samples.some_groups import group, kept, sample

PAGE = Path(__file__).parents[3] / "docs" / "samples.md"


def shown() -> dict[str, Any]:
    (block,) = re.findall(r"^```python module\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_functions_that_are_shown_read_what_a_job_keeps(tmp_path: Path) -> None:
    referred = sample([5, 6], 0.25, extras={"ref_logprobs": np.array([-0.5, -2.0], np.float32)})
    kept(tmp_path, {1: [group(1, sample(reward=1.0), referred)], 2: [group(2, sample(reward=0.0))]})
    functions = shown()
    (found,) = functions["worst"](tmp_path, 1, 1)
    assert (found["group"], found["sample"], found["reward"]) == (1, 1, 0.25)
    largest = float(np.abs(referred.logprobs - referred.extras["ref_logprobs"]).max())
    assert functions["engine_against_trainer"](tmp_path) == largest


def test_every_column_is_described_with_its_type() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| ", PAGE.read_text(), re.MULTILINE)
    described = {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    assert sorted(described) == sorted(SCHEMA.names)
    for name, kind in described.items():
        word = re.split(r"[ ,]", kind)[0]
        assert str(SCHEMA.field(name).type).startswith(word), name
