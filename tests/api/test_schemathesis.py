"""Whatever the OpenAPI permits, and much that it does not, is answered as the OpenAPI says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import cast

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, settings

from gyre.api.rest import create_app
from gyre.master.master_api import MasterApi
from tests.doubles.standing_job import StandingJob
from tests.examples import examples

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis.specs.openapi.checks import positive_data_acceptance

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# Where tests are collected, no job runs yet: none is needed to say what the interface is.
schema = schemathesis.openapi.from_asgi(
    "/api/v1/openapi.json", create_app(cast(MasterApi, None), token=None), headers={"Host": "127.0.0.1"}
).exclude(path_regex="events/stream$")


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    with StandingJob() as job:
        (job.logs / "rollout-0.1.log").write_text("one\ntwo\n")
        yield create_app(job.master, token=None)


@schema.parametrize()
@settings(
    max_examples=examples(20),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_as_the_openapi_says(case: schemathesis.Case, app: FastAPI) -> None:
    if "job" in case.path_parameters and len(str(case.path_parameters["job"])) % 2:
        case.path_parameters["job"] = "small"  # else hardly any example would get past the 404
    # How many vertices a role may have the job says, what a cursor is the page before, what a filter or a tag is
    # their own grammar: not the schema.
    beyond = (":scale", "/logs", "/jobs", ".csv", ":label")
    beyond_schema = [positive_data_acceptance] if case.path.endswith(beyond) else []
    headers = {"Host": "127.0.0.1", "Accept": "application/json"}
    case.call_and_validate(headers=headers, excluded_checks=beyond_schema, app=app)
