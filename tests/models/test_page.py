"""docs/models.md says what was run of which model: of what is there, and all of it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.engines.embedded.tiny_transformers import CONFIGS
from tests.fsdp.work import MODELS, VARIANTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/models.md").read_text()
OWN = {"qwen2", "qwen3", "llama"}
"""What the embedded engine serves by Gyre's own decoder."""


def rows() -> list[tuple[str, list[str]]]:
    """The first word of each row of the table of what was run, with its cells."""
    found = []
    for line in PAGE.partition("## What was run")[2].partition("## Every kind")[0].splitlines():
        if line.startswith("| ") and not line.startswith(("| model", "| ---")):
            name, *cells = (cell.strip() for cell in line.strip("| ").split(" | "))
            found.append((name, cells))
    return found


def run_by(number: str, column: int) -> set[str]:
    return {name for name, cells in rows() if number in re.findall(r"\d+", cells[column])}


def test_every_test_and_result_that_is_named_is_there() -> None:
    named = re.findall(r"`(tests/[^`]+\.py)::([^`]+)`", PAGE)
    assert len(named) > 8
    for path, name in named:
        assert re.search(rf"^(async )?(def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE), name
    for path in re.findall(r"`(bench/[^`]+)`", PAGE):
        assert (ROOT / path).is_file(), path


def test_every_model_that_fsdp_is_tried_with_is_said_so() -> None:
    kinds = {kind.partition("+")[0] for kind in (*MODELS, *VARIANTS)}
    said = run_by("3", 2)
    assert {name.strip("`") for name in said if re.fullmatch(r"`[\w-]+`", name)} == kinds
    assert len(said) == len(kinds) + 3  # biases in two places, and yarn


def test_every_model_that_transformers_serves_in_a_test_is_said_so() -> None:
    said = {name.strip("`") for name in run_by("5", 3) if re.fullmatch(r"`[\w-]+`", name)}
    assert said == set(CONFIGS) - OWN


def test_what_is_refused_is_none_of_what_was_run() -> None:
    for name, cells in rows():
        for cell in cells:
            assert re.fullmatch(r"-|not run|(CPU [\d ]+)(, GPU [a-e ]+)?", cell), (name, cell)
