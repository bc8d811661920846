"""Conditions on rewards and lengths, as people write them."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from gyre.errors import ConfigError
from gyre.observe.samples.query import CONDITIONS_PATTERN, Condition, conditions_in


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("<0.2", [-1.0, 0.0]),
        ("<= .5", [-1.0, 0.0, 0.5]),
        (">5e-1", [1.0]),
        (">=0.5", [0.5, 1.0]),
        ("=1", [1.0]),
        ("==1", [1.0]),
        ("0", [0.0]),
        ("!=0", [-1.0, 0.5, 1.0]),
        (">=0, <1", [0.0, 0.5]),
        ("-1", [-1.0]),
    ],
)
def test_a_condition_lets_through(text: str, passes: list[float]) -> None:
    values = np.array([-1.0, 0.0, 0.5, 1.0])
    keep = np.ones(4, np.bool_)
    for condition in conditions_in(text):
        keep &= condition.holds(values)
    assert values[keep].tolist() == passes


@pytest.mark.parametrize("text", ["", "<", "low", "<0.2;", "<<1", ">1,", "0.1.2", "<nan", "< 0x1"])
def test_what_is_no_condition_is_refused_and_says_how(text: str) -> None:
    with pytest.raises(ConfigError, match=r"no condition") as error:
        conditions_in(text)
    assert "<0.2" in error.value.hint
    with pytest.raises(ConfigError, match=r"^tokens: "):
        conditions_in(text, "tokens")


def test_a_condition_goes_over_the_wire_and_back() -> None:
    condition = Condition("<", 0.1 + 0.2)
    assert conditions_in(str(condition)) == (condition,)


def test_a_client_that_checks_by_the_pattern_is_done_at_once_whatever_it_checks() -> None:
    """A number may be read in one way alone: where each may be split anywhere, a text of many that is wrong at its
    end takes for ever."""
    begun = time.process_time()
    for one in ("1234567890", "         1"):
        assert re.search(CONDITIONS_PATTERN, ",".join([one] * 18)) is not None
        assert re.search(CONDITIONS_PATTERN, ",".join([one] * 18) + "x") is None
    assert time.process_time() - begun < 1.0
