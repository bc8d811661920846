"""What a cause is told by, and what follows from it, stands in its record alone."""

from __future__ import annotations

import pytest

from gyre.errors import is_no_space, says_no_space
from gyre.failover import Cause
from gyre.failover import events as e
from gyre.failover.causes import CAUSES, CauseRecord, cause_of_code
from gyre.failover.state import Reason
from tests.failover.histories import History


@pytest.fixture
def running(history: History) -> History:
    history.start_all().step()
    return history


def test_another_causes_words_are_a_record(running: History, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = CauseRecord(words=("has fallen off the bus",), blames_machine=True)
    monkeypatch.setitem(CAUSES, Cause.BAD_PLACE, lost)
    incarnation = running["actor-0"].incarnation
    evidence = {"error": "exit 1", "traceback": "RuntimeError: GPU 3 has fallen off the bus"}
    running.decide(e.VertexLost("actor-0", incarnation, Cause.DIED, evidence, node="m"))
    (incident,) = running.state.incidents.values()
    assert (incident.cause, incident.user_code) == (Cause.BAD_PLACE, False)
    assert len(running.state.machines["m"].deaths) == 1


def test_what_a_record_says_of_the_machine_is_what_is_blamed(
    running: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CAUSES, Cause.DIED, CauseRecord())
    running.decide(e.VertexLost("actor-0", 1, Cause.DIED, {"error": "exit 1"}, node="m"))
    assert "m" not in running.state.machines


def test_a_code_is_of_one_cause() -> None:
    codes = [code for record in CAUSES.values() for code in record.codes]
    assert len(codes) == len(set(codes))
    for code in codes:
        assert is_no_space(code) == (cause_of_code(code) is Cause.DISK_FULL)
    assert cause_of_code("") is None


def test_a_vertex_knows_a_full_disk_by_the_same_words() -> None:
    assert all(map(says_no_space, CAUSES[Cause.DISK_FULL].words))


def test_reasons_are_of_causes_that_say_more_than_a_budget() -> None:
    assert Reason.BUDGET_SPENT not in {record.ends_by for record in CAUSES.values()}
