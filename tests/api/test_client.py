"""The reader: the master while it answers, the journal when it does not, and commands over a restart."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from gyre.api import reader as reader_module
from gyre.api.client import GyreClient
from gyre.api.home import Home
from gyre.api.reader import JobReader
from gyre.api.rest import RestServer, create_app
from gyre.api.rest.schemas import EvaluationSchema
from gyre.errors import (
    ConfigError,
    Conflict,
    GyreError,
    NotFound,
    StoreFull,
    Unauthorized,
    Unreachable,
)
from gyre.failover import JobState, state_from
from gyre.logs.reading import LogQuery
from gyre.master.master_api import view_of
from gyre.store import StepRow, open_store
from tests.doubles.standing_job import StandingJob
from tests.ports import nobody_listens
from tests.waits import GENEROUS_S

Seed = Callable[..., str]


@pytest.fixture
def away() -> Iterator[str]:
    with nobody_listens() as address:
        yield f"http://{address}"


def test_the_master_is_asked_while_it_answers(seed: Seed, golden: StandingJob) -> None:
    server = RestServer(create_app(golden.master, token=None))
    store = seed("rollout_lost", live=True, url=server.start())
    with JobReader(store) as reader:
        view = reader.view("golden")
        assert view["master"]["answering"]
        assert view["job"]["phase"] == "running"
        server.stop()
        view = reader.view("golden")
        assert not view["master"]["answering"]
        assert view["job"]["phase"] == "succeeded"


def test_the_metrics_of_steps_are_the_same_from_a_master_and_from_the_store(
    golden: StandingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = golden.master._store
    ledger = store.ledger(golden.master.job_id)
    ledger.take_over(term=1)
    ledger.write(1, steps=[StepRow(step, step, None, [], {"loss": step / 4}, 0.0) for step in range(1, 8)])
    step = {"incarnation": 1, "step": 7, "version": 7, "metrics": {"loss": 1.75}}
    golden.do(golden.world.report, "trainer-0", "StepCompleted", step)
    golden.run_until(lambda view: view["training"]["last"])
    monkeypatch.setattr(reader_module, "PAGE", 3)
    server = RestServer(create_app(golden.master, token=None))
    with JobReader(None, url=server.start()) as far, JobReader(store.url) as near:
        for last in (None, 1, 3, 4, 7, 99):
            found = far.steps(golden.master.job_id, last=last)
            assert found == near.steps(golden.master.job_id, last=last)
            assert [row["step"] for row in found] == list(range(max(8 - (last or 7), 1), 8))
    server.stop()


def test_without_a_master_the_view_is_the_snapshot(seed: Seed, away: str) -> None:
    url = seed("actor_lost", live=True, url=away)
    with open_store(url) as store, JobReader(url) as reader:
        state = state_from(store.journal("golden-1").snapshot())
        progress = {"step": 2, "version": 2, "steps": 2}
        assert reader.view("golden-1") == view_of(
            state, seq=store.journal("golden-1").last_seq(), progress=progress, answering=False
        )


def test_evaluations_of_an_ended_job_are_the_journals(seed: Seed) -> None:
    with JobReader(seed("evaluated")) as reader:
        found = reader.view("golden-1")["evaluations"]
    assert {name: [row["version"] for row in rows] for name, rows in found.items()} == {
        "math500": [0, 2],
        "aime": [0, 2],
    }
    assert found["aime"][1] == {
        "version": 2,
        "set": "aime",
        "prompts": 2,
        "count": 8,
        "reward_mean": 0.625,
        "reward_std": 0.5,
        "accuracy": None,
        "threshold": None,
        "right_by": "",
        "distinct": 0,
        "components": {},
        "pass_at": {},
        "best_of": {"1": 0.5, "4": 0.75},
        "by": {"math": {"count": 6, "reward_mean": 0.5, "accuracy": 0.5}},
    }
    assert found["math500"][1]["accuracy"] == 0.5
    assert set(found["math500"][1]) == set(EvaluationSchema.model_fields)


def test_a_port_that_another_job_has_now_is_not_believed(seed: Seed, job: StandingJob) -> None:
    server = RestServer(create_app(job.master, token=None))
    with JobReader(seed("rollout_lost", live=True, url=server.start())) as reader:
        assert reader.view("golden")["job"]["job_id"] == "golden-1"
        with pytest.raises(Unreachable, match="No master of job golden"):
            reader.command("golden", "pause", deadline_s=0.5)
    assert not job.view()["job"]["paused"]
    server.stop()


def test_a_stopped_process_costs_a_timeout_and_not_more(seed: Seed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with JobReader(seed("rollout_lost", live=True, url=url), probe_timeout_s=0.2) as reader:
            assert not reader.view("golden")["master"]["answering"]
        deaf.setblocking(False)
        deaf.accept()[0].close()
        with pytest.raises(BlockingIOError):
            deaf.accept()  # it was asked once


def test_a_token_that_is_wrong_hides_nothing_that_the_journal_has(seed: Seed, golden: StandingJob) -> None:
    server = RestServer(create_app(golden.master, token="t"), token="t")
    with JobReader(seed("rollout_lost", live=True, url=server.start())) as reader:
        assert reader.view("golden")["job"]["phase"] == "succeeded"
        with pytest.raises(Unauthorized):
            reader.command("golden", "pause", deadline_s=1)
    server.stop()


def test_a_job_that_has_no_event_yet_is_shown(home: Home) -> None:
    with open_store(home.database_url()) as store:
        store.create_job(job_id="j1", name="new", spec={}, now=5.0)
        store.update_job("j1", phase="failed", reason="not_started", message="no master", ended_at=6.0)
    with JobReader(home.database_url()) as reader:
        job = reader.view("new")["job"]
    assert (job["job_id"], job["phase"], job["message"], job["ended_at"]) == (
        "j1",
        "failed",
        "no master",
        6.0,
    )


def test_the_newest_job_is_the_default_and_running_ones_take_commands(seed: Seed) -> None:
    seed("actor_lost", job_id="new", live=False, at=2.0)
    store = seed("rollout_lost", job_id="old", live=True, at=1.0)
    with JobReader(store) as reader:
        assert reader.find().job_id == "new"
        assert reader.find(live_first=True).job_id == "old"
        assert [job["job_id"] for job in reader.jobs()] == ["new", "old"]
        assert [job["job_id"] for job in reader.jobs(live=True)] == ["old"]
        with pytest.raises(NotFound, match="did you mean 'golden'"):
            reader.find("goldn")
        with pytest.raises(Conflict, match="`pause` needs a running job"):
            reader.command("new", "pause")


def test_history_is_paged_whole_and_in_order(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.api.reader.PAGE", 4)
    with JobReader(seed("commanded")) as reader:
        numbers = [event["seq"] for event in reader.history("golden-1")]
        assert numbers == list(range(1, len(numbers) + 1))
        assert [event["seq"] for event in reader.history("golden-1", after=5, follow=True)] == numbers[5:]


def test_a_command_waits_for_the_new_master(seed: Seed, golden: StandingJob, away: str) -> None:
    url = seed("rollout_lost", live=True, url=away)
    server = RestServer(create_app(golden.master, token=None))

    def come_back() -> None:
        time.sleep(0.4)
        with open_store(url) as store:
            store.update_job("golden-1", url=server.start())

    threading.Thread(target=come_back).start()
    with JobReader(url) as reader:
        assert reader.command("golden", "pause", deadline_s=GENEROUS_S) == golden.view()["seq"]
    assert golden.view()["job"]["paused"]
    server.stop()


def test_a_refusal_of_the_master_is_raised_at_once(seed: Seed, golden: StandingJob) -> None:
    server = RestServer(create_app(golden.master, token=None))
    with JobReader(seed("rollout_lost", live=True, url=server.start())) as reader:
        cases: list[tuple[dict[str, object], type[GyreError], str]] = [
            ({"role": "rolout", "count": 2}, NotFound, "did you mean 'rollout'"),
            ({"role": "rollout", "count": 99}, ConfigError, "permitted are 1 to 4"),
            ({"role": "actor", "count": 3}, Conflict, "cannot be scaled"),
        ]
        for body, kind, message in cases:
            with pytest.raises(kind, match=message):
                reader.command("golden", "scale", body, deadline_s=10 * GENEROUS_S)
    server.stop()


def test_with_a_url_the_master_is_all_there_is(golden: StandingJob, away: str) -> None:
    server = RestServer(create_app(golden.master, token="t"), token="t")
    (golden.logs / "rollout-0.1.log").write_text("hello\n")
    with JobReader(None, url=server.start(), token="t") as reader:
        assert reader.find().job_id == "golden-1"
        assert reader.jobs()[0]["name"] == "small"
        assert reader.spec("golden-1")["name"] == "small"
        assert [event["seq"] for event in reader.history("golden-1", after=6)] == [7, 8]
        page = reader.logs("golden-1")
        assert [line["text"] for line in page["lines"]] == ["hello"]
        assert reader.logs("golden-1", after=page["next"])["lines"] == []
        assert reader.command("small", "pause") == 9
        with pytest.raises(NotFound, match="No store is known"):
            _ = reader.store
    server.stop()
    with JobReader(None, url=away) as reader, pytest.raises(Unreachable):
        reader.find()


def test_logs_of_a_job_that_is_over_are_read_from_this_machine(seed: Seed, home: Home) -> None:
    with JobReader(seed("rollout_lost"), at=home) as reader:
        with pytest.raises(NotFound, match="There are no logs"):
            reader.logs("golden-1")
        (home.logs("golden-1") / "rollout-1.2.log").write_text("back at work\n")
        (home.logs("golden-1") / "reward-0.1.log").write_text("scored\n")
        (chunk,) = reader.logs("golden-1", LogQuery(role="rollout"))["lines"]
    assert (chunk["vertex"], chunk["incarnation"], chunk["text"]) == ("rollout-1", 2, "back at work")


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a master's address"):
        GyreClient(url)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (httpx.Response(503, json={"code": "store.full", "detail": "No space."}), StoreFull),
        (httpx.Response(403, json={"code": "forbidden_origin", "detail": "No."}), Unauthorized),
        (httpx.Response(500, json={"code": "gyre", "detail": "A defect."}), GyreError),
        (httpx.Response(502, text="<html>a proxy</html>"), Unreachable),
        (httpx.Response(200, text="<html>a shop</html>"), Unreachable),
        (httpx.Response(404, json=["x"]), Unreachable),
    ],
)
def test_a_problem_is_raised_as_the_error_it_was(answer: httpx.Response, kind: type[GyreError]) -> None:
    transport = httpx.MockTransport(lambda request: answer)
    with GyreClient("http://127.0.0.1:1", transport=transport) as client, pytest.raises(GyreError) as caught:
        client.view("j")
    assert type(caught.value) is kind


def test_an_empty_state_is_a_view() -> None:
    assert view_of(JobState(), seq=0)["vertices"] == []
