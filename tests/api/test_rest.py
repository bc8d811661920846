"""The REST interface over a standing job's master: what it answers, and that every refusal is a problem."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from httpx import Client

from gyre.api.cli.look import show_view
from gyre.api.cursor import read_cursor, write_cursor
from gyre.api.rest import create_app
from gyre.api.rest.guard import Guard
from gyre.config import NotifySpec
from gyre.errors import ConfigError, StoreFull, Unreachable
from gyre.master import master_api
from gyre.observe.series.numbers import flat
from gyre.store import StepRow
from tests.doubles.standing_job import StandingJob, small_spec

JOB = "/api/v1/jobs/small"


def assert_problem(response: Any, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert body["code"] == code
    assert body["type"] == f"urn:gyre:problem:{code}"
    assert body["title"]
    assert body["detail"]
    assert "hint" in body
    return body


@pytest.mark.parametrize("name", ["small", "standing-1"])
def test_a_job_is_found_by_name_and_by_id(shared_http: Client, shared_job: StandingJob, name: str) -> None:
    view = shared_http.get(f"/api/v1/jobs/{name}").json()
    assert view == {**shared_job.view(), "job": view["job"]}
    assert view["job"].items() >= {"job_id": "standing-1", "name": "small", "phase": "running"}.items()
    assert view["master"]["pid"] == os.getpid()


def test_the_list_holds_the_one_job(shared_http: Client) -> None:
    (row,) = shared_http.get("/api/v1/jobs").json()["jobs"]
    assert (row["job_id"], row["phase"]) == ("standing-1", "running")


def test_graph_spec_vertices_incidents_and_metrics(http: Client, job: StandingJob) -> None:
    job.do(job.world.say, "trainer-0", {"step": 3, "reward": float("nan")})
    job.do(job.world.say, "rollout-0", {"queue": 2})
    job.do(job.world.stall, "rollout-0")
    job.do(setattr, job.world.living("rollout-0"), "version", 7)
    job.do(job.world.kill, "rollout-1")
    job.run_until(lambda view: view["incidents"] and view["progress"].get("step") == 3)
    assert http.get(f"{JOB}/graph").json() == job.master.graph()
    short = http.get(f"{JOB}/graph?placement=false").json()
    assert job.master.graph() == {
        **short,
        **{key: job.master.graph()[key] for key in ("sub_graphs", "placement")},
    }
    assert "placement" not in short
    assert http.get(f"{JOB}/spec").json()["roles"]["actor"]["gang"] is True
    vertices = {vertex["id"]: vertex for vertex in http.get(f"{JOB}/vertices").json()["vertices"]}
    assert vertices["rollout-1"]["phase"] == "starting"
    one = http.get(f"{JOB}/vertices/rollout-0").json()
    assert one == vertices["rollout-0"]
    pid = job.world.living("rollout-0").pid
    assert one.items() >= {"version": 7, "busy": "generate", "fields": {"queue": 2}, "pid": pid}.items()
    (incident,) = http.get(f"{JOB}/incidents").json()["incidents"]
    assert incident.items() >= {"vertex": "rollout-1", "scope": "vertex", "outcome": "open"}.items()
    assert http.get(f"{JOB}/metrics").json() == {
        "job_id": "standing-1",
        "seq": 10,  # that the script reported step 3 is an event
        "step": 3,
        "version": -1,
        "progress": {"step": 3, "reward": "nan"},
        "steps": [],
        "next": 0,
        "more": False,
        "warnings": [],
        "bottleneck": "",
    }


def test_what_may_be_secret_is_not_told() -> None:
    spec = small_spec()
    spec.env = {"WANDB_API_KEY": "k3y"}
    spec.roles["reward"].env = {"JUDGE_TOKEN": "t0ken"}
    spec.store.url = "postgresql+psycopg://gyre:pa55@db/gyre"
    spec.observe.notify = [
        NotifySpec(
            webhook="https://u5er:pa55@hooks.example/services/s3cret?key=s3cret", headers={"X-Key": "k3y"}
        ),
        NotifySpec(webhook="$HOOK", headers={"Authorization": "$TOKEN"}),
        NotifySpec(command=["/usr/bin/tell", "--token", "t0ken"], on=["end"]),
    ]
    told = master_api.spec_of(spec)
    on = ["incident", "warning", "end"]
    assert told["observe"]["notify"] == [
        {"webhook": "https://hooks.example/***", "command": [], "on": on, "headers": {"X-Key": "***"}},
        {"webhook": "$HOOK", "command": [], "on": on, "headers": {"Authorization": "$TOKEN"}},
        {"webhook": "", "command": ["/usr/bin/tell", "***", "***"], "on": ["end"], "headers": {}},
    ]
    assert told["env"] == {"WANDB_API_KEY": "***"}
    assert told["roles"]["reward"]["env"] == {"JUDGE_TOKEN": "***"}
    assert told["store"]["url"] == "postgresql+psycopg://gyre:***@db/gyre"
    assert not any(secret in json.dumps(told) for secret in ("k3y", "t0ken", "pa55", "s3cret"))


def test_engines_with_their_limits_and_ways_are_the_rollout_managers_word(
    http: Client, job: StandingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_api, "ENGINES_OF", "reward")  # the standing job has no rollout plane
    assert http.get(f"{JOB}/engines").json() == {"engines": [], "pools": {}, "door": None, "sessions": None}
    limited = {"instance": "rollout-0", "max_running": 512, "limits_why": "its CUDA graphs hold no more"}
    by_disk = {"loads": "disk", "loads_why": "Invalid argument", "transport": "tcp", "codec": "delta"}
    spot = {"instances": 3, "price_per_hour": 1.2, "rate_tokens_s": 900.0, "price_per_million_tokens": 0.3704}
    sessions = {
        "waiting": 2, "running": 3, "at_engine": 1, "with_agent": 2, "workers": 1, "branches": {"template": 1},
        "since_start": {"outcomes": {"scored": 4}, "turns": 9, "faults": [{"session": "train-0-0-0", "reason": "r"}]},
    }  # fmt: skip
    told = {
        "instances": [{**limited, **by_disk}, "nonsense"],
        "pools": {"rollout_spot": spot, "b": 1},
        "sessions": sessions,
    }
    job.do(job.world.say, "reward-0", {"health": told})
    view = job.run_until(lambda view: any(vertex["fields"] for vertex in view["vertices"]))
    found = http.get(f"{JOB}/engines").json()
    (engine,) = found["engines"]
    assert found["pools"] == {"rollout_spot": spot}
    assert engine.items() >= (limited | by_disk).items()
    assert found["sessions"].items() >= {name: sessions[name] for name in ("waiting", "branches")}.items()
    assert found["sessions"]["since_start"]["faults"] == [{"session": "train-0-0-0", "reason": "r"}]
    assert found["sessions"]["sentence"].startswith("3 sessions run on 1 worker: 1 at an engine, 2 with")
    assert numbers_of_plane(view)["sessions/since_start/outcomes/scored"] == 4
    shown = StringIO()
    with redirect_stdout(shown):
        show_view(view)
    for words in (
        "CUDA graphs hold no more",
        "from the disk: Invalid argument",
        "by tcp as delta",
        "3 connected, 1.2 an hour each, 0.3704 for a million tokens",
        "2 sessions wait for an agent. Since the manager started 4 sessions ended, 4 scored; 9 turns were answered.",
    ):
        assert words in shown.getvalue()


def numbers_of_plane(view: master_api.View) -> dict[str, float]:
    return flat({key: value for key, value in master_api.plane_of(view).items() if key != "instances"})


def test_events_come_in_pages(shared_http: Client) -> None:
    first = shared_http.get(f"{JOB}/events", params={"limit": 5}).json()
    assert [event["seq"] for event in first["events"]] == [1, 2, 3, 4, 5]
    assert (first["next"], first["more"]) == (5, True)
    rest = shared_http.get(f"{JOB}/events", params={"after": first["next"], "limit": 5}).json()
    assert [event["seq"] for event in rest["events"]] == [6, 7, 8]
    assert (rest["next"], rest["more"]) == (8, False)


def test_logs_go_on_from_their_cursor(http: Client, job: StandingJob) -> None:
    (job.logs / "rollout-0.1.log").write_text("hello\nworld\n")
    (job.logs / "reward-0.1.log").write_text("score\n")
    page = http.get(f"{JOB}/logs", params={"role": "rollout", "rank": 0, "limit_bytes": 6}).json()
    assert [line["text"] for line in page["lines"]] == ["world"]
    assert page["searched_from"] is not None
    with (job.logs / "rollout-0.1.log").open("a") as log:
        log.write("2026-01-01T00:00:01.500Z E again\n")
    more = http.get(f"{JOB}/logs", params={"role": "rollout", "cursor": page["cursor"]}).json()
    assert [(line["at"], line["level"], line["text"]) for line in more["lines"]] == [
        (1767225601.5, "E", "again")
    ]
    assert not more["more"]
    first = http.get(f"{JOB}/logs", params={"since": 0, "limit_bytes": 1, "grep": "o"}).json()
    assert first["more"]
    tail = http.get(f"{JOB}/logs", params={"tail": 1, "level": "E"}).json()
    assert [line["text"] for line in tail["lines"]] == ["again"]
    assert any("trainer-0" in sentence for sentence in tail["missing"])
    refused = http.get(f"{JOB}/logs", params={"grep": "("})
    assert (refused.status_code, refused.json()["code"]) == (422, "config")


def test_prometheus_and_health(shared_http: Client) -> None:
    metrics = shared_http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'gyre_events_committed{job="small"} 8.0' in metrics.text
    assert shared_http.get("/healthz").json() == {"ok": True}


def test_commands_are_in_the_journal_when_they_are_accepted(http: Client, job: StandingJob) -> None:
    answer = http.post(f"{JOB}:scale", json={"role": "rollout", "count": 3})
    assert (answer.status_code, answer.json()) == (202, {"job_id": "standing-1", "seq": 9})
    assert "rollout-2" in {vertex["id"] for vertex in job.view()["vertices"]}
    assert http.post(f"{JOB}:pause").json()["seq"] == 10
    assert http.post(f"{JOB}:resume").json()["seq"] == 11
    assert http.post(f"{JOB}:stop", json={"reason": "enough"}).json()["seq"] == 12
    assert job.view()["job"]["message"] == "enough"
    assert [event["actor"] for event in job.master.events(after=8)] == ["rest"] * 4


def test_machines_are_listed_and_drained(http: Client, job: StandingJob) -> None:
    [node] = http.get(f"{JOB}/nodes").json()["nodes"]
    assert (node["id"], node["there"], node["draining"], node["left_until"]) == ("node-0", True, "", None)
    assert "rollout-1" in node["vertices"]
    assert http.post(f"{JOB}:drain", json={"target": "10.0.0.1", "reason": "old"}).status_code == 202
    [node] = http.get(f"{JOB}/nodes").json()["nodes"]
    assert node["draining"] == "old"
    assert http.post(f"{JOB}:undrain", json={"target": "node-0"}).status_code == 202
    assert http.get(f"{JOB}/nodes").json()["nodes"][0]["draining"] == ""


def test_stop_needs_no_body(http: Client, job: StandingJob) -> None:
    assert http.post(f"{JOB}:stop").status_code == 202
    assert job.view()["job"]["phase"] == "stopping"


@pytest.mark.parametrize(
    ("method", "path", "json", "status", "code"),
    [
        ("GET", "/api/v1/jobs/smal", None, 404, "not_found"),
        ("GET", "/api/v1/nothing", None, 404, "not_found"),
        ("GET", f"{JOB}/vertices/rollout-9", None, 404, "not_found"),
        ("GET", f"{JOB}:pause", None, 405, "method_not_allowed"),
        ("DELETE", JOB, None, 405, "method_not_allowed"),
        ("GET", f"{JOB}/events?after=-1", None, 422, "config"),
        ("GET", f"{JOB}/logs?cursor=@@", None, 422, "config"),
        ("POST", f"{JOB}:scale", {"role": "rollout"}, 422, "config"),
        ("POST", f"{JOB}:scale", {"role": "rollout", "count": 2, "x": 1}, 422, "config"),
        ("POST", f"{JOB}:scale", {"role": "rollout", "count": 9}, 422, "config"),
        ("POST", f"{JOB}:scale", {"role": "rolout", "count": 2}, 404, "not_found"),
        ("POST", f"{JOB}:scale", {"role": "actor", "count": 3}, 409, "conflict"),
        ("POST", f"{JOB}:drain", {}, 422, "config"),
        ("POST", f"{JOB}:drain", {"target": "rolout-1"}, 404, "not_found"),
        ("POST", f"{JOB}:drain", {"target": "trainer-0"}, 409, "conflict"),
        ("POST", f"{JOB}:undrain", {"target": "nobody"}, 404, "not_found"),
    ],
)
def test_every_refusal_is_a_problem(
    shared_http: Client, method: str, path: str, json: Any, status: int, code: str
) -> None:
    assert_problem(shared_http.request(method, path, json=json), status, code)


def test_a_405_says_what_is_allowed(shared_http: Client) -> None:
    assert shared_http.delete(JOB).headers["allow"] == "GET"


def test_an_unknown_job_names_the_nearest(shared_http: Client) -> None:
    assert (
        assert_problem(shared_http.get("/api/v1/jobs/smal"), 404, "not_found")["hint"]
        == "did you mean 'small'?"
    )


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StoreFull("No space left.", hint="Free some."), 503, "store.full"),
        (Unreachable("The journal did not answer in 10 s."), 503, "unreachable"),
        (RuntimeError("a secret of the inside"), 500, "gyre"),
    ],
)
def test_what_the_master_raises_is_a_problem(
    http: Client,
    job: StandingJob,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    code: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(job.master, "view", fail)
    monkeypatch.setattr(job.master, "command", fail)
    assert_problem(http.get(JOB), status, code)
    body = assert_problem(http.post(f"{JOB}:pause"), status, code)
    assert "secret" not in body["detail"]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic s3cret", 401),
        ("Bearer", 401),
        ("Bearer s3crét", 401),
        ("Bearer s3cret", 200),
        ("bearer s3cret", 200),
    ],
)
@pytest.mark.parametrize("path", [JOB, "/metrics", "/api/v1/openapi.json"])
def test_a_token_opens_every_path(
    shared_job: StandingJob, connect: Callable[..., Any], header: str | None, status: int, path: str
) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    with connect(create_app(shared_job.master, token="s3cret"), "http://gyre.example") as client:
        answer = client.get(path, headers=headers)
        assert answer.status_code == status
        if status == 401:
            assert_problem(answer, 401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),
        ({"Host": "localhost:8000"}, 202),
        ({"Host": "[::1]:8000"}, 202),
        ({"Host": "evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": "http://127.0.0.1"}, 202),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 202),
        ({"Sec-Fetch-Site": "none"}, 202),
        # A proxy in front has rewritten the host.
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://gyre.example"}, 202),
    ],
)
def test_without_a_token_no_web_page_can_command(http: Client, headers: dict[str, str], status: int) -> None:
    assert http.post(f"{JOB}:pause", headers=headers).status_code == status


@pytest.mark.parametrize("header", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
def test_nor_can_another_sites_page_with_the_token(
    job: StandingJob, connect: Callable[..., Any], header: dict[str, str]
) -> None:
    headers = {"Authorization": "Bearer s3cret"}
    with connect(create_app(job.master, token="s3cret"), "http://gyre.example") as client:
        assert_problem(client.post(f"{JOB}:pause", headers=headers | header), 403, "forbidden_origin")
        assert client.post(f"{JOB}:pause", headers=headers).status_code == 202


def test_what_is_no_request_reaches_nothing() -> None:
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    guard = Guard(app, token=None)
    asyncio.run(guard({"type": "websocket", "path": "/healthz"}, receive, send))
    asyncio.run(guard({"type": "lifespan"}, receive, send))
    assert reached == ["lifespan"]
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_nothing_is_loaded_from_elsewhere(shared_http: Client) -> None:
    assert shared_http.get("/api/v1/docs").status_code == 404


def test_openapi_is_complete(shared_http: Client) -> None:
    paths = shared_http.get("/api/v1/openapi.json").json()["paths"]
    assert len(paths) >= 31
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert operation.get("description"), f"{method} {path} has no description"
            assert any(status.startswith("2") for status in operation["responses"])
            if path != "/healthz":
                assert "500" in operation["responses"]


@pytest.mark.parametrize("offsets", [{}, {"a.1.log": 0}, {"a.1.log": 5, "ü.2.log": 2**40}])
def test_a_cursor_reads_back(offsets: dict[str, int]) -> None:
    assert read_cursor(write_cursor(offsets)) == offsets


@pytest.mark.parametrize("cursor", ["x", "e30", "bnVsbA==", "eyJhIjogLTF9", "eyJhIjogdHJ1ZX0="])
def test_a_made_up_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(ConfigError):
        read_cursor(cursor)


def test_metrics_of_steps_come_by_pages(http: Client, job: StandingJob) -> None:
    ledger = job.master._store.ledger("standing-1")
    ledger.take_over(term=1)
    ledger.write(
        1, steps=[StepRow(step, step, None, [], {"reward_mean": step / 10}, 0.0) for step in (1, 2, 3)]
    )

    def page(query: str = "") -> tuple[list[int], int, bool]:
        found = http.get(f"{JOB}/metrics{query}").json()
        return [row["step"] for row in found["steps"]], found["next"], found["more"]

    assert page() == ([1, 2, 3], 3, False)
    assert page("?limit=2") == ([1, 2], 2, True)
    assert page("?since=2&limit=2") == ([3], 3, False)
    assert page("?since=9") == ([], 9, False)
    assert http.get(f"{JOB}/metrics?since=1").json()["steps"][0] == {"step": 2, "reward_mean": 0.2}
    assert http.get(f"{JOB}/metrics?since=-1").status_code == 422


def test_warnings_and_sums_of_steps_are_in_the_view_and_in_prometheus(http: Client, job: StandingJob) -> None:
    warned = {"incarnation": 1, "code": "cut_off", "message": "too short", "step": 3}
    job.do(job.world.report, "trainer-0", "LearningWarned", warned)
    metrics = {"reward_mean": 0.5, "entropy": 1.5, "tokens": 7}
    step = {"incarnation": 1, "step": 1, "version": 1, "metrics": metrics}
    job.do(job.world.report, "trainer-0", "StepCompleted", step)
    job.run_until(lambda view: view["warnings"] and view["training"]["last"])
    view = http.get(JOB).json()
    assert view["warnings"] == [{"code": "cut_off", "step": 3, "message": "too short"}]
    assert view["training"]["last"] == metrics | {"step": 1, "version": 1}
    assert view["training"]["tokens"] == 7
    text = http.get("/metrics").text
    assert 'gyre_step_entropy{job="small"} 1.5' in text
    assert 'gyre_learning_warning{code="cut_off",job="small"} 1.0' in text
    assert 'gyre_learning_warning{code="no_gradient",job="small"} 0.0' in text
