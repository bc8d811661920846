"""Whatever a vertex says, the master goes on: the real one over a fake cluster in virtual time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from gyre.api.cli.look import show_view
from gyre.api.rest import create_app
from gyre.api.terminal.live import line_of
from gyre.api.terminal.panel import draw_panel
from gyre.api.terminal.run_history import RunHistory
from gyre.errors import StoreError
from gyre.failover import JobPhase, coordinator
from gyre.failover import events as e
from gyre.master.cluster import Address
from gyre.master.vertex_reports import EVIDENCE_LIMIT, event_of
from gyre.store import EventRow
from tests.failover.test_events import REPORTED
from tests.master.lives import Job, Life
from tests.store.fault_points import AFTER_COMMIT

SETTLED_S = 3.0
LATER_S = 4.5

NAN = float("nan")


class Unfriendly:
    def __repr__(self) -> str:
        raise RuntimeError("no repr either")


ODD: dict[str, Any] = {
    "loss": NAN,
    "reward": np.float32(0.5),
    "accuracy": torch.tensor(0.25),
    "norm": np.float64("-inf"),
    "tokens": 2**70,
    "version": np.int64(3),
    "waits": "none of mine",
    "lock": threading.Lock(),
    "worse": Unfriendly(),
    "half": "\udc80",
    3: {NAN: (1, {2})},
    "gradients": np.zeros((1000, 1000)),
    "many": list(range(1_000_000)),
}
"""Fields that no journal and no REST answer can hold as they are."""


def bodies_of(job: Job, kind: str) -> list[EventRow]:
    return [event for event in job.events if event.kind == kind]


def looked_at(life: Life, found: list[dict[str, Any]]) -> None:
    """What REST, the metrics and the command line make of the view at this moment."""
    with TestClient(create_app(life.master, token=None), raise_server_exceptions=False) as http:
        for path in ("", "/vertices", "/metrics"):
            response = http.get(f"http://127.0.0.1/api/v1/jobs/small{path}")
            assert response.status_code == 200, response.text
        assert http.get("http://127.0.0.1/metrics").status_code == 200
    view = life.master.view()
    json.dumps(view, allow_nan=False).encode()
    show_view(view)
    history = RunHistory()
    history.observe(view, 0.0)
    line_of(view, history)
    draw_panel(view, history, at=0.0, now=0.0, width=100, height=30)
    found.append(view)


@pytest.mark.parametrize("vertex", ["trainer-0", "reward-0"])
def test_fields_that_are_not_json_are_shown_and_a_death_after_them_is_journaled(
    job: Job, vertex: str
) -> None:
    found: list[dict[str, Any]] = []
    job.world.at(SETTLED_S, job.world.say, vertex, ODD)
    job.world.at(LATER_S + 0.5, job.world.kill, vertex)
    life = job.life().at(LATER_S, lambda life: looked_at(life, found)).run()
    assert life.exit_code is None
    assert job.phase is JobPhase.SUCCEEDED
    [seen] = [record["fields"] for record in found[0]["vertices"] if record["id"] == vertex]
    assert (seen["loss"], seen["reward"], seen["accuracy"], seen["norm"]) == ("nan", 0.5, 0.25, "-inf")
    assert (seen["version"], seen["tokens"], seen["half"]) == (3, str(2**70), "\\udc80")
    [incident] = job.incidents
    assert (incident.vertex, incident.cause, incident.outcome) == (vertex, "process_died", "recovered")
    assert incident.evidence["last_report"]["fields"]["loss"] == "nan"
    assert len(json.dumps(incident.evidence)) < 2 * EVIDENCE_LIMIT


def test_an_event_of_the_users_own_is_journaled_and_the_job_goes_on(job: Job) -> None:
    job.world.at(SETTLED_S, job.world.report, "reward-0", "Mine", {"found": np.float32(1.5), "loss": NAN})
    life = job.run()
    assert life.exit_code is None
    assert job.phase is JobPhase.SUCCEEDED
    [event] = bodies_of(job, "Reported")
    assert event.actor == "reward-0"
    assert event.body == {
        "vertex": "reward-0",
        "incarnation": 1,
        "kind": "Mine",
        "details": {"found": 1.5, "loss": "nan"},
        "report": 1,
    }
    assert job.incidents == []


WRONG: dict[str, tuple[Any, Any, str]] = {
    "a field is missing": ("StepCompleted", {"incarnation": 1, "step": 1}, "StepCompleted lacks version"),
    "a field of another type": (
        "StepCompleted",
        {"incarnation": 1, "step": "one", "version": 1},
        "step of StepCompleted is 'one', not int",
    ),
    "an event of the master's": ("ClusterLost", {"detail": "gone"}, "no event that a vertex reports"),
    "one that stands for others": (
        "Reported",
        {"vertex": "a", "incarnation": 1, "kind": "b"},
        "no event that",
    ),
    "another vertex's": ("TrainerFinished", {"incarnation": 1, "result": {}}, "trainer-0 reports it"),
    "an advice for nobody": ("ScaleAdvised", {}, "ScaleAdvised lacks vertex"),
    "no body": ("StepCompleted", None, "it is a str with a NoneType"),
    "no kind": (Unfriendly(), {}, "it is a Unfriendly with a dict"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_report_that_is_not_what_it_says_is_told_once_and_the_job_goes_on(job: Job, wrong: str) -> None:
    kind, body, reason = WRONG[wrong]
    job.world.at(SETTLED_S, job.world.report, "reward-0", kind, body)
    life = job.run()
    assert life.exit_code is None
    assert job.phase is JobPhase.SUCCEEDED
    assert len(job.world.steps) == 6
    [event] = bodies_of(job, "ReportRefused")
    assert (event.body["vertex"], event.body["report"]) == ("reward-0", 1)
    assert reason in event.body["reason"]
    assert event.body["kind"] == kind or "<Unfriendly instance" in event.body["kind"]


def test_an_older_trainers_incarnation_is_refused_and_the_next_report_counts(job: Job) -> None:
    job.world.at(
        SETTLED_S, job.world.report, "trainer-0", "StepCompleted", {"incarnation": 9, "step": 1, "version": 1}
    )
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    [event] = bodies_of(job, "ReportRefused")
    assert event.body["reason"] == "it is of incarnation 9"
    assert job.state.job.step == 6


def test_a_refused_report_is_not_told_again_by_the_next_master(make_job: Callable[..., Job]) -> None:
    """Each master dies right after the commit, before the vertex hears that its report is in the journal."""
    job = make_job(steps=30)

    def said() -> list[str]:
        return [event.kind for event in job.events if event.kind in ("Reported", "ReportRefused")]

    job.world.at(SETTLED_S, job.world.report, "reward-0", "Mine", {})
    job.world.at(SETTLED_S + 5.0, job.world.report, "reward-0", "StepCompleted", {})
    for count in (1, 2):

        def told(point: str, count: int = count) -> bool:
            return point == AFTER_COMMIT and len(said()) == count

        job.life(on_point=told).run()
    job.run()
    assert job.phase is JobPhase.SUCCEEDED
    assert said() == ["Reported", "ReportRefused"]
    assert job.kinds.count("MasterStarted") == 3


def test_metrics_that_are_no_numbers_are_left_out_and_the_step_counts(job: Job) -> None:
    metrics = {"loss": NAN, "reward": np.float32(0.5), "note": "fine", "tokens": 7}
    step = {"incarnation": 1, "step": 3, "version": 3, "metrics": metrics}
    job.world.at(0.9, job.world.report, "trainer-0", "StepCompleted", step)
    job.run()
    first = bodies_of(job, "StepCompleted")[0]
    assert (first.body["step"], first.body["metrics"]) == (3, {"reward": 0.5, "tokens": 7})


def test_evidence_and_results_are_made_plain(job: Job) -> None:
    failed = {
        "incarnation": 1,
        "vertex": "reward-0",
        "vertex_incarnation": 1,
        "operator": "score",
        "error": "ValueError: \udc80" + "x" * 10_000_000,
        "traceback": "",
        "user_code": True,
    }
    job.world.at(SETTLED_S, job.world.report, "trainer-0", "OperatorFailed", failed)
    job.world.trainer.result = {"loss": NAN, "model": Unfriendly()}
    life = job.run()
    assert life.exit_code is None
    assert job.phase is JobPhase.SUCCEEDED
    [incident] = job.incidents
    assert incident.evidence["error"].startswith("ValueError: \\udc80xxx")
    assert len(incident.evidence["error"]) <= 2**16
    assert job.state.job.result["loss"] == "nan"
    assert "<Unfriendly instance" in job.state.job.result["model"]


def test_a_vertex_whose_answer_is_no_report_is_replaced_with_the_reason(job: Job) -> None:
    def garble() -> None:
        process = job.world.living("reward-0")
        assert process is not None
        process.ticks = "many"  # type: ignore[assignment]

    job.world.at(SETTLED_S, garble)
    life = job.run()
    assert life.exit_code is None
    assert job.phase is JobPhase.SUCCEEDED
    incident = job.incidents[0]
    assert (incident.vertex, incident.cause, incident.outcome) == ("reward-0", "unhealthy", "recovered")
    assert "its report cannot be read" in incident.evidence["error"]


def test_a_report_that_the_decision_cannot_take_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the decision raises: were it to end the master, the next one would be told the same."""

    def broken(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setitem(coordinator._HANDLERS, e.Evaluated, broken)
    body = {"incarnation": 1, "version": 1, "accuracy": 0.5, "count": 3, "prompts": 3}
    job.world.at(SETTLED_S, job.world.report, "trainer-0", "Evaluated", body)
    life = job.run()
    assert life.exit_code is None
    [event] = bodies_of(job, "ReportRefused")
    assert (event.body["kind"], event.body["reason"]) == ("Evaluated", "KeyError: 'a defect'")


@pytest.mark.parametrize("kind", REPORTED, ids=lambda kind: kind.__name__)
def test_what_a_vertex_may_report_comes_through_as_it_is(kind: type[Any]) -> None:
    if kind in (e.Reported, e.ReportRefused):
        return
    values = {"str": "actor-0", "int": 2, "bool": True, "float": 0.5, "dict[str, Any]": {"a": None}}
    values |= {"dict[str, float]": {"a": 1}, "int | None": None, "float | None": 1.5}
    made = kind(**{name: values[str(item.type)] for name, item in kind.__dataclass_fields__.items()})
    address = Address(e.reporter_of(made), 2)
    assert event_of(address, 2, e.kind_of(made), e.body_of(made)) == made


def test_what_the_journal_cannot_hold_raises_where_it_is_submitted(make_job: Callable[..., Job]) -> None:
    """It is no full disk: nothing is retried, nothing has changed, and the next event is written at once."""
    job = make_job()
    raised: list[str] = []

    async def submit(life: Life) -> None:
        context = life.master._context
        before = context.state
        with pytest.raises(StoreError, match="not plain JSON") as caught:
            context.submit(e.VertexLost("reward-0", 1, "process_died", {"loss": NAN}))
        raised.append(str(caught.value))
        assert context.state is before
        assert context.error == ""
        assert not context._queued

    life = job.life().at(SETTLED_S, submit)
    life.run()
    assert len(raised) == 1
    assert life.exit_code is None
    assert job.phase is JobPhase.SUCCEEDED
    assert job.incidents == []
