"""The command line: light help, data on stdout and nothing else, one sentence and the right code for a mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gyre.api.cli import VERBS, main
from gyre.api.cli.look import _said, show_view
from gyre.api.cli.output import finite
from gyre.api.home import Home
from gyre.api.home import home as home_at
from gyre.api.reader import JobReader
from gyre.api.rest import RestServer, create_app
from gyre.api.terminal.formats import duration, local_time
from gyre.errors import ConfigError, GyreError
from gyre.store import StepRow, open_store
from tests.doubles.standing_job import StandingJob
from tests.ports import nobody_listens
from tests.waits import GENEROUS_S

Seed = Callable[..., str]

HEAVY = (
    "torch",
    "ray",
    "fastapi",
    "starlette",
    "uvicorn",
    "sqlalchemy",
    "pydantic",
    "rich",
    "httpx",
    "networkx",
    "numpy",
    "pyarrow",
)

JOB_FILE = """
name: planned
device_per_node: 4
recipe: grpo
config:
  task: {}
  model: {layers: 1, hidden: 16, heads: 2, kv_heads: 1, mlp: 16}
  optim: {lr: 0.001}
roles:
  actor: {}
  rollout: {total: 2}
  reward: {}
"""


def gyre(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def data(result: Result) -> Any:
    """stdout as one JSON document; the command must have succeeded."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# -- light ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["show", "--help"], ["run", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from gyre.api.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=GENEROUS_S
    )
    assert done.stdout.splitlines()[-1] == "[]", done


def test_the_help_names_every_verb_and_each_loads() -> None:
    text = gyre("--help").stdout
    for verb, (_, line) in VERBS.items():
        assert f"{verb} " in text
        assert line in text
        assert gyre(verb, "--help").exit_code == 0


# -- data on stdout ---------------------------------------------------------------------------------


def test_every_read_verb_gives_json_and_only_json(seed: Seed, home: Home, tmp_path: Path) -> None:
    seed("rollout_lost")
    (home.logs("golden-1") / "rollout-1.2.log").write_text("back\n")
    file = tmp_path / "job.yaml"
    file.write_text(JOB_FILE)
    assert data(gyre("ls", "--all", "--json"))[0]["name"] == "golden"
    assert data(gyre("ls", "--json")) == []
    view = data(gyre("show", "golden", "--json"))
    assert view["master"].keys() >= {"pid", "epoch", "url"}
    wanted = {"id", "role", "rank", "pid", "node", "phase", "reason", "version"}
    assert all(vertex.keys() >= wanted for vertex in view["vertices"])
    assert len(view["vertices"]) == 6
    events = data(gyre("events", "--json", "--after", "3"))
    assert [event["seq"] for event in events][:2] == [4, 5]
    lines = gyre("events", "-f", "--json", "--after", "3").stdout.splitlines()
    assert [json.loads(line) for line in lines] == events
    assert data(gyre("logs", "--json", "--role", "rollout"))[0]["text"] == "back"
    assert data(gyre("replay", "--json"))["differences"] == []
    assert data(gyre("plan", str(file), "--json"))["name"] == "planned"
    assert {check["name"] for check in json.loads(gyre("doctor", "--json").stdout)} >= {
        "python",
        "ray",
        "disk",
    }


def test_the_same_is_there_for_people(seed: Seed, home: Home) -> None:
    seed("user_code")
    (home.logs("golden-1") / "reward-0.1.log").write_text("one\ntwo\n")
    assert "golden-1" in gyre("ls", "--all").stdout
    shown = gyre("show").stdout
    assert "failed (user_code)" in shown
    assert 'File "mine.py", line 7' in shown
    assert "VertexStarted" in gyre("events").stdout
    shown = [line.split(maxsplit=2)[2] for line in gyre("logs").stdout.splitlines()]
    assert shown == ["I reward-0     one", "I reward-0     two"]


def test_a_store_is_named_as_it_is_given(seed: Seed, home: Home) -> None:
    seed("user_code")
    assert f"There is no job 'other' in {home.database_url()}." in gyre("show", "other").stderr


@pytest.mark.parametrize("width", [60, 80, 120])
def test_on_a_terminal_a_job_a_vertex_and_an_incident_are_a_line_each(
    seed: Seed, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr("gyre.api.cli.output.stdout_is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    seed("user_code", job_id="golden-0123abcd", at=time.time() - 185.0)
    listed, shown = gyre("ls", "--all").stdout, gyre("show").stdout
    assert max(map(len, (listed + shown.partition("Traceback")[0]).splitlines())) <= width
    (header, job) = listed.splitlines()
    assert header.split()[-1] in ("SUBMITTED", "FOR")
    assert {"golden-0123abcd", "failed"} <= set(job.split())
    assert "3 min ago" in job
    vertices = [
        line.split() for line in shown.splitlines() if re.match(r"(actor|rollout|reward|trainer)-\d", line)
    ]
    rows = [line for line in vertices if "stopped" in line]
    assert {row[0] for row in rows} == {
        "actor-0",
        "actor-1",
        "reward-0",
        "rollout-0",
        "rollout-1",
        "trainer-0",
    }
    incidents = [line for line in vertices if "user_code" in line and "stopped" not in line]
    assert len(incidents) == 4
    assert all("ValueError: no (mine.py:7)" in " ".join(line) for line in incidents)


def test_in_a_pipe_every_column_is_there_and_whole(seed: Seed) -> None:
    seed("user_code")
    listed, shown = gyre("ls", "--all").stdout.splitlines(), gyre("show").stdout
    assert listed[0].split() == [
        "NAME",
        "ID",
        "PHASE",
        "REASON",
        "MASTER",
        "STEP",
        "REWARD",
        "CURVE",
        *("BEST", "HELD", "OUT"),
        "LAST",
        "TOK/S",
        "COST",
        "TAGS",
        "VERSION",
        "SUBMITTED",
        "FOR",
    ]
    assert local_time(1.0) in listed[1]
    assert "INCIDENT  AT " in shown
    (restarted,) = (line for line in shown.splitlines() if "restart reward-0" in line)
    assert restarted.split()[0] == "reward-0"
    assert restarted.endswith("ValueError: no (mine.py:7)")


def test_an_empty_home_is_no_error_for_ls_and_is_left_alone(home: Home) -> None:
    result = gyre("ls")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "There is no job yet" in result.stderr
    assert not (home.path / "gyre.db").exists()


def test_show_tells_whose_weights_a_job_began_with(seed: Seed, capsys: pytest.CaptureFixture[str]) -> None:
    with JobReader(seed("undisturbed")) as reader:
        view = reader.view("golden-1")
    assert "weights from" not in gyre("show").stdout
    view["job"]["weights_from"] = "job warm-1, step 40"
    show_view(view)
    assert re.search(r"weights from +job warm-1, step 40", capsys.readouterr().out)


def test_show_has_a_line_for_each_evaluation(seed: Seed) -> None:
    seed("evaluated")
    shown = [line.split() for line in gyre("show").stdout.splitlines()]
    rows = [line for line in shown if line and line[0] in ("aime", "math500")]
    assert rows == [
        ["aime", "0", "2", "0.5", "0.5", "1:0.5", "4:0.75"],
        ["aime", "2", "2", "0.625", "0.5", "1:0.5", "4:0.75"],
        ["math500", "0", "2", "0.25", "0.5", "25.0%", "1:25.0%", "4:75.0%", "1:0.5", "4:0.75"],
        ["math500", "2", "2", "0.5", "0.5", "50.0%", "1:50.0%", "4:75.0%", "1:0.5", "4:0.75"],
    ]
    assert data(gyre("show", "--json"))["evaluations"]["aime"][1]["reward_mean"] == 0.625
    seed("actor_lost", job_id="golden-2", at=3.0)
    assert "HELD OUT" not in gyre("show", "golden-2").stdout


def test_ls_tells_the_place_of_a_job_that_waits_for_room(seed: Seed, home: Home) -> None:
    seed("undisturbed", live=True)
    with open_store(home.database_url()) as store:
        store.create_job(job_id="other-1", name="other", spec=store.job("golden-1").spec, now=1.0)
        for job_id, since in (("golden-1", 50.0), ("other-1", 20.0)):
            store.update_job(job_id, queued_since=since, queued_at=time.time())
    listed = {job["job_id"]: job["queue_place"] for job in data(gyre("ls", "--all", "--json"))}
    assert listed == {"golden-1": 2, "other-1": 1}
    assert "number 2 in the queue" in gyre("ls", "--all").stdout


def test_ls_lists_no_job_that_is_over_though_nobody_has_noted_it(seed: Seed) -> None:
    seed("undisturbed", live=True)
    assert data(gyre("ls", "--json")) == []
    assert [job["phase"] for job in data(gyre("ls", "--all", "--json"))] == ["succeeded"]


def test_metrics_come_from_the_ledger(seed: Seed, home: Home) -> None:
    seed("undisturbed")
    assert data(gyre("metrics", "--json")) == []
    assert "no optimizer step" in gyre("metrics").stderr
    with open_store(home.database_url()) as store:
        ledger = store.ledger("golden-1")
        ledger.take_over(term=1)
        steps = [
            StepRow(step, step, None, [], {"reward_mean": step / 3, "lr": 1}, 0.0) for step in range(1, 31)
        ]
        ledger.write(1, steps=steps)
    rows = data(gyre("metrics", "golden", "--json"))
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[2] == {"step": 3, "reward_mean": 1.0, "lr": 1}
    assert data(gyre("metrics", "--last", "2", "--json")) == rows[-2:]
    header, *shown = gyre("metrics", "--last", "2").stdout.splitlines()
    assert header.split()[:2] == ["STEP", "REWARD"]
    assert [line.split()[:2] for line in shown] == [["29", "9.67"], ["30", "10"]]


def test_events_show_the_reward_of_a_step_first(seed: Seed) -> None:
    body = {"metrics": {"at": 1.0, "groups": 4, "reward_mean": 0.25, "loss": 0.5}}
    assert _said({"body": body}) == "metrics=reward_mean:0.25,loss:0.5,at:1,groups:4"


def test_show_of_an_ended_job_has_its_result_and_no_master(seed: Seed) -> None:
    seed("undisturbed")
    shown = gyre("show").stdout
    assert "master" not in shown
    assert re.search(r"ran for +\S", shown)


def test_resume_of_a_finished_job_starts_nothing(
    seed: Seed, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed("undisturbed")
    with open_store(home.database_url()) as store:
        steps = store.job("golden-1").spec["run"]["steps"]

    def trained(self: JobReader, job_id: str) -> Any:
        return VIEW(self, job_id) | {"training": {"last": {"step": steps}}}

    monkeypatch.setattr(JobReader, "view", trained)
    result = gyre("resume", "golden")
    assert result.exit_code == 0, result.output
    assert f"There is nothing left to do: all {steps} steps of golden are trained." in result.stderr
    assert f"--set run.steps={2 * steps}" in result.stderr


VIEW = JobReader.view


def test_plan_draws(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB_FILE)
    assert gyre("plan", str(file), "--dot").stdout.startswith("digraph")
    assert gyre("plan", str(file), "--mermaid").stdout.startswith("flowchart")
    assert "rollout" in gyre("plan", str(file)).stdout
    changed = data(gyre("plan", str(file), "--json", "--set", "roles.rollout.total=3"))
    assert next(role["total"] for role in changed["roles"] if role["name"] == "rollout") == 3


# -- a running job ----------------------------------------------------------------------------------


def test_commands_reach_the_master_by_the_store_and_by_url(
    seed: Seed, home: Home, golden: StandingJob
) -> None:
    server = RestServer(create_app(golden.master, token="t"), token="t")
    url = server.start()
    seed("undisturbed", live=True, url=url)
    assert data(gyre("--token", "t", "scale", "rollout=3", "--json")) == {"job_id": "golden-1", "seq": 9}
    assert gyre("pause", "golden", "--token", "t").exit_code == 0
    assert gyre("--url", url, "--token", "t", "resume").exit_code == 0
    with nobody_listens() as gone, open_store(home.database_url()) as store:
        store.update_job("golden-1", ray_address=gone)  # while its master answers it is not lost
        assert gyre("pause", "golden", "--token", "t").exit_code == 0
        assert "resuming" in gyre("resume", "golden", "--token", "t").stderr
    assert data(gyre("show", "--url", url, "--token", "t", "--json"))["master"]["answering"]
    assert data(gyre("ls", "--url", url, "--token", "t", "--json"))[0]["job_id"] == "golden-1"
    assert "rollout-1" in gyre("nodes", "--token", "t").stdout
    assert data(gyre("nodes", "--url", url, "--token", "t", "--json"))[0]["id"] == "node-0"
    assert gyre("--token", "t", "drain", "rollout-1").exit_code == 0
    assert gyre("--token", "t", "undrain", "golden", "rollout-1").exit_code == 0
    assert gyre("--token", "t", "drain", "nobody").exit_code == 4
    assert gyre("--token", "t", "scale", "rollout=99").exit_code == 2
    assert gyre("--token", "t", "scale", "nobody=1").exit_code == 4
    assert gyre("--token", "t", "scale", "actor=3").exit_code == 5
    assert gyre("pause", "--token", "wrong").exit_code == 3
    assert gyre("--url", url, "show").exit_code == 3
    assert gyre("stop", "golden", "--reason", "enough", "--token", "t").exit_code == 0
    assert golden.view()["job"]["message"] == "enough"
    server.stop()
    assert gyre("--url", url, "show").exit_code == 3


@pytest.mark.parametrize(
    ("words", "at_once"),
    [(["stop"], False), (["cancel"], False), (["stop", "--now"], True), (["kill"], True)],
)
def test_stop_and_its_other_names(
    seed: Seed, home: Home, golden: StandingJob, words: list[str], at_once: bool
) -> None:
    server = RestServer(create_app(golden.master, token="t"), token="t")
    seed("undisturbed", live=True, url=server.start())
    asked = gyre(*words, "golden", "--token", "t")
    assert asked.exit_code == 0, asked.output
    assert ("ending at once" if at_once else "stopping") in asked.stderr
    (event,) = (e for e in golden.master.events() if e["kind"] == "StopRequested")
    assert event["body"]["at_once"] is at_once
    assert event["body"]["reason"] == ("killed" if at_once else "asked for")
    server.stop()


@pytest.mark.parametrize(
    ("word", "verb"), [("status", "show"), ("ps", "ls"), ("cancel", "stop"), ("kill", "stop")]
)
def test_another_name_of_a_verb_is_in_the_help_and_has_the_verbs_own(word: str, verb: str) -> None:
    assert re.search(rf"^  {word} +{verb}", gyre("--help").stdout, re.MULTILINE)
    assert gyre(word, "--help").stdout == gyre(verb, "--help").stdout


# -- mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["shwo"], 2, "did you mean 'show'"),
        (["statsu"], 2, "did you mean 'status'"),
        (["show", "--jsno"], 2, "--json"),
        (["show", "nobody"], 4, "There is no job 'nobody'"),
        (["scale", "rollout"], 2, "expected [JOB] ROLE=N"),
        (["scale", "golden", "rollout=many"], 2, "expected [JOB] ROLE=N"),
        (["drain", "a", "b", "c"], 2, "expected [JOB] NODE|VERTEX|INSTANCE"),
        (["nodes"], 5, "it has no machines any more"),
        (["pause"], 5, "`pause` needs a running job"),
        (["replay", "--until", "noon"], 2, "expected an event's number, or a time"),
        (["plan", "/nowhere/job.yaml"], 2, "no such file"),
        (["run", "/nowhere/job.yaml"], 2, "no such file"),
        (["show", "--url", "http://127.0.0.1:9"], 3, "No master answers"),
        (["show", "--url", "nonsense"], 2, "is not a master's address"),
        (["ls", "--store", "sqlite:////nowhere/at/all.db"], 3, "There is no store"),
        (["ls", "--store", "mysql://x/y"], 3, "not in 'mysql'"),
    ],
)
def test_a_mistake_is_one_sentence_and_its_code(
    seed: Seed, arguments: list[str], code: int, said: str
) -> None:
    seed("rollout_lost")
    result = gyre(*arguments)
    verdict = "No: see the error.\n" if arguments[0] == "plan" else ""
    assert (result.exit_code, result.stdout) == (code, verdict)
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_store_that_is_damaged_is_said_and_left(home: Home) -> None:
    (home.path / "gyre.db").write_bytes(b"not a database at all, but long enough to look at")
    result = gyre("ls")
    assert result.exit_code == 3
    assert "not an SQLite database" in result.stderr
    assert (home.path / "gyre.db").read_bytes().startswith(b"not a database")
    checks = {check["name"]: check for check in json.loads(gyre("doctor", "--json").stdout)}
    assert checks["database"]["status"] == "fail"
    assert gyre("doctor").exit_code == 2


def test_a_users_traceback_comes_before_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise GyreError("It failed.", hint="Mend it.", details={"traceback": "Traceback …\nValueError: no"})

    monkeypatch.setattr("gyre.api.cli.context.CliContext.reader", fail)
    result = gyre("show")
    assert result.exit_code == 1
    assert result.stderr == "Traceback …\nValueError: no\nerror: It failed.\n       Mend it.\n"


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gyre.api.cli.context.CliContext.reader", interrupt)
    result = gyre("show")
    assert (result.exit_code, result.output.strip()) == (130, "")


@pytest.mark.parametrize(("signalled", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_that_fails_an_import_is_no_error_of_ours(
    tmp_path: Path, home: Home, signalled: str, code: int
) -> None:
    """Libraries replace whatever comes while they load with an ImportError of their own."""
    (tmp_path / "interrupted.py").write_text(
        "import signal\n"
        "from gyre.api.terminal.foreground import terminable\n"
        "try:\n"
        "    with terminable():\n"
        f"        signal.raise_signal(signal.{signalled})\n"
        "except BaseException:\n"
        "    raise ImportError('a part of this library is missing')\n"
    )
    script = (
        "import sys\n"
        "from gyre.api.cli import main\n"
        "from gyre.api.cli.context import CliContext\n"
        "CliContext.reader = lambda session: __import__('interrupted')\n"
        "main(['show'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (code, "", "")


def test_an_error_that_nobody_caused_by_a_signal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ImportError("a part of this library is missing")

    monkeypatch.setattr("gyre.api.cli.context.CliContext.reader", fail)
    result = gyre("show")
    assert isinstance(result.exception, ImportError)


def test_a_reader_that_goes_is_quiet(seed: Seed, home: Home) -> None:
    seed("commanded")
    command = f"{sys.executable} -m gyre.api.cli events; echo code $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"({command}) | true"], capture_output=True, text=True, timeout=GENEROUS_S
    )
    assert done.stderr == "code 0\n"


# -- replay -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["undisturbed", "rollout_lost", "actor_lost", "user_code", "commanded", "continued"]
)
def test_replay_finds_a_golden_history_equal(seed: Seed, name: str) -> None:
    seed(name)
    result = gyre("replay")
    assert result.exit_code == 0, result.output
    assert "Fold and snapshot are equal." in result.stderr


def test_replay_notices_a_snapshot_that_was_tampered_with(seed: Seed) -> None:
    seed("tampered")
    result = gyre("replay", "golden", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)["differences"]
    assert {tuple(difference["key"]) for difference in found} == {
        ("job", "job"),
        ("vertex", "rollout-1"),
        ("budget", "vertex:rollout-1"),
    }
    assert "Fold and snapshot differ in 3 rows." in gyre("replay").stderr


def test_replay_goes_back_to_any_event_and_time(seed: Seed) -> None:
    seed("rollout_lost")
    whole = data(gyre("replay", "--json"))
    early = data(gyre("replay", "--until", "4", "--json"))
    assert (early["seq"], early["events"], early["compared"]) == (4, 4, False)
    assert early["state"]["job"]["phase"] == "starting"
    assert (whole["state"]["job"]["phase"], whole["compared"]) == ("succeeded", True)
    at = local_time(1_700_000_004.0)
    assert data(gyre("replay", "--until", at, "--json")) == early
    assert data(gyre("replay", "--until", "0", "--json"))["events"] == 0


def test_replay_says_when_a_history_cannot_be_folded(seed: Seed) -> None:
    from gyre.store import Entry

    with open_store(seed("undisturbed")) as store:
        journal = store.journal("golden-1")
        entry = Entry(journal.last_seq() + 1, "new", None, "MoonRose", 9.0, "later", {})
        journal.append(journal.epoch(), [entry])
    result = gyre("replay")
    assert result.exit_code == 3
    assert "does not fold: event kind 'MoonRose' is not known" in result.stderr


# -- small things -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0, "0.0 s"),
        (0.84, "0.8 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (185, "3 min 5 s"),
        (8040, "2 h 14 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_what_json_cannot_say_is_null() -> None:
    assert finite({"a": [float("nan"), 1.5, float("inf")], "b": (1,)}) == {"a": [None, 1.5, None], "b": [1]}


def test_a_home_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a file is in the way"):
        home_at(tmp_path / "file" / "home").job_directory("j")
    with pytest.raises(ConfigError, match="cannot be the name"):
        home_at(tmp_path).logs("../elsewhere")


def test_a_long_home_keeps_rays_sockets_short(tmp_path: Path) -> None:
    assert home_at("/tmp/g").path == Path("/tmp/g")
    long = home_at(tmp_path / ("x" * 80)).ray_temp_dir()
    assert len(str(long)) < 43
    long.rmdir()


# -- looking closer ---------------------------------------------------------------------------------


def test_top_of_an_ended_job_is_its_last_line(seed: Seed) -> None:
    seed("learning")
    result = gyre("top", "golden-1")
    assert result.exit_code == 0
    assert "steps" in result.stderr
    assert result.stdout == ""


def test_two_jobs_are_compared(seed: Seed) -> None:
    seed("learning")
    seed("actor_lost", job_id="golden-2")
    assert len(data(gyre("compare", "golden-1", "golden-2", "--json"))["jobs"]) == 2
    assert "phase" in gyre("compare", "golden-1", "golden-2").stdout
    assert gyre("compare", "golden-1").exit_code == 2


def test_one_incident_is_shown_in_full(seed: Seed) -> None:
    seed("actor_lost")
    shown = gyre("show", "golden-1", "1")
    assert shown.exit_code == 0, shown.stderr
    assert "decision" in shown.stdout
    assert data(gyre("show", "golden-1", "1", "--json"))["events"]
    assert gyre("show", "golden-1", "no-such").exit_code == 4


def shown_logs(*arguments: str) -> list[str]:
    return [line.split(maxsplit=4)[-1] for line in gyre("logs", "golden-1", *arguments).stdout.splitlines()]


def test_lines_of_logs_are_chosen(seed: Seed, home: Home) -> None:
    seed("actor_lost")
    (home.logs("golden-1") / "actor-0.1.log").write_text(
        "2026-01-01T00:00:01.000Z I one\n2026-01-01T00:00:02.000Z W two\n2026-01-01T00:00:04.000Z E three\n"
    )
    (home.logs("golden-1") / "actor-1.1.log").write_text("2026-01-01T00:00:03.000Z I four\n")
    assert shown_logs() == ["one", "two", "four", "three"]
    assert shown_logs("--tail", "1") == ["four", "three"]
    assert shown_logs("--grep", "^t", "--tail", "1") == ["three"]
    assert shown_logs("--level", "w") == ["two", "three"]
    assert shown_logs("--since", "2026-01-01T00:00:03Z") == ["four", "three"]
    assert shown_logs("--until", "2026-01-01T00:00:02Z", "--vertex", "actor-0") == ["one", "two"]
    assert shown_logs("--since", "10m") == []
    lines = [json.loads(line) for line in gyre("logs", "golden-1", "-f", "--json").stdout.splitlines()]
    assert lines == data(gyre("logs", "golden-1", "--json"))
    assert lines[0] == {
        "at": 1767225601.0,
        "level": "I",
        "vertex": "actor-0",
        "incarnation": 1,
        "file": "actor-0.1.log",
        "text": "one",
    }


@pytest.mark.parametrize("wrong", [("--grep", "("), ("--level", "loud"), ("--since", "yesterday")])
def test_a_choice_of_lines_that_is_none_is_a_sentence(seed: Seed, home: Home, wrong: tuple[str, str]) -> None:
    seed("actor_lost")
    result = gyre("logs", "golden-1", *wrong)
    assert result.exit_code == 2
    assert wrong[1] in result.stderr or "level" in result.stderr


def test_logs_that_are_not_here_are_said(seed: Seed, home: Home) -> None:
    seed("actor_lost")
    (home.logs("golden-1") / "actor-0.1.log").write_text("one\n")
    told = gyre("logs", "golden-1").stderr
    assert "There is no log of trainer-0 here" in told
    assert "actor-0" not in told
    assert "trainer-0" not in gyre("logs", "golden-1", "--role", "actor").stderr


def test_a_bundle_is_written(seed: Seed, tmp_path: Path) -> None:
    seed("actor_lost")
    file = tmp_path / "bundle.tar.gz"
    assert data(gyre("debug", "golden-1", "-o", str(file), "--json"))["file"] == str(file)
    assert file.exists()
