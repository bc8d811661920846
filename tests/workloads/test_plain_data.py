"""Plain data: whatever a user's code hands over comes out as bounded JSON, and plain data comes out as it is."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.store.tables import encode_body
from gyre.workloads.base import Progress
from gyre.workloads.plain_data import (
    ARRAY_LIMIT,
    PLAIN_LIMIT,
    TEXT_LIMIT,
    measured,
    plain,
    plain_fields,
    plain_text,
)
from tests.examples import examples

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=12,
)


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


@dataclass
class Point:
    x: int = 1


class Hostile:
    """Raises whatever it is asked."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class Endless(UserDict[str, int]):
    def __len__(self) -> int:
        return 2**40

    def items(self) -> Any:
        return ((f"key {number}", number) for number in iter(int, 1))


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@settings(derandomize=True, max_examples=examples(60))
@given(JSON)
def test_plain_data_stays_as_it_is(value: Any) -> None:
    assert plain(value) == value
    assert repr(plain(value)) == repr(value), "an int stays an int, and no float becomes one"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (np.float32("inf"), "inf"),
        (np.float64(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(2, dtype=torch.bfloat16, requires_grad=True), 2.0),
        (torch.tensor(float("nan")), "nan"),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([1.5, np.nan]), [1.5, "nan"]),
        (np.zeros(ARRAY_LIMIT + 1), f"ndarray of float64, shape ({ARRAY_LIMIT + 1},)"),
        (torch.zeros(40, 50), "Tensor of torch.float32, shape (40, 50)"),
        (torch.zeros(2, device="meta"), "tensor(..., device='meta', size=(2,))"),
        (2**63 - 1, 2**63 - 1),
        (2**63, "9223372036854775808"),
        ((1, (2,)), [1, [2]]),
        (OrderedDict(a=Colour.RED, b=Level.HIGH), {"a": "red", "b": 3}),
        ({1: "a", None: "b", 2.5: "c", float("nan"): "d"}, {"1": "a", "None": "b", "2.5": "c", "nan": "d"}),
        ({2}, "{2}"),
        (deque([1]), "deque([1])"),
        (b"\xff", "b'\\xff'"),
        (Path("/tmp"), repr(Path("/tmp"))),
        (Point(), "Point(x=1)"),
        (1 + 2j, "(1+2j)"),
        ("caf\xe9 \udc80", "caf\xe9 \\udc80"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_json_gets_its_documented_form(value: Any, expected: Any) -> None:
    made = plain(value)
    assert made == expected
    assert type(made) is type(expected)


def hostile() -> Any:
    return {"inner": [Hostile()], Hostile(): 1}  # not as a test's argument: pytest looks at those


def itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


ODD: dict[str, Callable[[], Any]] = {
    "an object that answers nothing": Hostile,
    "such objects inside": hostile,
    "a mapping without an end": Endless,
    "data that holds itself": itself,
    "very deep data": lambda: nested(10_000),
    "a long text": lambda: "x" * (10 * TEXT_LIMIT),
    "a long key": lambda: {"k" * 10**6: 1},
    "a long list": lambda: list(range(10**6)),
    "a large dict": lambda: dict.fromkeys(range(10**5), "x" * 100),
    "many long texts": lambda: [["y" * TEXT_LIMIT] * 100] * 100,
    "a number of ten thousand digits": lambda: 10**10_000,
    "a lock": threading.Lock,
    "surrogates": lambda: "\ud800" * TEXT_LIMIT,
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("limit", [PLAIN_LIMIT, 2**14])
def test_whatever_it_is_it_comes_out_as_bounded_json_for_journal_and_clients(odd: str, limit: int) -> None:
    made = plain(ODD[odd](), limit=limit)
    encode_body(made, "a test")
    text = json.dumps(made, allow_nan=False, ensure_ascii=False)
    assert len(text.encode()) < limit + 2**13


def test_what_is_left_out_is_said() -> None:
    assert plain(list(range(1000)), limit=400)[-1] == "… 950 of 1000 entries are left out"
    made = plain({str(number): number for number in range(1000)}, limit=400)
    assert made["…"].endswith("of 1000 entries are left out")
    assert made["0"] == 0
    text = plain_text("a" * 70_000 + "b" * 70_000, limit=1000)
    assert len(text) == 1000
    assert text.startswith("aaa")
    assert "139000 characters and more are left out" in text
    assert text.endswith("bbb")


def test_what_one_has_cut_another_with_a_little_more_room_leaves_alone() -> None:
    value = {"texts": ["x" * 3000] * 3000, "deep": [[{"many": list(range(10**6))}]]}
    made = plain(value)
    assert plain(made, limit=PLAIN_LIMIT + 2**12) == made


def test_the_size_is_about_that_of_the_json() -> None:
    value = {"instances": {f"rollout-{number}": {"tokens": number, "state": "idle"} for number in range(200)}}
    size = measured(value)[1]
    assert len(json.dumps(value)) / 2 < size < len(json.dumps(value)) * 2


def test_fields_are_always_a_dict() -> None:
    assert plain_fields({"a": (1,)}) == {"a": [1]}
    assert plain_fields(3) == {"value": 3}
    assert plain_fields(None) == {"value": None}


def test_progress_keeps_plain_data_and_not_the_users_objects() -> None:
    progress = Progress()
    losses = [1.0]
    progress.tick(losses=losses, loss=torch.tensor(float("nan")))
    losses.append(2.0)
    progress.note(health=Hostile())
    ticks, fields = progress.read()
    assert (ticks, fields["losses"], fields["loss"]) == (1, [1.0], "nan")
    assert isinstance(fields["health"], str)


def test_progress_forgets_the_oldest_names_rather_than_grow() -> None:
    progress = Progress()
    progress.tick(step=0)
    for step in range(100):
        progress.tick(**{f"loss_{step}": "x" * TEXT_LIMIT, "step": step})
    fields = progress.read()[1]
    assert len(json.dumps(fields)) < PLAIN_LIMIT + TEXT_LIMIT
    assert fields["loss_99"] == "x" * TEXT_LIMIT
    assert "loss_0" not in fields
