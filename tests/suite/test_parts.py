"""Every test is in one part, and every part is where its readers look."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.suite.parts import LONG, PARTS, SLOW, fast, properties

ROOT = Path(__file__).parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("**/test_*.py"))


def test_there_are_tests() -> None:
    assert len(FILES) > 300


@pytest.mark.parametrize("part", [fast, properties], ids=lambda part: part.name)
def test_every_file_is_in_a_bundle(part: object) -> None:
    assert [path for path in FILES if part.bundle_of(path) is None] == []  # type: ignore[attr-defined]


def slow_parts_of(path: str) -> list[str]:
    """The parts that run the slow tests of a file: of those with a path that holds it, the one with the longest."""
    held = []
    for part in LONG:
        if part.select != SLOW and part.name not in ("sglang", "vllm", "verl", "dlrover", "clients", "gyms"):
            continue
        bundle = part.bundle_of(path)
        if bundle is not None:
            length = max(len(own) for own in bundle.paths if path == own or path.startswith(f"{own}/"))
            held.append((length, part.name))
    return [name for length, name in held if length == max(held)[0]]


def test_the_slow_tests_of_every_file_are_in_one_part() -> None:
    assert {path: parts for path in FILES if len(parts := slow_parts_of(path)) != 1} == {}


def test_every_path_is_there() -> None:
    paths = [path for part in PARTS.values() for bundle in part.bundles for path in bundle.paths]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_part_has_time_for_a_busy_machine() -> None:
    for part in PARTS.values():
        assert part.limit_s >= 2.5 * part.usual_s, part.name


def test_contributing_says_what_each_long_part_guards() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([^|]+?) \| \d+ \|$", text, re.MULTILINE))
    for part in LONG:
        assert rows.get(part.name) == part.guards, part.name
