"""What REST and the store alone say of a job's past: a master in virtual time has kept it."""

from __future__ import annotations

from typing import Any

import pytest
from httpx import Client

from gyre.api.home import Home
from gyre.api.reader import JobReader
from tests.api.test_rest import assert_problem
from tests.doubles.standing_job import StandingJob

JOB = "/api/v1/jobs/small"


def let_pass(job: StandingJob, seconds: float) -> None:
    until = job.clock.monotonic() + seconds
    job.run_until(lambda _: job.clock.monotonic() >= until)


@pytest.fixture
def store_alone(job: StandingJob, home: Home) -> JobReader:
    """The job as its store has it, without a master's address."""
    return JobReader(f"sqlite:///{job.directory / 'gyre.db'}", at=home)


def test_the_numbers_of_every_source_come_over_time(
    job: StandingJob, http: Client, store_alone: JobReader
) -> None:
    job.do(
        job.world.say,
        "trainer-0",
        {"step": 3, "times": {"actor": {"training": 0.25}}, "reward": float("nan")},
    )
    job.do(job.world.say, "rollout-0", {"queue": 2})
    begun = job.clock.time()
    let_pass(job, 31.0)
    found = http.get(f"{JOB}/series").json()
    assert found["resolution_s"] == 5.0
    series = found["series"]
    assert set(series) == {"master", "trainer"} | {
        f"vertex/{vertex['id']}" for vertex in job.view()["vertices"]
    }
    times = [at for at, _ in series["vertex/rollout-0"]["queue"]]
    assert times == [at * 5.0 for at in range(int(begun // 5) + 1, int((begun + 31) // 5) + 1)]
    assert [value for _, value in series["trainer"]["times/actor/training"]] == [0.25] * len(times)
    assert "reward" not in series["trainer"], "what is no number is left out"
    assert series["master"]["seq"][-1][1] == job.view()["seq"]
    one = http.get(
        f"{JOB}/series", params={"source": "vertex/rollout-0", "number": "queue", "points": 1}
    ).json()
    (numbers,) = one["series"].values()
    assert {name: {value for _, value in pairs} for name, pairs in numbers.items()} == {"queue": {2.0}}
    assert len(numbers["queue"]) <= 2, "a point, and one more where the interval begins within another"
    with store_alone as reader:
        assert as_lists(reader.series("standing-1")) == http.get(f"{JOB}/series").json()


def as_lists(found: dict[str, Any]) -> dict[str, Any]:
    return {
        **found,
        "series": {
            source: {name: [list(pair) for pair in pairs] for name, pairs in numbers.items()}
            for source, numbers in found["series"].items()
        },
    }


def test_any_moment_of_the_journal_comes_back(job: StandingJob, http: Client, store_alone: JobReader) -> None:
    before = job.view()
    job.do(job.world.kill, "rollout-1")
    job.run_until(lambda view: view["incidents"] and view["incidents"][0]["outcome"] == "recovered")
    then = http.get(f"{JOB}/at", params={"seq": before["seq"]}).json()
    assert then["event"]["seq"] == then["view"]["seq"] == before["seq"]
    assert then["view"]["incidents"] == []
    assert (then["first"], then["last"]) == (1, job.view()["seq"])
    lost = next(event for event in job.master.events() if event["kind"] == "VertexLost")
    down = http.get(f"{JOB}/at", params={"time": lost["at"]}).json()
    assert down["event"]["seq"] == lost["seq"]
    phases = {vertex["id"]: vertex["phase"] for vertex in down["view"]["vertices"]}
    assert phases["rollout-1"] == "starting"
    first = http.get(f"{JOB}/at", params={"seq": 0}).json()
    assert (first["event"], first["view"]["vertices"]) == (None, [])
    now = http.get(f"{JOB}/at").json()
    assert now["view"]["seq"] == job.view()["seq"]
    assert now["view"]["incidents"] == http.get(f"{JOB}/incidents").json()["incidents"]
    with store_alone as reader:
        assert reader.at("standing-1", seq=lost["seq"])["view"]["vertices"][0]["id"]
        assert reader.at("standing-1", time=lost["at"])["event"]["seq"] == lost["seq"]


def test_decisions_are_what_made_or_settled_an_incident_and_commands(
    job: StandingJob, http: Client, store_alone: JobReader
) -> None:
    job.do(job.world.kill, "rollout-1")
    job.run_until(lambda view: view["incidents"] and view["incidents"][0]["outcome"] == "recovered")
    asked = job.command("scale", role="rollout", count=3)
    lost, settled = (
        next(event["seq"] for event in job.master.events() if event["kind"] == kind and event["seq"] > 8)
        for kind in ("VertexLost", "VertexStarted")
    )
    last = job.view()["seq"]

    def around(seq: int) -> tuple[int | None, int | None]:
        found = http.get(f"{JOB}/decisions", params={"around": seq}).json()
        return found["previous"], found["next"]

    assert around(0) == (None, lost)
    assert around(lost) == (None, settled)
    assert around(settled) == (lost, asked)
    assert around(last + 100) == (asked, None)
    with store_alone as reader:
        assert reader.decisions("standing-1", around=settled) == {"previous": lost, "next": asked}


def test_the_time_line_says_who_was_down_and_for_whom_the_trainer_waited(
    job: StandingJob, http: Client, store_alone: JobReader
) -> None:
    spent = {"training": 0.0, "waits for rollout (generating)": 0.0}

    def spend(training_s: float, waiting_s: float) -> None:
        spent["training"] += training_s
        spent["waits for rollout (generating)"] += waiting_s
        job.do(job.world.say, "trainer-0", {"step": 1, "spent_s": {"actor": dict(spent)}})
        let_pass(job, 5.0)

    spend(0.0, 0.0)
    spend(1.0, 4.0)
    spend(1.0, 4.0)
    job.do(job.world.kill, "rollout-1")
    job.run_until(lambda view: view["incidents"] and view["incidents"][0]["outcome"] == "recovered")
    spend(5.0, 0.0)
    spend(5.0, 0.0)
    spend(0.0, 0.0)  # what the last tick tells is drawn to the end
    found = http.get(f"{JOB}/timeline").json()
    lanes = {lane["id"]: lane for lane in found["lanes"]}
    assert found["lanes"][0]["id"] == "trainer-0"
    assert set(lanes) == {vertex["id"] for vertex in job.view()["vertices"]}
    lost = next(event for event in job.master.events() if event["kind"] == "VertexLost")
    (down,) = [span for span in lanes["rollout-1"]["spans"] if span[2] == "down"]
    assert (down[0], down[3]) == (lost["at"], "process_died")
    spans = lanes["actor-0"]["spans"]
    waited = sum(
        to - since for since, to, state, cause in spans if (state, cause) == ("wait", "rollout (generating)")
    )
    trained = sum(to - since for since, to, state, _ in spans if state == "train")
    assert (waited, trained) == (pytest.approx(8.0, abs=1.0), pytest.approx(12.0, abs=1.0))
    (flag,) = [flag for flag in found["flags"] if flag["kind"] == "incident"]
    assert flag.items() >= {"at": lost["at"], "seq": lost["seq"]}.items()
    part = http.get(f"{JOB}/timeline", params={"since": down[0] + 0.1, "until": down[1] - 0.1}).json()
    assert {lane["id"]: lane["spans"] for lane in part["lanes"]}["rollout-1"] == [
        [down[0] + 0.1, down[1] - 0.1, "down", "restarted"]
    ]
    with store_alone as reader:
        assert reader.timeline("standing-1", since=0.0, until=down[1])["lanes"]


def test_what_makes_no_sense_is_refused(http: Client) -> None:
    for path in (
        "at?seq=-1",
        "at?time=nan",
        "decisions",
        "series?points=0",
        "series?since=inf",
        "timeline?until=x",
    ):
        assert_problem(http.get(f"{JOB}/{path}"), 422, "config")
