"""The page's types are those of the interface's OpenAPI, and that lists what is answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from pydantic import BaseModel

from gyre.api import account
from gyre.api.rest import schemas
from gyre.failover import evaluation, state
from gyre.master.incident_words import IncidentEnd
from gyre.master.master_api import LastReport, MachineView
from gyre.rollouts.plane import reported
from tests.doubles.standing_job import StandingJob
from tools.rest_types import written


def test_the_pages_types_and_facts_are_what_the_code_says() -> None:
    assert {file: file.read_text() for file in written()} == written(), (
        "run `python -m tools.rest_types`, then `make ui`"
    )


def unlisted(found: Any, at: str = "") -> Iterator[str]:
    """The keys of an answer that its type does not list."""
    if isinstance(found, BaseModel):
        yield from (f"{at}{key}" for key in found.model_extra or {})
        for name in type(found).model_fields:
            yield from unlisted(getattr(found, name), f"{at}{name}.")
    elif isinstance(found, dict | list):
        for one in found.values() if isinstance(found, dict) else found:
            yield from unlisted(one, at)


def test_a_jobs_view_has_no_key_that_is_not_listed(shared_job: StandingJob) -> None:
    view = shared_job.master.view()
    assert view["vertices"]
    own = {
        *(f"job.{key}" for key in schemas.JOBS_OWN),
        *(f"vertices.{key}" for key in schemas.VERTEXS_OWN),
    }
    assert set(unlisted(schemas.JobView.model_validate(view))) - own == set()


@pytest.mark.parametrize(
    ("record", "schema", "elsewhere"),
    [
        (state.JobRecord, schemas.Job, {*schemas.JOBS_OWN}),
        (state.VertexRecord, schemas.VertexSchema, {*schemas.VERTEXS_OWN}),
        (state.Incident, schemas.IncidentSchema, set()),
        (evaluation.Evaluation, schemas.EvaluationSchema, set()),
        (state.TrainingRecord, schemas.Training, set()),
        (state.LearningWarning, schemas.LearningWarningSchema, {"holds"}),  # those that hold are told
        (state.JoinToken, schemas.JoinTokenSchema, {"digest"}),  # it is nobody's business
        (LastReport, schemas.VertexSchema, set()),
        (IncidentEnd, schemas.IncidentSchema, set()),
        (MachineView, schemas.Machine, set()),
        (reported.EngineStatus, schemas.EngineSchema, {*schemas.ENGINES_OWN}),
        (reported.PoolStatus, schemas.PoolSchema, set()),
        (reported.DoorStatus, schemas.DoorSchema, {*schemas.DOORS_OWN}),
        (reported.RequestCounts, schemas.DoorRequests, set()),
        (reported.SessionsStatus, schemas.SessionsSchema, {*schemas.SESSIONS_OWN}),
        (reported.SessionTotals, schemas.SessionCountsSchema, set()),
        (account.PromptTotals, schemas.PromptAccountSchema, set()),
        (account.TokenTotals, schemas.TokenAccountSchema, set()),
    ],
)
def test_what_a_record_has_is_listed(record: Any, schema: type[BaseModel], elsewhere: set[str]) -> None:
    assert {one.name for one in fields(record)} - schema.model_fields.keys() == elsewhere
