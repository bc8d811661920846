"""The routes: reads of the master's view, its events as pages or as a stream, and the commands.

Invariants:
- *the loop never waits for the master*: port calls run in threads; commands, which block until the journal has
  them, have threads of their own, so that they cannot use up those of the reads;
- *a job by name or id*: a master has one job; an app over a store has all of its jobs (`gyre.api.rest.served_jobs`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Annotated, Any, Literal, cast

import anyio
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema
from starlette.convertors import Convertor, register_url_convertor
from starlette.types import Receive, Scope, Send

from gyre.api.account import account_of
from gyre.api.comparison import MOST_JOBS
from gyre.api.cursor import read_cursor, write_cursor
from gyre.api.definition.whole_spec import whole_of
from gyre.api.now import Now, now_of
from gyre.api.rest import schemas
from gyre.api.rest.broadcast import Broadcasters
from gyre.api.rest.discreet import Discreet
from gyre.api.rest.served_jobs import ServedJobs
from gyre.api.rest.shared_answers import SharedRoute
from gyre.api.runs import (
    GROUPS,
    NAMED,
    cost_words,
    csv_of_curves,
    csv_of_runs,
    grouped,
    named,
    select_runs,
    shared_names,
)
from gyre.api.runs.filters import MOST_CHARS
from gyre.api.verdict import judged_steps
from gyre.errors import ConfigError, GyreError, NotFound, StoreError, nearest
from gyre.logs.pattern import PATTERN_CHARS
from gyre.logs.reading import PAGE_BYTES, LogQuery
from gyre.master.master_api import MasterApi, View, door_of, engines_of, pools_of_view, sessions_of
from gyre.redaction import KNOWN

COMMAND_THREADS = 8
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
STEPS_A_PAGE = 10_000
EVENT_STREAM = "text/event-stream"
LAST_SEQ = 2**63 - 1
"""The largest sequence number that a journal can hold."""


class _JobConvertor(Convertor[str]):
    """A job's name or id: no slash, and no colon, which begins a command."""

    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("gyre_job", _JobConvertor())

Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
Rank = Annotated[int, Field(ge=0, le=1_000_000)]
JobPath = Annotated[str, Path(description="The job's name or id.", min_length=1)]


def _jobs(request: Request) -> ServedJobs:
    return cast(ServedJobs, request.app.state.jobs)


def _port(request: Request, job: JobPath) -> MasterApi:
    return cast(MasterApi, Discreet(_jobs(request).port(job)))


Port = Annotated[Any, Depends(_port)]
"""The MasterApi of the job that the path names. (Any, because FastAPI would take a protocol for a field.)"""


def _found(port: Port) -> View:
    view: View = port.view()
    return view


Found = Annotated[dict[str, Any], Depends(_found)]
"""The view of the job that the path names."""

reads = APIRouter(tags=["job"], route_class=SharedRoute)


FilterText = Annotated[
    str,
    Query(
        max_length=MOST_CHARS,
        description="As in `reward>0.5, model~qwen, tag=ablation`; see docs/dashboard.md.",
    ),
]
SortText = Annotated[
    str, Query(max_length=200, description="Columns, with `-` from the greatest down: `-reward,name`.")
]
CSV = "text/csv"
_CSV: dict[int | str, dict[str, Any]] = {200: {"content": {CSV: {"schema": {"type": "string"}}}}}


@reads.get("/jobs", response_model=schemas.JobList)
def list_jobs(
    request: Request,
    filter: FilterText = "",
    sort: SortText = "",
    group: Annotated[str, Query(pattern=f"^({'|'.join(GROUPS)})?$", description="By what.")] = "",
) -> Response:
    """The one job of this master; of `gyre ui` all jobs of its store, the newest first."""
    found, now = _jobs(request), time.time()
    shown = _shown(found)
    chosen = select_runs(shown, filter=filter, sort=sort, now=now)
    groups = grouped(chosen, group, sort=sort, now=now) if group else None
    if group == "experiment":
        groups = named(groups or [], _settings(found, [one.jobs[0] for one in (groups or [])[:NAMED]]))
    # A thousand lines are checked against the schema by a test, and not each time again.
    return JSONResponse(
        {
            "jobs": chosen,
            "groups": None if groups is None else [one.as_dict() for one in groups],
            "total": found.count(),
            "shared_names": shared_names(shown),
            "cost": cost_words(chosen),
        }
    )


def _settings(jobs: ServedJobs, ids: list[str]) -> dict[str, dict[str, Any]]:
    """The settings of these jobs, with every default. One that is gone meanwhile has none."""
    found = {}
    for job in ids:
        with suppress(GyreError):
            found[job] = whole_of(Discreet(jobs.port(job)).spec())
    return found


@reads.get("/jobs.csv", response_class=Response, responses=_CSV)
def table_of_jobs(
    request: Request,
    filter: FilterText = "",
    sort: SortText = "",
    columns: Annotated[str, Query(max_length=1000, description="Names with commas; all without.")] = "",
) -> Response:
    """The table of runs, as a file."""
    now = time.time()
    chosen = select_runs(_shown(_jobs(request)), filter=filter, sort=sort, now=now)
    return _file(csv_of_runs(chosen, _words(columns), now=now), "runs.csv")


@reads.get("/curves.csv", response_class=Response, responses=_CSV)
def table_of_curves(
    request: Request,
    jobs: Annotated[str, Query(min_length=1, max_length=4000, description="Names or ids with commas.")],
    metrics: Annotated[str, Query(max_length=4000, description="Names with commas; all without.")] = "",
) -> Response:
    """The metrics of every step of up to twenty jobs, as a file."""
    names = _words(jobs)
    if not 1 <= len(names) <= MOST_JOBS:
        raise ConfigError(f"{len(names)} jobs: a file has the curves of one to {MOST_JOBS}.")
    steps = {name: all_steps(_jobs(request).port(name)) for name in dict.fromkeys(names)}
    return _file(csv_of_curves(steps, _words(metrics)), "curves.csv")


def all_steps(port: MasterApi) -> list[dict[str, Any]]:
    """The metrics of every step."""
    found: list[dict[str, Any]] = []
    while page := port.steps(after=found[-1]["step"] if found else 0, limit=STEPS_A_PAGE):
        found += page
        if len(page) < STEPS_A_PAGE:
            break
    return found


def _shown(jobs: ServedJobs) -> list[dict[str, Any]]:
    """The items without what may be secret. A curve is numbers alone, and most of a list: nobody looks through it."""
    items = jobs.items()
    texts = KNOWN.data([{key: value for key, value in item.items() if key != "rewards"} for item in items])
    return [shown | {"rewards": item.get("rewards", [])} for shown, item in zip(texts, items, strict=True)]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _file(text: str, name: str) -> Response:
    return Response(text, media_type=CSV, headers={"Content-Disposition": f'attachment; filename="{name}"'})


@reads.get("/jobs/{job:gyre_job}", response_model=schemas.JobView)
def show_job(view: Found) -> Any:
    """All there is to see of the job at this moment."""
    return view


@reads.get("/jobs/{job:gyre_job}/graph", response_model=schemas.Graph)
def show_graph(
    port: Port,
    placement: Annotated[
        bool,
        Query(description="Whether to say of each vertex where it stands: `sub_graphs` and `placement`."),
    ] = True,
) -> Any:
    """The compiled graph and its placement."""
    return port.graph(placement=placement)


@reads.get("/jobs/{job:gyre_job}/spec", response_model=dict[str, Any])
def show_spec(
    port: Port,
    whole: Annotated[bool, Query(description="With every default written out.")] = False,
) -> Any:
    """The resolved configuration."""
    return whole_of(port.spec()) if whole else port.spec()


@reads.get("/jobs/{job:gyre_job}/vertices", response_model=schemas.VertexList)
def list_vertices(view: Found) -> Any:
    """Every vertex, by role and rank."""
    return {"vertices": view["vertices"]}


@reads.get("/jobs/{job:gyre_job}/vertices/{vertex}", response_model=schemas.VertexSchema)
def show_vertex(view: Found, vertex: str) -> Any:
    """One vertex, by its id."""
    for record in view["vertices"]:
        if record["id"] == vertex:
            return record
    raise NotFound(
        f"There is no vertex {vertex!r} in job {view['job']['name']}.",
        hint=nearest(vertex, (record["id"] for record in view["vertices"])),
    )


@reads.get("/jobs/{job:gyre_job}/nodes", response_model=schemas.MachineList)
def list_nodes(port: Port) -> Any:
    """The cluster's machines: what the job may use of each, its vertices, recent deaths, and whether it accepts new
    vertices."""
    return {"nodes": port.nodes()}


@reads.get("/jobs/{job:gyre_job}/engines", response_model=schemas.EngineList)
def list_engines(view: Found) -> Any:
    """Every instance of the rollout plane: its state, the limits in force and why, and how weights come to it; what
    pools with a price cost; of a fleet its door; and of a job with agents its sessions."""
    return {
        "engines": engines_of(view),
        "pools": pools_of_view(view),
        "door": door_of(view),
        "sessions": sessions_of(view),
    }


@reads.get("/jobs/{job:gyre_job}/tokens", response_model=schemas.JoinTokenList)
def list_tokens(port: Port) -> Any:
    """The tokens with which machines join the rollout plane: their names and times, and no secret."""
    return {"tokens": port.tokens()}


@reads.get("/jobs/{job:gyre_job}/incidents", response_model=schemas.IncidentList)
def list_incidents(view: Found) -> Any:
    """What went wrong so far, oldest first."""
    return {"incidents": view["incidents"]}


@reads.get("/jobs/{job:gyre_job}/metrics", response_model=schemas.Metrics)
def show_metrics(
    view: Found,
    port: Port,
    since: Annotated[int, Query(ge=0, le=LAST_SEQ, description="Only steps beyond this one.")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Any:
    """The metrics of each step, and what the trainer last reported."""
    record = view["job"]
    steps = port.steps(after=since, limit=limit)
    return {
        "steps": steps,
        "next": steps[-1]["step"] if steps else since,
        "more": len(steps) == limit,
        "warnings": view["warnings"],
        "bottleneck": view["bottleneck"],
        "job_id": record["job_id"],
        "seq": view["seq"],
        "step": record["step"],
        "version": record["version"],
        "progress": view["progress"],
    }


@reads.get("/jobs/{job:gyre_job}/now", response_model=Now)
def show_now(view: Found, port: Port) -> Any:
    """Is it well, does it learn, what is slow, and because of what: in sentences."""
    last = int((view["training"]["last"] or {}).get("step", 0))
    steps = None
    with suppress(StoreError):  # what there is to say then is that the store is out of reach
        steps = judged_steps(lambda after, limit: port.steps(after=after, limit=limit), last)
    return now_of(view, steps, time.time())


@reads.get("/jobs/{job:gyre_job}/account", response_model=schemas.Account)
def show_account(view: Found, port: Port) -> Any:
    """Where every prompt and every token is, and what pools with a price cost."""
    return account_of(view, port.audit(), port.plane_account, now=time.time())


@reads.get("/jobs/{job:gyre_job}/logs", response_model=schemas.LogPage)
def read_logs(
    port: Port,
    vertex: Annotated[str | None, Query(max_length=80)] = None,
    role: Annotated[str | None, Query(max_length=64)] = None,
    rank: Annotated[Rank | SkipJsonSchema[None], Query()] = None,
    level: Annotated[
        Literal["D", "I", "W", "E"] | SkipJsonSchema[None],
        Query(description="Only lines of this level and worse: debug, information, warning, error."),
    ] = None,
    since: Annotated[
        Moment | SkipJsonSchema[None], Query(description="Only lines from then on; seconds since 1970.")
    ] = None,
    until: Annotated[Moment | SkipJsonSchema[None], Query(description="Only lines up to then.")] = None,
    tail: Annotated[
        Annotated[int, Field(ge=0, le=100_000)] | SkipJsonSchema[None],
        Query(description="Only the last lines of each vertex; without a cursor."),
    ] = None,
    grep: Annotated[
        Annotated[str, Field(max_length=PATTERN_CHARS)] | SkipJsonSchema[None],
        Query(description="Only lines in whose text this regular expression is found, in Python's dialect."),
    ] = None,
    cursor: Annotated[str, Query(description="The `cursor` of the page before.")] = "",
    limit_bytes: Annotated[int, Query(ge=1, le=4 * 2**20, description="Of the lines' text.")] = PAGE_BYTES,
) -> Any:
    """What the job's processes printed, line by line in the order of time: without a cursor the newest lines, or those
    from `since` on; with one what came after it. A page has at least one line if there is any."""
    query = LogQuery(
        vertex=vertex, role=role, rank=rank, level=level, since=since, until=until, grep=grep or None
    )
    page = port.logs(query, after=read_cursor(cursor), tail=tail, limit_bytes=limit_bytes)
    return {**page, "cursor": write_cursor(page.pop("next"))}


# -- events -----------------------------------------------------------------------------------------

streams = APIRouter(tags=["events"])

After = Annotated[int, Query(ge=0, le=LAST_SEQ, description="Only events with a greater sequence number.")]
LastEventId = Annotated[
    Annotated[int, Field(ge=0, le=LAST_SEQ)] | SkipJsonSchema[None],
    Header(description="Where a broken stream goes on from; wins over `after`."),
]
_STREAM: dict[str, Any] = {
    EVENT_STREAM: {"schema": {"type": "string", "description": "id: sequence, event: kind, data: Event"}}
}


class EventStream(StreamingResponse):
    """Server-sent events until the client goes; then the generator is closed at once, not at the next event."""

    media_type = EVENT_STREAM

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__(chunks, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group, aclosing(self._chunks):
            group.start_soon(until_gone)
            await self.stream_response(send)
            group.cancel_scope.cancel()


def _stream(request: Request, job_id: str, port: MasterApi, after: int) -> EventStream:
    broadcasters = cast(Broadcasters, request.app.state.broadcasters)
    return EventStream(broadcasters.of(job_id, port).stream(after=after))


@streams.get(
    "/jobs/{job:gyre_job}/events",
    response_model=schemas.EventPage,
    responses={200: {"content": _STREAM}},
)
async def list_events(
    request: Request,
    view: Found,
    port: Port,
    after: After = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    last_event_id: LastEventId = None,
) -> Any:
    """A page of the history; with `Accept: text/event-stream` the history and then whatever comes."""
    start = after if last_event_id is None else last_event_id
    if EVENT_STREAM in request.headers.get("accept", ""):
        return _stream(request, view["job"]["job_id"], port, start)
    events = await anyio.to_thread.run_sync(lambda: port.events(after=start, limit=limit))
    return {
        "events": events,
        "next": events[-1]["seq"] if events else start,
        "more": len(events) == limit,
    }


@streams.get(
    "/jobs/{job:gyre_job}/events/stream",
    status_code=200,
    response_class=EventStream,
    responses={200: {"content": _STREAM}},
)
async def stream_events(
    request: Request, view: Found, port: Port, after: After = 0, last_event_id: LastEventId = None
) -> Any:
    """Server-sent events until the client goes: the history after `after`, then whatever comes."""
    start = after if last_event_id is None else last_event_id
    return _stream(request, view["job"]["job_id"], port, start)


# -- commands ---------------------------------------------------------------------------------------

commands = APIRouter(tags=["commands"])


async def _carry(request: Request, job: str, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    def call() -> dict[str, Any]:
        port = _jobs(request).port(job)
        return {"job_id": port.view()["job"]["job_id"], "seq": port.command(verb, body, by="rest")}

    return await anyio.to_thread.run_sync(call, limiter=request.app.state.command_threads)


@commands.post("/jobs/{job:gyre_job}:scale", status_code=202, response_model=schemas.Accepted)
async def scale(request: Request, job: JobPath, body: schemas.ScaleBody) -> Any:
    """Set the number of a role's vertices to `count`."""
    return await _carry(request, job, "scale", {"role": body.role, "count": body.count})


@commands.post("/jobs/{job:gyre_job}:drain", status_code=202, response_model=schemas.Accepted)
async def drain(request: Request, job: JobPath, body: schemas.DrainBody) -> Any:
    """Move a vertex, or all vertices of a machine, elsewhere: they hand over first."""
    return await _carry(request, job, "drain", {"target": body.target, "reason": body.reason})


@commands.post("/jobs/{job:gyre_job}:undrain", status_code=202, response_model=schemas.Accepted)
async def undrain(request: Request, job: JobPath, body: schemas.UndrainBody) -> Any:
    """Use a machine again that was drained or is left alone, or the one that a vertex was drained from."""
    return await _carry(request, job, "undrain", {"target": body.target})


@commands.post("/jobs/{job:gyre_job}:pause", status_code=202, response_model=schemas.Accepted)
async def pause(request: Request, job: JobPath) -> Any:
    """Pause the trainer at the end of its step."""
    return await _carry(request, job, "pause", {})


@commands.post("/jobs/{job:gyre_job}:resume", status_code=202, response_model=schemas.Accepted)
async def resume(request: Request, job: JobPath) -> Any:
    """Resume a paused trainer."""
    return await _carry(request, job, "resume", {})


@commands.post("/jobs/{job:gyre_job}:create_token", status_code=202, response_model=schemas.Accepted)
async def create_token(request: Request, job: JobPath, body: schemas.CreateTokenBody) -> Any:
    """Let who presents this token join the rollout plane as an instance."""
    return await _carry(request, job, "create_token", body.model_dump())


@commands.post("/jobs/{job:gyre_job}:revoke_token", status_code=202, response_model=schemas.Accepted)
async def revoke_token(request: Request, job: JobPath, body: schemas.RevokeTokenBody) -> Any:
    """Cut the instances that joined with the token of this name; it admits no more."""
    return await _carry(request, job, "revoke_token", {"name": body.name})


@commands.post("/jobs/{job:gyre_job}:stop", status_code=202, response_model=schemas.Accepted)
async def stop(request: Request, job: JobPath, body: schemas.StopBody | None = None) -> Any:
    """Stop the job gracefully: at the end of its step, or after the drain timeout; or at once."""
    return await _carry(request, job, "stop", (body or schemas.StopBody()).model_dump())


@commands.post("/jobs/{job:gyre_job}:label", response_model=schemas.LabelsSchema)
async def label(request: Request, job: JobPath, body: schemas.LabelBody) -> Any:
    """Tag a job and write its note, also of one that has ended; the job itself does not hear of it."""

    def call() -> dict[str, Any]:
        return _jobs(request).port(job).label(add=body.add, remove=body.remove, notes=body.notes)

    return KNOWN.data(await anyio.to_thread.run_sync(call, limiter=request.app.state.command_threads))


# -- the root ---------------------------------------------------------------------------------------

root = APIRouter(tags=["operations"])


@root.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def prometheus(request: Request) -> Response:
    """Prometheus text format, of the one job of a master."""
    port: MasterApi | None = request.app.state.measured
    if port is None:
        raise NotFound(
            "Only a master has metrics.", hint="Ask the address that `gyre ls --json` gives a job."
        )
    return Response(port.metrics(), media_type=PROMETHEUS)


@root.get("/healthz", response_model=schemas.Health)
async def health() -> Any:
    """Whether the server answers. Needs no token, and says nothing about the job."""
    return {"ok": True}
