"""One incident in full: found by id, number or vertex, with its evidence and the events around it."""

from __future__ import annotations

import pytest

from gyre.api.terminal.incident_text import blocks_of, events_around, facts_of, incident_named
from gyre.errors import NotFound
from tests.api.test_now import incident


def whole(**changes: object) -> dict[str, object]:
    return incident(incarnation=2, region=["actor-0", "actor-1"], detected_after_s=0.4, **changes)


def test_an_incident_is_found_by_id_number_or_vertex() -> None:
    first, second = whole(id="a/1/vertex", vertex="a"), whole(id="b/1/vertex", vertex="b")
    for name in ("b/1/vertex", "2", "b"):
        assert incident_named([first, second], name) is second


def test_an_unknown_incident_is_said_with_the_nearest() -> None:
    with pytest.raises(NotFound, match="the job has 1") as caught:
        incident_named([whole(id="actor-0/1/vertex")], "actor-0/1/verte")
    assert "actor-0/1/vertex" in caught.value.hint
    with pytest.raises(NotFound):
        incident_named([], "1")


def test_every_piece_of_evidence_is_shown_once() -> None:
    shown = whole(evidence={"exit": "killed by signal 9", "traceback": "Traceback:\n  x\n", "empty": ""})
    facts = dict(facts_of(shown))
    assert facts["exit"] == "killed by signal 9"
    assert facts["restarted"] == "actor-0, actor-1"
    assert "empty" not in facts
    assert "traceback" not in facts
    assert blocks_of(shown) == [("traceback", "Traceback:\n  x")]


def test_events_around_it_and_no_others() -> None:
    events = [{"seq": seq, "at": at} for seq, at in ((1, 100.0), (2, 149.0), (3, 158.0), (4, 170.0))]
    found = events_around(whole(at=150.0, recovered_at=156.0), events)
    assert [event["seq"] for event in found] == [2, 3]
