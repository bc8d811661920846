"""Notifications: each piece of news arrives, with a key by which a duplicate is known, and nothing floods or waits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre.config import parse_job
from gyre.errors import ConfigError, Unreachable
from gyre.failover import events as e
from gyre.master.sink_processes import sinks_of
from gyre.observe.http_deadline import bounded, within
from gyre.observe.sinks.delivery import CommandDelivery, Notification, Webhook
from gyre.observe.sinks.following import Cursor, read_cursor, tell_new
from gyre.observe.sinks.incidents import IncidentNews
from gyre.observe.sinks.notify import (
    MOST_EVENTS,
    MOST_LINES,
    NEWS_FOR_S,
    PAGE,
    PAUSE_S,
    NotifyOptions,
    NotifySink,
    readable,
)
from gyre.observe.sinks.process import SinkSettings
from gyre.observe.sinks.sink import SinkEnd, SinkIncident, SinkJob, SinkWarning
from gyre.store import Entry, Store, open_store
from tests.doubles.standing_job import StandingJob, small_spec
from tests.failover.histories import History, coordinator_of, spec_with
from tests.observe.webhooks import Hook
from tests.waits import GENEROUS_S

ALL = ("incident", "recovered", "warning", "end")
NOW = 2000.0


# -- whom it tells ----------------------------------------------------------------------------------


@dataclass
class Heard:
    """A target that keeps what it got; `fails` says how often it refuses first."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    fails: int = 0

    def deliver(self, message: Notification) -> None:
        self.keys.append(message.key)
        if self.fails:
            self.fails -= 1
            raise Unreachable("it refuses.")
        body = json.loads(message.body)
        assert body["text"] == message.text
        self.messages.append(body)

    @property
    def texts(self) -> list[str]:
        return [one["text"] for one in self.messages]


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.close()


# -- what it tells of -------------------------------------------------------------------------------


class Stored:
    """A job whose history is decided by hand and stored."""

    def __init__(self, folder: Path, spec: Any = None) -> None:
        self.url = f"sqlite:///{folder / 'a.db'}"
        self.store: Store = open_store(self.url)
        spec = spec or spec_with()
        self.store.create_job(job_id="j1", name="grpo", spec=spec.model_dump(mode="json"), now=1.0)
        self._journal = self.store.journal("j1")
        self._epoch = self._journal.take_over(now=1.0, pid=1)
        self.history = History(coordinator_of(spec)).submit().start_all()
        self._stored = 0
        self.keep()

    def keep(self) -> None:
        new = self.history.records[self._stored :]
        self._stored = len(self.history.records)
        self._journal.append(
            self._epoch,
            [Entry(row.seq, f"e{row.seq}", None, row.kind, row.at, "x", row.body) for row in new],
        )

    def lose(self, vertex: str) -> None:
        self.history.lose(vertex)
        self.keep()

    def start_all(self) -> None:
        self.history.start_all()
        self.keep()

    def warn(self, *, holds: bool = True) -> None:
        self.history.report(e.LearningWarned, code="entropy_gone", message="It is.", step=3, holds=holds)
        self.keep()

    def end(self) -> None:
        self.history.decide(e.StopRequested("enough", at_once=True))
        for vertex in list(self.history.state.vertices.values()):
            if vertex.phase.value == "stopping":
                self.history.decide(e.VertexStopped(vertex.id, vertex.incarnation))
        self.keep()
        assert self.history.state.job.phase.value == "stopped"
        self.store.update_job("j1", phase="stopped", ended_at=self.history.now)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    made = Stored(tmp_path)
    yield made
    made.store.close()


class Sleeper:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = NOW
        self.slept = 0.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds


def sink_for(
    heard: Heard, folder: Path, *, on: tuple[str, ...] = ALL, clock: Sleeper | None = None
) -> NotifySink:
    clock = clock or Sleeper()
    folder.mkdir(exist_ok=True)
    return NotifySink(
        SinkJob("j1", "grpo", {}, folder),
        heard,
        on=on,
        page_address=lambda: "https://master.example:8265/",
        clock=clock,
    )


def kinds(message: dict[str, Any]) -> list[str]:
    return [one["kind"] for one in message["events"]]


def test_a_job_whose_vertex_is_lost_and_that_ends_tells_exactly_that(stored: Stored, tmp_path: Path) -> None:
    heard = Heard()
    sink = sink_for(heard, tmp_path / "n")
    cursor = tell_new(stored.store, "j1", sink, Cursor())
    assert heard.messages == [], "that a job begins is no news"
    stored.lose("reward-0")
    cursor = tell_new(stored.store, "j1", sink, cursor)
    stored.start_all()
    cursor = tell_new(stored.store, "j1", sink, cursor)
    stored.warn()
    cursor = tell_new(stored.store, "j1", sink, cursor)
    stored.end()
    cursor = tell_new(stored.store, "j1", sink, cursor)
    assert tell_new(stored.store, "j1", sink, cursor) == cursor
    assert [kinds(one) for one in heard.messages] == [["incident"], ["recovered"], ["warning"], ["end"]]
    incident = heard.messages[0]
    assert incident["text"].splitlines() == [
        "Gyre job grpo: 1 incident",
        f"• incident: reward-0: process_died: {incident['events'][0]['decision']}",
        "More: `gyre show grpo reward-0/1/vertex`, "
        "https://master.example:8265/#/jobs/grpo/incidents?id=reward-0%2F1%2Fvertex",
    ]
    assert {name: incident[name] for name in ("job", "job_id", "more")} == {
        "job": "grpo",
        "job_id": "j1",
        "more": 0,
    }
    assert heard.messages[1]["events"][0]["outcome"] == "recovered"
    assert heard.messages[3]["text"].splitlines() == [
        "Gyre job grpo: stopped",
        "• the job stopped: enough",
        "More: `gyre show grpo`",
    ], "the page goes with the master"
    assert len(set(heard.keys)) == 4


def test_a_standing_job_whose_vertex_is_killed_tells_of_it_and_of_its_repair(tmp_path: Path) -> None:
    """The real master's journal, in virtual time."""
    heard = Heard()
    with StandingJob() as job:
        job.do(job.world.kill, "reward-0")
        job.run_until(lambda view: [one["outcome"] for one in view["incidents"]] == ["recovered"])
        job.command("stop", reason="enough")
        job.run_until(lambda view: view["job"]["ended_at"])
        clock = Sleeper()
        clock.now = job.clock.time()
        (shown,) = job.view()["incidents"]
        with open_store(f"sqlite:///{job.directory / 'gyre.db'}", create=False) as store:
            sink = sink_for(heard, tmp_path / "n", clock=clock)
            cursor = tell_new(store, "standing-1", sink, Cursor())
            assert tell_new(store, "standing-1", sink, cursor) == cursor
    (message,) = heard.messages
    told = [(one["kind"], one.get("id"), one.get("outcome")) for one in message["events"]]
    assert told == [
        ("incident", shown["id"], "open"),
        ("recovered", shown["id"], "recovered"),
        ("end", None, None),
    ]
    assert message["events"][0]["decision"] == shown["decision"]
    assert message["events"][1]["recovery_s"] == shown["recovery_s"]
    assert message["events"][2]["phase"] == "stopped"


def test_only_what_is_wanted_is_told(stored: Stored, tmp_path: Path) -> None:
    wanted = {on: Heard() for on in ALL}
    stored.lose("reward-0")
    stored.start_all()
    stored.warn()
    stored.warn(holds=False)
    stored.end()
    for on, heard in wanted.items():
        tell_new(stored.store, "j1", sink_for(heard, tmp_path / on, on=(on,)), Cursor())
    assert {on: [kinds(one) for one in heard.messages] for on, heard in wanted.items()} == {
        "incident": [["incident"]],
        "recovered": [["recovered", "recovered"]],
        "warning": [["warning"]],
        "end": [["end"]],
    }


def test_page_by_page_it_is_the_same_news_and_an_end_is_told_once(stored: Stored) -> None:
    for vertex in ("reward-0", "rollout-1"):
        stored.lose(vertex)
        stored.start_all()
    stored.end()
    stored.history.decide(e.DiskFilled("/a", 2, 1))  # what comes after the end
    stored.history.decide(e.DiskHasRoom("/a", 3))
    stored.keep()
    rows = stored.store.journal("j1").events()
    whole = IncidentNews(stored.store, "j1").of(rows)
    kept = IncidentNews(stored.store, "j1")
    parts: dict[int, Any] = {}
    for begin in range(0, len(rows), 3):
        parts |= kept.of(rows[begin : begin + 3])
    assert parts == whole
    news = [one for seq in sorted(whole) for one in whole[seq]]
    assert [getattr(one, "outcome", "end") for one in news] == [
        "open",
        "recovered",
        "open",
        "recovered",
        "end",
    ]


# -- at least once ----------------------------------------------------------------------------------


def test_what_was_refused_is_sent_again_with_its_key_and_what_came_since_after_it(
    stored: Stored, tmp_path: Path
) -> None:
    heard = Heard(fails=2)
    stored.lose("reward-0")
    for _ in range(2):
        with pytest.raises(Unreachable):
            tell_new(stored.store, "j1", sink_for(heard, tmp_path / "n"), Cursor())
    stored.warn()
    cursor = tell_new(stored.store, "j1", sink_for(heard, tmp_path / "n"), Cursor())
    assert [kinds(one) for one in heard.messages] == [["incident"], ["warning"]]
    assert heard.keys[0] == heard.keys[1] == heard.keys[2] != heard.keys[3]
    assert tell_new(stored.store, "j1", sink_for(heard, tmp_path / "n"), cursor) == cursor


def test_what_was_sent_before_a_death_is_not_sent_again_from_an_older_cursor(
    stored: Stored, tmp_path: Path
) -> None:
    heard = Heard()
    stored.lose("reward-0")
    tell_new(stored.store, "j1", sink_for(heard, tmp_path / "n"), Cursor())
    stored.warn()
    tell_new(stored.store, "j1", sink_for(heard, tmp_path / "n"), Cursor())  # the cursor was not written
    assert [kinds(one) for one in heard.messages] == [["incident"], ["warning"]]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"upto": 1, "unknown": 2}'])
def test_an_outbox_that_cannot_be_read_is_none(stored: Stored, tmp_path: Path, damage: str) -> None:
    heard = Heard()
    stored.lose("reward-0")
    sink_for(heard, tmp_path / "n")
    (tmp_path / "n" / "outbox.json").write_text(damage)
    tell_new(stored.store, "j1", sink_for(heard, tmp_path / "n"), Cursor())
    assert [kinds(one) for one in heard.messages] == [["incident"]]


# -- bounded ----------------------------------------------------------------------------------------


def incident(number: int, at: float = NOW) -> SinkIncident:
    return SinkIncident(
        f"r-{number}/1/vertex", f"r-{number}", "process_died", "restarted", "open", at, number
    )


def test_a_storm_is_one_message_of_bounded_size_that_says_how_many_more(tmp_path: Path) -> None:
    heard = Heard()
    sink = sink_for(heard, tmp_path / "n")
    for number in range(1, 1001):
        sink.incident(incident(number))
    sink.flush()
    (message,) = heard.messages
    lines = message["text"].splitlines()
    assert lines[0] == "Gyre job grpo: 1000 incidents"
    assert lines[1] == f"… and {1000 - MOST_LINES} more before these:"
    assert len(lines) == MOST_LINES + 3
    assert (len(message["events"]), message["more"]) == (MOST_EVENTS, 1000 - MOST_EVENTS)
    assert message["events"][-1]["id"] == "r-1000/1/vertex", "the newest are named"
    assert len(json.dumps(message)) < 64_000


def test_a_storm_in_the_journal_is_one_message(stored: Stored, tmp_path: Path) -> None:
    heard = Heard()
    for _ in range(4):
        stored.lose("reward-0")
        stored.start_all()
    tell_new(stored.store, "j1", sink_for(heard, tmp_path / "n"), Cursor(), page=PAGE)
    assert len(heard.messages) == 1
    assert kinds(heard.messages[0]).count("incident") == 4


def test_there_is_a_pause_between_two_messages_but_not_before_the_first(tmp_path: Path) -> None:
    heard, clock = Heard(), Sleeper()
    sink = sink_for(heard, tmp_path / "n", clock=clock)
    sink.incident(incident(1))
    sink.flush()
    assert clock.slept == 0.0
    sink.incident(incident(2))
    sink.flush()
    assert clock.slept == PAUSE_S
    sink.flush()
    assert (len(heard.messages), clock.slept) == (2, PAUSE_S), "nothing is not told"


def test_what_is_older_than_a_day_is_no_news(tmp_path: Path) -> None:
    heard, clock = Heard(fails=1), Sleeper()
    sink = sink_for(heard, tmp_path / "n", clock=clock)
    sink.incident(incident(1, at=NOW - NEWS_FOR_S - 1.0))
    sink.flush()
    assert heard.keys == []
    sink.incident(incident(2))
    with pytest.raises(Unreachable):
        sink.flush()
    clock.now += NEWS_FOR_S + 1.0  # it was away for a day
    again = sink_for(heard, tmp_path / "n", clock=clock)
    for number, at in ((2, NOW), (3, clock.now)):
        again.incident(incident(number, at))
    again.flush()
    assert [[one["seq"] for one in message["events"]] for message in heard.messages] == [[3]]


def test_a_line_calls_nobody_and_is_one_line() -> None:
    line = readable("a\nb\x00 <!channel> @here " + "x" * 1000)
    assert line.startswith("a b ‹!channel> @\u200bhere x")
    assert len(line) == 300


def test_a_text_with_two_incidents_or_the_end_names_none_of_them(tmp_path: Path) -> None:
    heard = Heard()
    sink = sink_for(heard, tmp_path / "n")
    sink.incident(incident(1))
    sink.incident(incident(2))
    sink.flush()
    assert heard.texts[0].splitlines()[-1] == (
        "More: `gyre show grpo`, https://master.example:8265/#/jobs/grpo/incidents"
    )
    sink.incident(incident(3))
    sink.warning(SinkWarning("entropy_gone", "It is.", 3, NOW, True, 4))
    sink.ended(SinkEnd("failed", "gave_up", "", NOW, 5))
    sink.flush()
    lines = heard.texts[1].splitlines()
    assert lines[0] == "Gyre job grpo: failed, 1 incident, 1 warning"
    assert lines[-2:] == ["• the job failed: gave_up", "More: `gyre show grpo`"]


# -- webhooks ---------------------------------------------------------------------------------------

MESSAGE = Notification("k1", b'{"text": "hello"}', "hello")


def test_a_webhook_gets_json_with_a_key_and_the_headers(hook: Hook) -> None:
    Webhook(hook.address, {"Authorization": "Bearer t0ken"}).deliver(MESSAGE)
    ((headers, body),) = hook.requests
    assert body == {"text": "hello"}
    assert headers["Content-Type"] == "application/json"
    assert headers["Idempotency-Key"] == "k1"
    assert headers["Authorization"] == "Bearer t0ken"


@pytest.mark.parametrize("status", [301, 307, 400, 404, 429, 500, 503])
def test_any_other_answer_is_a_failure_without_the_address(hook: Hook, status: int) -> None:
    hook.answers = [status]
    with pytest.raises(Unreachable, match=rf"The webhook of 127\.0\.0\.1 answers {status}") as failed:
        Webhook(hook.address, {}).deliver(MESSAGE)
    assert len(hook.requests) == 1, "redirections are not followed"
    assert "s3cret" not in str(failed.value)
    assert len(str(failed.value)) < 400, "of a giant answer the beginning"
    assert failed.value.__cause__ is None
    Webhook(hook.address, {}).deliver(MESSAGE)


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(500)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"x" * 65536)
    except OSError:
        handler.close_connection = True


def closes(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def test_a_webhook_that_hangs_closes_or_never_ends_is_left(hook: Hook) -> None:
    hook.answers = [lambda handler: hook.released.wait(GENEROUS_S) and None, closes, endless]  # type: ignore[func-returns-value]
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"does not answer within 0\.2 s"):
        Webhook(hook.address, {}, answer_within_s=0.2).deliver(MESSAGE)
    with pytest.raises(Unreachable, match=r"cannot be reached: RemoteProtocolError"):
        Webhook(hook.address, {}).deliver(MESSAGE)
    with pytest.raises(Unreachable, match=r"answers 500: x+\."):
        Webhook(hook.address, {}).deliver(MESSAGE)
    assert time.monotonic() - began < GENEROUS_S


def drips(part: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """An answer of which a byte comes now and then, `part` of it at once."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(part)
            for _ in range(200):
                handler.wfile.write(b"x")
                time.sleep(0.05)
        handler.close_connection = True

    return answer


@pytest.mark.parametrize(
    "part",
    [b"HTTP/1.1 500 no\r\nX-Slow: ", b"HTTP/1.1 500 no\r\nContent-Length: 100000\r\n\r\n", b"HTTP/1.1 5"],
)
def test_a_webhook_that_drips_has_as_long_as_one_that_says_nothing(hook: Hook, part: bytes) -> None:
    """Each byte is within the time, and the whole is not."""
    hook.answers = [drips(part)]
    began = time.monotonic()
    with pytest.raises(Unreachable):
        Webhook(hook.address, {}, answer_within_s=0.4).deliver(MESSAGE)
    assert time.monotonic() - began < 5.0  # 10 s by bytes


def test_a_deadline_is_that_of_its_block_alone(hook: Hook) -> None:
    with bounded(httpx.Client(timeout=5.0)) as client:
        with within(60.0), within(0.0), pytest.raises(httpx.TimeoutException):
            client.post(hook.address, json={})
        assert client.post(hook.address, json={}).status_code == 200
        with within(60.0):
            assert client.post(hook.address, json={"large": "x" * 300_000}).status_code == 200
        assert hook.requests[-1][1] == {"large": "x" * 300_000}


def test_a_webhook_that_is_not_there_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/s3cret"
        with pytest.raises(Unreachable, match=r"cannot be reached: ConnectError") as failed:
            Webhook(address, {}).deliver(MESSAGE)
    assert "s3cret" not in str(failed.value)


# -- commands ---------------------------------------------------------------------------------------


def command(script: str, *, within_s: float = GENEROUS_S, **environment: str) -> CommandDelivery:
    return CommandDelivery(["/bin/sh", "-c", script], {"PATH": os.environ["PATH"], **environment}, within_s)


def test_a_command_gets_the_message(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command(
        f'(cat; echo; echo "$GYRE_JOB $GYRE_NOTIFY_KEY $GYRE_NOTIFY_TEXT") > {out}', GYRE_JOB="grpo"
    ).deliver(MESSAGE)
    assert out.read_text() == '{"text": "hello"}\ngrpo k1 hello\n'


def test_a_command_that_reads_nothing_and_floods_its_output_is_a_delivery() -> None:
    body = json.dumps({"text": "x" * 1_000_000}).encode()
    command("yes | head -c 30000000").deliver(Notification("k1", body, "x"))


def test_a_command_that_fails_says_how_it_ended() -> None:
    with pytest.raises(Unreachable, match=r"The command /bin/sh ended with 3: no such channel\."):
        command("echo no such channel >&2; exit 3").deliver(MESSAGE)
    with pytest.raises(Unreachable, match="The command /no/such cannot be started: No such file"):
        CommandDelivery(["/no/such", "s3cret"], {}).deliver(MESSAGE)


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(Unreachable, match=r"did not end within 0\.5 s: it was killed"):
        command(f"sleep 3600 & echo $! > {pid}; wait", within_s=0.5).deliver(MESSAGE)
    until(lambda: not alive(int(pid.read_text())))


def test_what_a_command_leaves_behind_holds_nothing_up(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command(f"sleep 3600 & echo $! > {pid}").deliver(MESSAGE)
    until(lambda: not alive(int(pid.read_text())))


def alive(pid: int) -> bool:
    """Whether it runs; one that waits for its end to be noticed does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(holds: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + GENEROUS_S
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


# -- a process of its own ---------------------------------------------------------------------------


def settings_for(stored: Stored, folder: Path, **notify: Any) -> SinkSettings:
    spec = small_spec().model_dump(mode="json")
    spec["observe"]["notify"] = [notify]
    (made,) = sinks_of(parse_job(spec), job_id="j1", store_url=stored.url, directory=folder)
    return made


def started(settings: SinkSettings, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "gyre.observe.sinks.process"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            **environment,
            **settings.as_environment(),
        },
        stderr=subprocess.PIPE,
    )


def now(stored: Stored) -> None:
    """What happens from here on happens now: the process has the machine's clock."""
    stored.history.now = time.time()


@pytest.mark.slow
def test_killed_between_the_post_and_the_cursor_it_tells_again_with_the_same_key(
    stored: Stored, hook: Hook, tmp_path: Path
) -> None:
    settings = settings_for(stored, tmp_path, webhook="$HOOK", headers={"Authorization": "$TOKEN"})
    now(stored)
    stored.lose("reward-0")
    hook.answers = [500, lambda handler: hook.released.wait(GENEROUS_S) and None]  # type: ignore[func-returns-value]
    environment = {"HOOK": hook.address, "TOKEN": "t0ken"}
    first = started(settings, **environment)
    assert (
        first.communicate(timeout=GENEROUS_S)[1].decode().startswith("The webhook of 127.0.0.1 answers 500")
    )
    assert first.returncode == 1
    second = started(settings, **environment)
    until(lambda: len(hook.requests) == 2)
    os.kill(second.pid, signal.SIGKILL)  # it has posted, and does not know whether that arrived
    second.communicate(timeout=GENEROUS_S)
    stored.end()
    third = started(settings, **environment)
    assert (third.communicate(timeout=GENEROUS_S)[1], third.returncode) == (b"", 0)
    bodies = [body for _, body in hook.requests]
    assert bodies[0] == bodies[1] == bodies[2]
    assert [kinds(body) for body in bodies[2:]] == [["incident"], ["end"]]
    assert len({headers["Idempotency-Key"] for headers, _ in hook.requests}) == 2
    assert {headers["Authorization"] for headers, _ in hook.requests} == {"t0ken"}


def test_who_is_added_to_an_old_job_is_told_from_then_on(stored: Stored, tmp_path: Path) -> None:
    out = tmp_path / "out"
    now(stored)
    stored.lose("reward-0")
    stored.end()
    stored.history.decide(e.JobContinued({name: role.total for name, role in small_spec().roles.items()}))
    stored.keep()
    stored.history.start_all()
    stored.lose("rollout-0")
    stored.end()
    settings = settings_for(stored, tmp_path, command=["/bin/sh", "-c", f"cat >> {out}; echo >> {out}"])
    process = started(settings)
    assert (process.communicate(timeout=GENEROUS_S)[1], process.returncode) == (b"", 0)
    (message,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["kind"], one.get("vertex")) for one in message["events"]] == [
        ("incident", "rollout-0"),
        ("end", None),
    ]
    assert read_cursor(settings.cursor_path).seq == len(stored.history.records)


def test_a_variable_that_is_not_set_is_a_sentence_and_the_jobs_own_environment_counts(
    stored: Stored, hook: Hook, tmp_path: Path
) -> None:
    settings = settings_for(stored, tmp_path, webhook="$NO_SUCH_HOOK")
    process = started(settings)
    assert (
        b"$NO_SUCH_HOOK is not set where the job's master runs." in process.communicate(timeout=GENEROUS_S)[1]
    )
    options = NotifyOptions(webhook="$HOOK", headers={"A": "$B"})
    job = SinkJob("j1", "grpo", {}, tmp_path)
    assert options.target(job, {"HOOK": hook.address, "B": "c"}) == Webhook(hook.address, {"A": "c"})
    with pytest.raises(ConfigError, match=r"\$HOOK is set to what is no address"):
        options.target(job, {"HOOK": "hooks.example", "B": "c"})
    with pytest.raises(ConfigError, match=r"\$B is set to what a header cannot hold"):
        options.target(job, {"HOOK": hook.address, "B": "c\r\nX: y"})


def test_each_target_keeps_its_folder_whoever_else_there_is(tmp_path: Path) -> None:
    def folders(*notify: dict[str, Any]) -> list[str]:
        spec = small_spec().model_dump(mode="json")
        spec["observe"] |= {"notify": list(notify), "sinks": [{"kind": "file"}]}
        made = sinks_of(parse_job(spec), job_id="j1", store_url="u", directory=tmp_path)
        assert made[0].label == "sink-0"
        assert [one.label for one in made[1:]] == [f"notify-{at}" for at in range(len(notify))]
        return [Path(one.folder).name for one in made[1:]]

    one, other = {"webhook": "https://a.example/s3cret"}, {"command": ["tell"], "on": ["end"]}
    assert folders(one, other) == folders(other, one)[::-1]
    first, second = folders(one, {**one, "on": ["end"]})
    assert second == f"{first}-2"
    assert "s3cret" not in "".join(folders(one, other))
