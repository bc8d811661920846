"""Every event and every command survives the journal: as a kind and a JSON body, and back."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.failover import commands as c
from gyre.failover import events as e
from tests.examples import examples

TEXT = st.text(max_size=20)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
BY_ANNOTATION: dict[str, st.SearchStrategy[Any]] = {
    "str": TEXT,
    "int": st.integers(),
    "bool": st.booleans(),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "int | None": st.none() | st.integers(),
    "float | None": st.none() | st.floats(allow_nan=False, allow_infinity=False),
    "tuple[str, ...]": st.lists(TEXT, max_size=3).map(tuple),
    "dict[str, int]": st.dictionaries(TEXT, st.integers(), max_size=3),
    "dict[str, float]": st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    "dict[str, list[Any]]": st.dictionaries(TEXT, st.lists(JSON, max_size=2), max_size=3),
    "dict[str, Any]": st.dictionaries(TEXT, JSON, max_size=3),
}


def instances_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{item.name: BY_ANNOTATION[str(item.type)] for item in fields(kind)})


def kinds_of(module: Any, base: type[Any]) -> list[type[Any]]:
    return [
        kind
        for _, kind in sorted(vars(module).items())
        if isinstance(kind, type) and issubclass(kind, base) and is_dataclass(kind)
    ]


REPORTED = kinds_of(e, e.ReportedEvent)


@pytest.mark.parametrize("kind", kinds_of(e, e.Event), ids=lambda kind: kind.__name__)
@settings(max_examples=examples(15), derandomize=True)
@given(data=st.data())
def test_an_event_comes_back_equal(kind: type[e.Event], data: st.DataObject) -> None:
    event = data.draw(instances_of(kind))
    body = json.loads(json.dumps(e.body_of(event), sort_keys=True))
    assert e.event_from(e.kind_of(event), body) == event


@pytest.mark.parametrize("kind", kinds_of(c, c.Command), ids=lambda kind: kind.__name__)
@settings(max_examples=examples(15), derandomize=True)
@given(data=st.data())
def test_a_command_comes_back_equal(kind: type[c.Command], data: st.DataObject) -> None:
    command = data.draw(instances_of(kind))
    body = json.loads(json.dumps(c.command_body(command), sort_keys=True))
    assert c.command_from(c.command_kind(command), body) == command


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="'Vanished' is not known"):
        e.event_from("Vanished", {})
    with pytest.raises(ValueError, match="'Vanish' is not known"):
        c.command_from("Vanish", {})


def test_fields_that_a_newer_gyre_has_added_are_dropped() -> None:
    body = {"timer": "drain", "colour": "blue"}
    assert e.event_from("TimerFired", body) == e.TimerFired("drain")


def test_fields_that_were_added_later_have_defaults_in_old_histories() -> None:
    assert e.event_from("MasterStarted", {"epoch": 1, "pid": 2, "node": "n"}).url == ""  # type: ignore[attr-defined]
    old = e.event_from("StepCompleted", {"incarnation": 1, "step": 2, "version": 3})
    assert old == e.StepCompleted(1, 2, 3)


@pytest.mark.parametrize("kind", REPORTED, ids=lambda kind: kind.__name__)
def test_what_a_trainer_reports_has_a_number(kind: type[Any]) -> None:
    names = {item.name for item in fields(kind)}
    assert {"incarnation", "report"} <= names
