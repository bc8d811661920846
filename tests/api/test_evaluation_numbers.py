"""A number of an evaluation is written once: whoever shows evaluations shows what `SHOWN` lists."""

from __future__ import annotations

from dataclasses import fields

import pytest

from gyre.api.cli.look import show_view
from gyre.api.rest import schemas
from gyre.failover.evaluation import SHOWN, Evaluation, Shown
from gyre.failover.events import Evaluated
from gyre.failover.state import JobState, fields_of, row_of
from gyre.master.metrics import prometheus_text
from gyre.observe.sinks.following import numbers_of
from tests.doubles.standing_job import StandingJob

RESULT = Evaluation(version=4, set="aime", prompts=2, count=8, accuracy=0.5, distinct=7)


@pytest.fixture
def one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that nothing shows is shown from now on."""
    monkeypatch.setitem(SHOWN, "distinct", Shown("different", "different answers"))


def test_a_number_that_is_listed_is_shown_everywhere(
    one_more: None, shared_job: StandingJob, capsys: pytest.CaptureFixture[str]
) -> None:
    view = {**shared_job.view(), "evaluations": {"aime": [fields_of(RESULT)]}}
    show_view(view)
    lines = capsys.readouterr().out.splitlines()
    heading, row = (line.split() for line in lines if line.startswith(("HELD OUT", "aime")))
    assert (heading[-1], row[-1]) == ("DIFFERENT", "7")
    text = prometheus_text(view, now=0.0).decode()
    assert 'gyre_heldout_distinct{job="small",set="aime"} 7.0' in text
    assert "Of a set's last evaluation: different answers" in text
    assert numbers_of(RESULT)["distinct"] == 7.0


def test_event_row_and_schema_have_every_field() -> None:
    names = {one.name for one in fields(Evaluation)}
    assert {one.name for one in fields(Evaluated)} == names | {"incarnation", "report"}
    assert schemas.EvaluationSchema.model_fields.keys() == names
    assert schemas.EvaluationSchema.model_fields["reward_mean"].description == SHOWN["reward_mean"].meaning


def test_a_later_number_that_says_nothing_is_not_in_a_row() -> None:
    row = row_of(JobState(evaluations={RESULT.key: RESULT}), ("evaluation", RESULT.key))
    assert row is not None
    assert row["distinct"] == 7
    assert row["threshold"] is None, "of the first release"
    assert not {"right_by", "components"} & row.keys()
    assert Evaluation(**row) == RESULT
