"""A few cases of every target: `make fuzz` runs a million."""

from __future__ import annotations

import re

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.target import Broken, Target, every_target, run

pytestmark = pytest.mark.landing

CASES = 1000
"""Of the quick targets. Slow ones get their share, ten times as large as in a long run."""

TARGETS = every_target()


@pytest.mark.filterwarnings("ignore")  # of aiohttp and uvicorn, about connections that were cut
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks(name: str) -> None:
    kind = TARGETS[name]
    count = max(20, min(CASES, round(10 * CASES * kind.share)))
    result = run(kind, range(count), seed=7)
    assert not result.failures, "\n\n".join(map(str, result.failures))
    assert result.cases == count
    assert result.refused


class _Odd(Target):
    """Breaks at odd numbers."""

    name = "odd"

    def feed(self, draw, sent: list[bytes]) -> bool:
        sent.append(draw.randbytes(4))
        if sent[0][0] % 2:
            raise Broken("odd")
        return True


def test_a_failure_is_repeated_by_its_seed_and_index() -> None:
    first = run(_Odd, range(100), seed=1, most_failures=3)
    assert len(first.failures) == 3
    for failure in first.failures:
        assert f"--seed 1 --only {failure.index}" in str(failure)
        again = run(_Odd, range(failure.index, failure.index + 1), seed=1)
        assert again.failures[0].sent == failure.sent


def test_what_takes_memory_fails() -> None:
    class Greedy(Target):
        name = "greedy"

        def feed(self, draw, sent: list[bytes]) -> bool:
            return bool(bytearray(1 << 30))

    assert "allocated" in run(Greedy, range(1), seed=1).failures[0].why


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--n", "300", "--target", "frames"]) == 0
    assert re.search(r"^\| frames \| 300 \| [\d,]+ \| \d+ \| 0 \|", capsys.readouterr().out, re.M)
