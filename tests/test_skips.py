"""The reasons for which a test may be skipped in CI are of tests that there are, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.skips import ALLOWED_SKIPS, is_allowed

TESTS = Path(__file__).parent
SKIPS = frozenset({"skip", "skipif", "importorskip"})


def reasons() -> Iterator[str]:
    """Of every skip in tests/, as far as it stands in the source: what is filled in is `?`."""
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in SKIPS
            ):
                given = [one.value for one in node.keywords if one.arg == "reason"] or node.args[:1]
                for one in given:
                    parts = one.values if isinstance(one, ast.JoinedStr) else [one]
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "?" for part in parts
                    )


def test_every_allowed_reason_is_one_of_a_test() -> None:
    said = list(reasons())
    assert len(said) > 30
    for allowed in ALLOWED_SKIPS:
        begin = re.split(r"[(\[\\.*+?]", allowed)[0]
        assert any(one.startswith(begin) for one in said), f"no test is skipped for: {allowed}"


@pytest.mark.parametrize(
    "reason",
    [
        "needs a GPU",
        "Skipped: needs a GPU",
        "the extra wandb is not installed",
        "the extra otel is not installed",
        "PostgreSQL chooses by its statistics",
        "Skipped: this kernel cannot be asked for a port out of one",
    ],
)
def test_what_no_machine_of_ci_can_do_is_allowed(reason: str) -> None:
    assert is_allowed(reason)


@pytest.mark.parametrize(
    "reason",
    [
        "",
        "it needs a GPU, and two hands",
        "the extra math is not installed",
        "could not import 'transformers': No module named 'transformers'",
        "NO POSTGRESQL ON THIS MACHINE: half of the store's tests did not run (apt install postgresql)",
        "NO USER `postgres`: initdb refuses root, so half of the store's tests did not run",
        "THE REAL MOONCAKE IS NOT TESTED: libibverbs.so.1",
        "there is no Chromium on this machine: apt-get install chromium",
        "the mock server needs Node",
        "axe-core is not installed: make ui",
        "another server than the mock is tested",
        "make test-verl makes verl's environment",
        "make test-dlrover makes DLRover's environment",
        "mounting is not permitted here",
        "name spaces cannot be made here",
        "network namespaces need root, and `ip`",
        "no openssl to make certificates with",
        "only root can be somebody else",
    ],
)
def test_what_ci_brings_is_not(reason: str) -> None:
    assert not is_allowed(reason)
