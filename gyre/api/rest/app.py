"""The REST interface and the page: `create_app(port, token=...)` puts routes, guard and problems together.

Invariants:
- *every error is a problem* (`problems`), and the OpenAPI says so of every route;
- *the app holds no state of a job*: whatever it shows comes from the port at that moment.

It must not know Ray, nor how the port gets its answers.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import anyio
from fastapi import FastAPI

from gyre.api.rest import history_routes, routes, sample_routes, schemas, session_routes
from gyre.api.rest.broadcast import HEARTBEAT_S, Broadcasters
from gyre.api.rest.guard import Guard
from gyre.api.rest.page import page_routes
from gyre.api.rest.problems import MEDIA_TYPE, install_handlers
from gyre.api.rest.served_jobs import OneJob, ServedJobs
from gyre.api.rest.sessions import SessionCookies
from gyre.api.rest.shared_answers import SharedAnswers
from gyre.master.master_api import MasterApi
from gyre.redaction import KNOWN, values_of_environment

PREFIX = "/api/v1"


def create_app(port: MasterApi, *, token: str | None, heartbeat_s: float = HEARTBEAT_S) -> FastAPI:
    """The whole interface over one job. With a token every path but `/healthz` and the page's own files wants it."""
    return _app(OneJob(port), token=token, heartbeat_s=heartbeat_s, measured=port)


def create_store_app(jobs: ServedJobs, *, token: str | None, heartbeat_s: float = HEARTBEAT_S) -> FastAPI:
    """The same interface over many jobs. `/metrics` is not there: Prometheus asks masters."""
    return _app(jobs, token=token, heartbeat_s=heartbeat_s, measured=None)


def _app(jobs: ServedJobs, *, token: str | None, heartbeat_s: float, measured: MasterApi | None) -> FastAPI:
    app = FastAPI(
        title="Gyre",
        version=_version(),
        description="The control plane of RL post-training jobs.",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,  # FastAPI's page loads scripts from elsewhere
        redoc_url=None,
    )
    KNOWN.learn(values_of_environment(os.environ))
    app.state.jobs = jobs
    app.state.measured = measured
    app.state.cookies = None if token is None else SessionCookies(token.encode())
    app.state.token = token
    app.state.answers = SharedAnswers()
    app.state.broadcasters = Broadcasters(heartbeat_s=heartbeat_s)
    app.state.command_threads = anyio.CapacityLimiter(routes.COMMAND_THREADS)
    install_handlers(app)
    app.add_middleware(Guard, token=token)
    refused = 403 if token is None else 401
    app.include_router(routes.reads, prefix=PREFIX, responses=_problems(refused, 404, 422, 500, 503))
    app.include_router(sample_routes.samples, prefix=PREFIX, responses=_problems(refused, 404, 422, 500, 503))
    app.include_router(history_routes.reads, prefix=PREFIX, responses=_problems(refused, 404, 422, 500, 503))
    app.include_router(routes.streams, prefix=PREFIX, responses=_problems(refused, 404, 422, 500, 503))
    app.include_router(routes.commands, prefix=PREFIX, responses=_problems(refused, 404, 409, 422, 500, 503))
    app.include_router(session_routes.sessions, prefix=PREFIX, responses=_problems(refused, 422, 500))
    app.include_router(routes.root, responses=_problems(refused, 404, 500))
    app.routes.extend(page_routes())
    return app


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    schema = schemas.Problem.model_json_schema()
    return {
        status: {"description": "A problem.", "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in statuses
    }


def _version() -> str:
    try:
        return version("gyre-rl")
    except PackageNotFoundError:
        return "0"
