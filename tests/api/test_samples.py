"""Samples over REST and by `gyre samples`: the same answers from a master, from a client, and from files alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from httpx import Client

from gyre.api.cli import main
from gyre.api.client import GyreClient
from gyre.api.home import Home
from gyre.api.reader import JOBS_WITH_SAMPLES, JobReader
from gyre.api.rest import RestServer, create_app
from gyre.errors import NotFound
from gyre.observe.samples import files as files_module
from gyre.observe.samples.names import folder_of
from gyre.observe.samples.query import SampleFilter, conditions_in
from gyre.observe.samples.texts import Texts
from gyre.observe.samples.writer import SampleWriter
from gyre.rollouts.samples import InstanceRun, VersionRun
from gyre.store import open_store
from gyre.workloads.tasks.arithmetic import CharTokenizer
from tests.doubles.standing_job import StandingJob
from tests.observe.samples.some_groups import group, kept, sample, written
from tests.ports import nobody_listens

JOB = "/api/v1/jobs/small"
Seed = Callable[..., str]


class Task:
    tokenizer = CharTokenizer("0123456789+-*=")

    def prompt_text(self, of: Any) -> str:
        return self.tokenizer.decode(of.prompt_ids)

    def answer_of(self, of: Any) -> str:
        return self.tokenizer.decode(of.token_ids)


MOVED = sample(
    [4, 13, 2],
    float("nan"),
    versions=(VersionRun(0, 0, 2), VersionRun(1, 2, 3)),
    instances=(InstanceRun("rollout-0", 0, 2), InstanceRun("spot-1", 2, 3)),
    extras={"reward.format": float("nan")},
)
STEPS = {
    1: [group(1, sample(reward=0.0), sample(reward=1.0), answer="7")],
    2: [group(2, MOVED, sample([5, 6, 7, 8], reward=0.5, finish_reason="length"))],
}


def keep(folder: Path) -> None:
    kept(folder, STEPS, texts=Texts(Task()))
    held_out = {
        0: [group(0, sample(reward=1.0), answer="9"), group(1, sample(reward=0.0))],
        2: [group(0, sample(reward=1.0), answer="9"), group(1, sample([4, 13, 2], 1.0))],
    }

    def evaluate(writer: SampleWriter) -> None:
        for version, groups in held_out.items():
            writer.evaluated(version, "aime", groups, right_from=1.0)

    assert written(folder, evaluate, texts=Texts(Task())) == []

    def write(writer: SampleWriter) -> None:
        writer.quarantined(3, group(9), "it killed engines")

    assert written(folder, write) == []


@pytest.fixture(scope="module")
def keeping_job() -> Any:
    with StandingJob() as job:
        keep(folder_of(job.directory))
        yield job


@pytest.fixture
def rest(keeping_job: StandingJob, connect: Callable[..., Any]) -> Any:
    with connect(create_app(keeping_job.master, token=None)) as client:
        yield client


def test_a_reader_remembers_the_ends_of_files_of_some_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = Home(tmp_path / "home")
    jobs = [f"job-{number}" for number in range(JOBS_WITH_SAMPLES + 1)]
    with open_store(at.database_url()):
        pass
    for job in jobs:
        at.job_directory(job)
        keep(at.samples(job))
    read: list[str] = []
    original = files_module._read_end

    def counted(file: Any) -> Any:
        read.append(file.name)
        return original(file)

    monkeypatch.setattr(files_module, "_read_end", counted)
    with JobReader(at.database_url(), at=at) as reader:
        for job in (jobs[0], jobs[0], jobs[1], jobs[0]):
            assert reader.samples(job).find(SampleFilter())["total"] == 6
        assert len(read) == 2 * 3
        for job in jobs[2:]:
            reader.samples(job).steps()
        assert len(read) == len(jobs) * 3
        reader.samples(jobs[0]).steps()
        assert len(read) == len(jobs) * 3
        reader.samples(jobs[1]).steps()
        assert len(read) == (len(jobs) + 1) * 3


def test_steps_over_rest(rest: Client) -> None:
    found = rest.get(f"{JOB}/samples/steps").json()
    assert [(row["step"], row["samples"], row["groups"]) for row in found["steps"]] == [(1, 2, 1), (2, 2, 1)]
    assert found["quarantined"] == 1


def test_a_page_over_rest(rest: Client) -> None:
    page = rest.get(f"{JOB}/samples?step=2&limit=1").json()
    assert page["total"] == 2
    assert page["histogram"] == {"edges": [0.5, 0.5], "counts": [1]}
    assert page["samples"] == [
        {
            "step": 2,
            "group": 2,
            "sample": 0,
            "rollout": None,
            "reward": None,  # JSON has no NaN
            "more": {"format": None},
            "outcome": "trained",
            "finish_reason": "stop",
            "prompt": "2",
            "answer": "1+",
            "right_answer": None,
            "prompt_tokens": 2,
            "tokens": 3,
            "versions": [[0, 0, 2], [1, 2, 3]],
            "instances": [["rollout-0", 0, 2], ["spot-1", 2, 3]],
            "session": None,
            "quarantined": False,
        }
    ]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", [(3, 9, 0), (3, 9, 1), (2, 2, 0), (2, 2, 1), (1, 1, 0), (1, 1, 1)]),
        ("?order=worst&limit=2", [(1, 1, 0), (2, 2, 1)]),
        ("?order=best&limit=1&offset=1", [(3, 9, 0)]),
        ("?reward=%3C0.6", [(2, 2, 1), (1, 1, 0)]),
        ("?reward=%3E=0.5,%3C1", [(2, 2, 1)]),
        ("?tokens=%3E3", [(2, 2, 1)]),
        ("?tokens=%3E=3,%3C4&step=2", [(2, 2, 0)]),
        ("?tokens=%3E3&reward=1", []),
        ("?outcome=length", [(2, 2, 1)]),
        ("?instance=spot-1", [(2, 2, 0)]),
        ("?version=1", [(2, 2, 0)]),
        ("?group=1&step=1", [(1, 1, 0), (1, 1, 1)]),
        ("?quarantined=true", [(3, 9, 0), (3, 9, 1)]),
        ("?quarantined=false&step=3", []),
    ],
)
def test_filters_over_rest(rest: Client, query: str, found: list[tuple[int, int, int]]) -> None:
    page = rest.get(f"{JOB}/samples{query}").json()
    assert [(one["step"], one["group"], one["sample"]) for one in page["samples"]] == found


def test_one_sample_over_rest(rest: Client) -> None:
    found = rest.get(f"{JOB}/samples/2/2/0").json()
    assert found["token_ids"] == [4, 13, 2]
    assert found["pieces"] == ["1", "+", "<eos>"]
    assert found["logprobs"] == MOVED.logprobs.tolist()
    assert found["trainer_logprobs"] is None
    assert found["mask"] is None
    assert rest.get(f"{JOB}/samples/1/1/0").json()["meta"] == {"answer": "7"}
    assert rest.get(f"{JOB}/samples/3/9/0").json()["meta"] == {"evidence": "it killed engines"}


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("samples/2/2/7", 404, "not_found"),
        ("samples/2/2/x", 422, "config"),
        ("samples?reward=low", 422, "config"),
        ("samples?tokens=many", 422, "config"),
        ("samples?order=fastest", 422, "config"),
        ("samples?limit=1001", 422, "config"),
        ("samples?step=99999999999999999999", 422, "config"),
    ],
)
def test_what_makes_no_sense_is_a_problem(rest: Client, path: str, status: int, code: str) -> None:
    response = rest.get(f"{JOB}/{path}")
    assert (response.status_code, response.json()["code"]) == (status, code)


def test_a_job_without_samples_has_none(shared_http: Client) -> None:
    assert shared_http.get(f"{JOB}/samples/steps").json() == {"steps": [], "quarantined": 0}
    assert shared_http.get(f"{JOB}/samples").json()["total"] == 0


def test_a_client_reads_what_the_files_say(keeping_job: StandingJob) -> None:
    server = RestServer(create_app(keeping_job.master, token="t"), "127.0.0.1", 0, "t")
    try:
        with GyreClient(server.start(), "t") as client:
            far, near = client.samples("small"), keeping_job.master.samples()
            assert far.steps() == near.steps()
            for wanted in (
                SampleFilter(step=1),
                SampleFilter(reward=conditions_in("<0.6,>=0")),
                SampleFilter(tokens=conditions_in(">3")),
                SampleFilter(quarantined=False, version=0, outcome="length"),
            ):
                assert far.find(wanted, order="best") == {**near.find(wanted, order="best")}
            assert far.sample(1, 1, 0) == near.sample(1, 1, 0)
            with pytest.raises(NotFound, match="no sample 3"):
                far.sample(1, 1, 3)
    finally:
        server.stop()


# -- the command line -------------------------------------------------------------------------------


def gyre(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def gone(seed: Seed, home: Home) -> Home:
    """A job that ended long ago, of which this home has the samples."""
    seed("undisturbed")
    keep(home.samples("golden-1"))
    return home


def test_samples_of_a_job_whose_cluster_is_gone(gone: Home) -> None:
    result = gyre("samples", "golden")
    assert result.exit_code == 0, result.output
    header, *rows = result.stdout.splitlines()
    assert header.split() == [
        "SAMPLE",
        "REWARD",
        "OUTCOME",
        "TOKENS",
        "VERSION",
        "INSTANCES",
        "PROMPT",
        "ANSWER",
        "RIGHT",
        "ANSWER",
    ]
    assert rows[-1].split()[-1] == "7"
    assert [row.split()[0] for row in rows] == ["3/9/0", "3/9/1", "2/2/0", "2/2/1", "1/1/0", "1/1/1"]
    assert "0 to 1" in rows[2]
    assert "rollout-0 → spot-1" in rows[2]
    assert "trained, length" in rows[3]


def test_json_is_what_rest_has(gone: Home, rest: Client) -> None:
    found = json.loads(gyre("samples", "--step", "2", "--json").stdout)
    assert found == rest.get(f"{JOB}/samples?step=2").json()
    whole = json.loads(gyre("samples", "--step", "2", "--tokens", "2/0", "--json").stdout)
    assert whole == rest.get(f"{JOB}/samples/2/2/0").json()
    assert json.loads(gyre("samples", "--steps", "--json").stdout)["quarantined"] == 1


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--worst", "--limit", "2"], ["1/1/0", "2/2/1"]),
        (["--best", "--limit", "1"], ["1/1/1"]),
        (["--reward", "<0.6"], ["2/2/1", "1/1/0"]),
        (["--length", ">3"], ["2/2/1"]),
        (["--group", "1"], ["1/1/0", "1/1/1"]),
        (["--outcome", "length"], ["2/2/1"]),
        (["--instance", "spot-1"], ["2/2/0"]),
        (["--version", "1"], ["2/2/0"]),
        (["--quarantined"], ["3/9/0", "3/9/1"]),
    ],
)
def test_options_filter(gone: Home, options: list[str], found: list[str]) -> None:
    result = gyre("samples", *options)
    assert [row.split()[0] for row in result.stdout.splitlines()[1:]] == found


def test_a_sample_token_by_token(gone: Home) -> None:
    result = gyre("samples", "--tokens", "2/0")
    assert "step 2, group 2, sample 0: trained" in result.stderr
    rows = result.stdout.splitlines()[1:]
    assert [row.split() for row in rows] == [
        ["0", "4", "1", "-0.3333", "0", "rollout-0"],
        ["1", "13", "+", "-0.6667", "0", "rollout-0"],
        ["2", "2", "<eos>", "-1.0000", "1", "spot-1"],
    ]
    assert gyre("samples", "--tokens", "1/1/1").exit_code == 0


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--reward", "low"], 2, "no condition"),
        (["--length", "long"], 2, "--length: 'long' is no condition"),
        (["--tokens", "2"], 2, "expected GROUP/SAMPLE"),
        (["--tokens", "77/0"], 4, "No sample of group 77"),
        (["--step", "1", "--tokens", "2/0"], 4, "There is no sample 0 of group 2 in step 1"),
        (["--worst", "--best"], 2, "exclude each other"),
    ],
)
def test_a_mistake_is_a_sentence(gone: Home, options: list[str], code: int, said: str) -> None:
    result = gyre("samples", *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in result.stderr


def test_nothing_found_and_torn_files_are_told_on_stderr(gone: Home) -> None:
    (gone.samples("golden-1") / "step-00000001.parquet").write_bytes(b"PAR1")
    result = gyre("samples", "--outcome", "stale")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "No sample is like that" in result.stderr
    assert "step-00000001.parquet cannot be read, and is left out" in result.stderr


def test_an_answer_does_not_move_the_terminal_s_cursor(seed: Seed, home: Home) -> None:
    class Hostile:
        def answer_of(self, of: Any) -> str:
            return "\x1b[2Jgone\x9b1m \u202eback\nline"

    seed("undisturbed")
    kept(home.samples("golden-1"), {1: [group(1, sample())]}, texts=Texts(Hostile()))
    shown = gyre("samples", "golden").stdout
    assert "\\x1b[2Jgone\\x9b1m \\u202eback line" in shown
    assert not {"\x1b", "\x9b", "\u202e"} & {*shown}
    assert json.loads(gyre("samples", "--json").stdout)["samples"][0]["answer"] == Hostile().answer_of(None)


def test_why_there_are_none_is_told(seed: Seed, home: Home) -> None:
    store = seed("undisturbed")
    result = gyre("samples", "golden")
    assert (result.exit_code, result.stdout) == (4, "")
    assert "There are no samples of job golden" in result.stderr
    assert "on the machine that" in result.stderr or "machine that its trainer ran on" in result.stderr
    with open_store(store) as opened:
        spec = opened.job("golden").spec | {"observe": {"samples": {"every": 0}}}
        opened.create_job(job_id="none-1", name="none", spec=spec, now=5.0)
    assert "observe.samples.every is 0" in gyre("samples", "none").stderr


def test_samples_come_from_the_master_where_the_home_has_none(
    seed: Seed, home: Home, connect: Callable[..., Any]
) -> None:
    with StandingJob(job_id="golden-1") as job:
        keep(folder_of(job.directory))
        server = RestServer(create_app(job.master, token=None), "127.0.0.1", 0, None)
        try:
            url = server.start()
            seed("undisturbed", live=True, url=url)
            rows = gyre("samples", "golden", "--limit", "1").stdout.splitlines()
            assert rows[1].split()[0] == "3/9/0"
            assert gyre("samples", "--url", url, "--steps").exit_code == 0
        finally:
            server.stop()


def test_a_live_job_whose_master_is_away_and_that_made_no_step(seed: Seed, home: Home) -> None:
    with nobody_listens() as away:
        seed("undisturbed", live=True, url=f"http://{away}")
        result = gyre("samples", "golden")
    assert result.exit_code == 4, result.output
    assert "There are no samples" in result.stderr


# -- held-out answers --------------------------------------------------------------------------------


def test_held_out_answers_over_rest_and_by_a_client(rest: Client, keeping_job: StandingJob) -> None:
    assert rest.get(f"{JOB}/held-out").json() == {"sets": [{"set": "aime", "versions": [0, 2]}]}
    page = rest.get(f"{JOB}/held-out/aime?version=2&against=0").json()
    assert (page["total"], page["changed"], page["better"], page["unmatched"]) == (2, 1, 1, 0)
    first, second = page["prompts"]
    assert (first["prompt_number"], first["changed"], first["difference"]) == (1, True, 1.0)
    assert (first["before"]["samples"][0]["answer"], first["now"]["samples"][0]["answer"]) == ("234", "1+")
    assert second["right_answer"] == "9"
    assert rest.get(f"{JOB}/held-out/aime?limit=1&offset=1").json()["prompts"][0]["prompt_number"] == 1
    assert rest.get(f"{JOB}/held-out/math").status_code == 404
    assert rest.get(f"{JOB}/held-out/aime?version=1").json()["code"] == "not_found"
    server = RestServer(create_app(keeping_job.master, token="t"), "127.0.0.1", 0, "t")
    try:
        with GyreClient(server.start(), "t") as client:
            remote = client.samples("small")
            assert remote.held_out_sets() == {"sets": [{"set": "aime", "versions": [0, 2]}]}
            assert remote.held_out("aime", version=2, against=0) == page
    finally:
        server.stop()


def test_held_out_answers_on_the_terminal(gone: Home, rest: Client) -> None:
    result = gyre("samples", "--held-out", "aime", "--against", "0")
    assert result.exit_code == 0, result.output
    header, first, second = result.stdout.splitlines()
    assert header.split() == [
        "PROMPT",
        "RIGHT",
        "ANSWER",
        "V0",
        "ANSWER",
        "OF",
        "V0",
        "V2",
        "ANSWER",
        "OF",
        "V2",
    ]
    assert first.split() == ["*", "1", "wrong", "234", "right", "1+"]
    assert second.split() == ["0", "9", "right", "234", "right", "234"]
    assert "2 of 2 prompts of aime; * 1 changed since version 0: 1 better, 0 worse." in result.stderr
    alone = gyre("samples", "--held-out", "aime", "--version", "0")
    assert alone.stdout.splitlines()[0].split() == ["PROMPT", "RIGHT", "ANSWER", "V0", "ANSWER", "OF", "V0"]
    told = json.loads(gyre("samples", "--held-out", "aime", "--against", "0", "--json").stdout)
    assert told == rest.get(f"{JOB}/held-out/aime?against=0&limit=20").json()
    assert "gyre samples --held-out aime: versions 0, 2" in gyre("samples", "--steps").stderr
    assert "right answer: 7" in gyre("samples", "--tokens", "1/1/0").stderr
    assert gyre("samples", "--held-out", "math").exit_code == 4
    assert gyre("samples", "--against", "0").exit_code == 2


@pytest.fixture
def gone_with_rows(seed: Seed, home: Home) -> Home:
    seed("undisturbed")
    mask, logprobs = np.array([True, False, True]), np.array([-0.5, 0.0, -1.0], np.float32)
    rows = [replace(sample([4, 13, 2], 0.5), mask=mask, logprobs=logprobs, rollout=0), sample([5], 1.0)]
    kept(home.samples("golden-1"), {1: [group(1, rows[0], replace(rows[1], rollout=1))]}, texts=Texts(Task()))
    return home


def test_the_terminal_says_what_was_drawn_and_of_which_rollout_a_row_is(gone_with_rows: Home) -> None:
    header, *rows = gyre("samples").stdout.splitlines()
    assert header.split()[-1] == "ROLLOUT"
    assert [(row.split()[0], row.split()[-1]) for row in rows] == [("1/1/0", "0"), ("1/1/1", "1")]
    header, *tokens = gyre("samples", "--tokens", "1/0").stdout.splitlines()
    assert header.split()[-1] == "DRAWN"
    assert [row.split()[-1] for row in tokens] == ["yes", "no", "yes"]
    whole = json.loads(gyre("samples", "--tokens", "1/0", "--json").stdout)
    assert (whole["mask"], whole["rollout"]) == ([True, False, True], 0)
    assert "DRAWN" not in gyre("samples", "--tokens", "1/1").stdout
