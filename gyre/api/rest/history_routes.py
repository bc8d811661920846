"""The routes that look back: numbers over time, and any moment of the journal.

Invariant *the loop never waits*: all of them read the store, in threads.
"""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Response
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from gyre.api.rest import schemas
from gyre.api.rest.routes import LAST_SEQ, Port
from gyre.api.rest.shared_answers import SharedRoute

reads = APIRouter(tags=["history"], route_class=SharedRoute)

Moment = Annotated[float, Field(ge=0.0, le=1e11, allow_inf_nan=False)]
"""Seconds since 1970."""


@reads.get("/jobs/{job:gyre_job}/series", response_model=schemas.SeriesSchema)
def show_series(
    port: Port,
    source: Annotated[
        str,
        Query(
            max_length=200,
            description="`vertex` for all of them, `vertex/rollout-1` for one; also `instance`, `trainer`, `plane`, "
            "`master`. Without it all.",
        ),
    ] = "",
    since: Annotated[Moment | SkipJsonSchema[None], Query()] = None,
    until: Annotated[Moment | SkipJsonSchema[None], Query()] = None,
    points: Annotated[int, Query(ge=1, le=2000, description="About so many for each number.")] = 300,
    number: Annotated[
        list[Annotated[str, Field(max_length=200)]] | SkipJsonSchema[None],
        Query(max_length=100, description="Only these numbers."),
    ] = None,
) -> Any:
    """Numbers of instances, vertices, trainer, rollout plane and master over time."""
    found = port.series(prefix=source, since=since, until=until, points=points, names=number or ())
    # Not through the model: a hundred thousand pairs would take longer to check than to read.
    return Response(orjson.dumps(found), media_type="application/json")


@reads.get("/jobs/{job:gyre_job}/timeline", response_model=schemas.TimelineSchema)
def show_timeline(
    port: Port,
    since: Annotated[Moment | SkipJsonSchema[None], Query()] = None,
    until: Annotated[Moment | SkipJsonSchema[None], Query()] = None,
) -> Any:
    """Who did what from when to when, and for whom it waited; with incidents, publishes, evaluations, checkpoints and
    commands as flags."""
    found = port.timeline(since=since, until=until)
    return Response(orjson.dumps(found), media_type="application/json")


@reads.get("/jobs/{job:gyre_job}/at", response_model=schemas.MomentSchema)
def show_moment(
    port: Port,
    seq: Annotated[
        Annotated[int, Field(ge=0, le=LAST_SEQ)] | SkipJsonSchema[None],
        Query(description="The number of an event; wins over `time`."),
    ] = None,
    time: Annotated[Moment | SkipJsonSchema[None], Query()] = None,
) -> Any:
    """The job as it was after an event, or at a time: the journal folded to that moment."""
    return port.at(seq=seq, time=None if seq is not None else time)


@reads.get("/jobs/{job:gyre_job}/decisions", response_model=schemas.Decisions)
def show_decisions(port: Port, around: Annotated[int, Query(ge=0, le=LAST_SEQ)]) -> Any:
    """The decisions before and after an event."""
    return port.decisions(around=around)
