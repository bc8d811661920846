"""What a new user gets wrong. Each time: one clear sentence, the right status, and nothing that stays behind."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gyre.api import RLJobBuilder
from gyre.api.cli import main
from gyre.errors import Conflict
from gyre.store import open_store
from gyre.store.tables import VERSION_TABLE
from tests.e2e.conftest import ENDS_WITHIN_S, Process, Shared
from tests.machine import small_disk
from tests.ports import nobody_listens

MODULE = "tests.e2e.workloads"

JOB: dict[str, Any] = {
    "name": "mine",
    "roles": {
        "trainer": {"entrypoint": f"{MODULE}:MyTrainer"},
        "rollout": {"entrypoint": f"{MODULE}:MyRollout", "total": 2},
    },
}


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address that nobody is at, as a cluster's that is gone."""
    with nobody_listens() as address:
        yield address


@pytest.fixture
def mine(short_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home where nothing was done yet, on a machine without Ray. Afterwards nothing may run from there."""
    monkeypatch.setenv("GYRE_HOME", str(short_home))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started for a job that cannot run")

    monkeypatch.setattr("gyre.api.ray_session._start_local", started)
    yield short_home
    database = short_home / "gyre.db"
    if database.exists() and database.read_bytes().startswith(b"SQLite format 3"):
        connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
        with contextlib.suppress(sqlite3.DatabaseError):  # the test damaged it
            assert connection.execute("select count(*) from jobs").fetchone() == (0,)
        connection.close()
    assert not (short_home / "jobs").exists()


def run(home: Path, job: dict[str, Any], *options: str) -> Result:
    file = home.parent / f"{home.name}.json"
    file.write_text(json.dumps(job))
    try:
        return CliRunner().invoke(main, ["run", str(file), *options])
    finally:
        file.unlink()


def says(result: Result, code: int, *parts: str) -> None:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (sentence,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for part in parts:
        assert part in result.stderr, result.stderr
    assert sentence.endswith((".", "?"))


@pytest.mark.parametrize(
    ("change", "code", "parts"),
    [
        (
            {"rollout": {"entrypoint": "no_such_module:Rollout"}},
            2,
            ["roles.rollout.entrypoint", "no_such_module does not import", "python_path"],
        ),
        ({"rollout": {"entrypoint": f"{MODULE}:MyRolout"}}, 2, ["did you mean 'MyRollout'"]),
        ({"rollout": {"entrypoint": f"{MODULE}:__name__"}}, 2, ["is a str, expected a class"]),
        ({"trainer": {"entrypoint": f"{MODULE}:MyRollout"}}, 2, ["has no fit()"]),
        (
            {"rollout": {"entrypoint": f"{MODULE}:MyRollout", "total": 3, "per_node": 2}},
            2,
            ["roles.rollout", "3", "2", "per_node"],
        ),
        ({"rolout": {"entrypoint": f"{MODULE}:MyRollout", "totl": 3}}, 2, ["totl", "did you mean 'total'"]),
    ],
)
def test_a_role_that_cannot_be(mine: Path, change: dict[str, Any], code: int, parts: list[str]) -> None:
    says(run(mine, {**JOB, "roles": {**JOB["roles"], **change}}), code, *parts)


def test_a_cycle_without_delay(mine: Path) -> None:
    edges = [{"source": "rollout", "target": "actor"}, {"source": "actor", "target": "rollout"}]
    roles = {**JOB["roles"], "actor": {"entrypoint": f"{MODULE}:MyActor"}}
    says(run(mine, {**JOB, "roles": roles, "edges": edges}), 2, "rollout", "actor", "delay")


def test_more_devices_than_the_job_has_nodes_for(mine: Path) -> None:
    says(run(mine, {**JOB, "node_num": 1, "device_per_node": 1}), 2, "required", "available")


@pytest.mark.ray
@pytest.mark.slow
def test_more_gpus_than_there_are(shared: Shared, tmp_path: Path) -> None:
    ended = shared.gyre("submit", "--no-wait", str(wants_gpus(tmp_path)))
    assert ended.code == 2
    assert "required" in ended.err
    assert "GPUs" in ended.err
    with open_store(f"sqlite:///{shared.home / 'gyre.db'}") as store:
        assert not any(row.name == "gpus" for row in store.jobs())


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_waits_for_gpus_that_may_come_and_is_stopped_meanwhile(shared: Shared, tmp_path: Path) -> None:
    ended = shared.gyre("submit", str(wants_gpus(tmp_path)))
    try:
        assert ended.code == 0, ended.err
        lack = "rollout-0 required 0 CPU, 0 bytes of memory, 1 GPUs on one machine"
        assert f"The job waits for room, for rollout-0, rollout-1: {lack}" in ended.err
        assert "add machines" in ended.err
    finally:
        assert shared.gyre("stop", "gpus").code == 0
    assert shared.gyre("events", "-f", "gpus").code == 0  # until it has ended
    with open_store(f"sqlite:///{shared.home / 'gyre.db'}") as store:
        assert [row.phase for row in store.jobs() if row.name == "gpus"] == ["stopped"]


def wants_gpus(folder: Path) -> Path:
    file = folder / "job.json"
    file.write_text(json.dumps({**JOB, "name": "gpus", "device_type": "GPU"}))
    return file


def test_a_name_that_is_none(mine: Path) -> None:
    says(run(mine, JOB, "--name", "my job!"), 2, "name", "my job!")


# -- the database -----------------------------------------------------------------------------------


def test_a_home_that_is_a_file(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mine / "file").write_text("")
    monkeypatch.setenv("GYRE_HOME", str(mine / "file"))
    says(run(mine, JOB), 2, "a file is in the way", "GYRE_HOME")


def test_a_database_in_a_folder_that_is_not_there(mine: Path) -> None:
    says(run(mine, {**JOB, "store": {"url": "sqlite:////proc/nowhere/x.db"}}), 3, "/proc/nowhere/x.db")


def test_a_database_of_a_newer_gyre(mine: Path) -> None:
    url = f"sqlite:///{mine / 'gyre.db'}"
    open_store(url).close()
    with sqlite3.connect(mine / "gyre.db") as connection:
        connection.execute(f"update {VERSION_TABLE} set version_num = '0099'")
    connection.close()
    says(run(mine, JOB), 3, "0099", "upgrade gyre")


def test_a_truncated_database(mine: Path) -> None:
    url = f"sqlite:///{mine / 'gyre.db'}"
    open_store(url).close()
    whole = (mine / "gyre.db").read_bytes()
    (mine / "gyre.db").write_bytes(whole[: len(whole) // 3])
    says(run(mine, JOB), 3, "is not a readable Gyre store", "left it as it is")
    assert (mine / "gyre.db").read_bytes() == whole[: len(whole) // 3]


def test_a_file_that_is_no_database(mine: Path) -> None:
    (mine / "gyre.db").write_text("dear diary, " * 100)
    says(run(mine, JOB), 3, "not an SQLite database")
    assert (mine / "gyre.db").read_text() == "dear diary, " * 100


def test_a_full_disk(mine: Path) -> None:
    with small_disk(32) as disk:
        result = run(mine, {**JOB, "store": {"url": f"sqlite:///{disk.path / 'g.db'}"}})
        says(result, 3, "space")


# -- places -----------------------------------------------------------------------------------------


def test_a_port_in_use(mine: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        says(run(mine, JOB, "--port", str(port)), 2, f"Port {port}", "in use")


def test_off_loopback_without_a_token(mine: Path) -> None:
    says(run(mine, JOB, "--host", "0.0.0.0"), 2, "needs a token")


@pytest.mark.ray
@pytest.mark.slow
def test_no_ray_at_the_address(short_home: Path, nowhere: str) -> None:
    """In a process that is not connected. Ray alone would try for more than a minute."""
    file = short_home / "job.json"
    file.write_text(json.dumps(JOB))
    process = Process.start(short_home, "run", str(file), ray_address=nowhere)
    ended = process.end()
    assert ended.code == 3
    assert f"error: no Ray cluster answers at {nowhere}: nothing listens there.\n" in ended.err
    assert "ray start --head" in ended.err
    process.nothing_left()


@pytest.mark.ray
@pytest.mark.slow
def test_submit_without_a_cluster(short_home: Path) -> None:
    file = short_home / "job.json"
    file.write_text(json.dumps(JOB))
    process = Process.start(short_home, "submit", str(file))
    ended = process.end()
    assert (ended.code, ended.out) == (3, "")
    assert "no Ray cluster to submit to" in ended.err
    assert "gyre run" in ended.err
    process.nothing_left()


# -- the name ---------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
def test_a_name_is_taken_only_while_its_cluster_lives(shared: Shared, nowhere: str) -> None:
    """A job of a cluster that is gone is told of as it is, and loses its name to the next one."""
    url = f"sqlite:///{shared.home / 'gyre.db'}"
    builder = RLJobBuilder().trainer(MODULE, "Endless").rollout(MODULE, "MyRollout")
    with open_store(url) as store:
        spec = builder.build().spec.model_dump(mode="json")
        store.create_job(job_id="mine-1", name="mine", spec=spec, now=1.0, ray_address=nowhere)
        store.update_job("mine-1", url="http://127.0.0.1:9", phase="running")
    assert "away" in shared.verb("ls").out
    assert shared.verb("show", "mine-1", "--json").json()["master"]["answering"] is False

    handle = shared.submit(builder, "mine")
    with open_store(url) as store:
        lost = store.job("mine-1")
    assert (lost.phase, lost.reason) == ("failed", "cluster_lost")
    assert nowhere in lost.message
    assert shared.verb("replay", "mine-1").code == 0
    with pytest.raises(Conflict, match="is taken by job"):
        shared.submit(builder, "mine")
    handle.stop()
    handle.wait(ENDS_WITHIN_S)
    handle.close()


@pytest.mark.ray
@pytest.mark.slow
def test_stop_of_a_job_whose_cluster_is_gone_ends_it(shared: Shared, nowhere: str) -> None:
    url = f"sqlite:///{shared.home / 'gyre.db'}"
    builder = RLJobBuilder().trainer(MODULE, "Endless").rollout(MODULE, "MyRollout")
    with open_store(url) as store:
        spec = builder.build().spec.model_dump(mode="json")
        store.create_job(job_id="gone-1", name="gone", spec=spec, now=1.0, ray_address=nowhere)
    ended = shared.verb("stop", "gone")
    assert ended.code == 0, ended.err
    assert "its cluster is gone" in ended.err
    with open_store(url) as store:
        assert not store.job("gone-1").live
