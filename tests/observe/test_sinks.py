"""Sinks: they are told everything, in order, whatever happens to them; and nobody waits for them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gyre.config import parse_job
from gyre.errors import ConfigError
from gyre.failover.events import Evaluated, LearningWarned, StepCompleted, body_of, kind_of
from gyre.logs.reading import LogQuery, read_page
from gyre.master.sink_processes import (
    FINISH_WITHIN_S,
    HANGS_AFTER_S,
    LIVED_S,
    LONGEST_PAUSE_S,
    SinkProcesses,
    sinks_of,
    spawn,
)
from gyre.observe.sinks import process
from gyre.observe.sinks.following import Cursor, _discreet, read_cursor, tell_new, write_cursor
from gyre.observe.sinks.kinds import _own_folder, make_sink
from gyre.observe.sinks.process import SinkSettings, _shown
from gyre.observe.sinks.sink import SinkEnd, SinkJob, SinkWarning
from gyre.redaction import KNOWN
from gyre.store import Entry, StepRow, Store, open_store
from gyre.testing.clock import VirtualClock, run_virtual
from tests.doubles.standing_job import small_spec
from tests.observe.own_sinks import told
from tests.waits import GENEROUS_S

OWN = "tests.observe.own_sinks:Told"


SPEC = small_spec("grpo").model_dump(mode="json")
SPEC["env"] = SPEC["roles"]["actor"]["env"] = {"KEY": "secret"}


class Written:
    """A job's store that tests write steps and events to."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'a.db'}"
        self.store: Store = open_store(self.url)
        self.store.create_job(
            job_id="j1",
            name="grpo",
            spec=SPEC,
            now=1.0,
        )
        self._journal = self.store.journal("j1")
        self._epoch = self._journal.take_over(now=1.0, pid=1)
        self._ledger = self.store.ledger("j1")
        self._ledger.take_over(term=1)
        self._events = 0

    def step(self, *steps: int) -> None:
        rows = [
            StepRow(
                step, step, f"d{step}", (), {"at": 100.0 + step, "reward_mean": step / 10, "lr": None}, 0.0
            )
            for step in steps
        ]
        self._ledger.write(1, steps=rows)

    def event(self, event: Any) -> None:
        self._events += 1
        self._journal.append(
            self._epoch,
            [Entry(self._events, f"e{self._events}", None, kind_of(event), 200.0, "trainer", body_of(event))],
        )

    def end(self) -> None:
        self.store.update_job("j1", phase="succeeded", ended_at=300.0)


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    made = Written(tmp_path)
    yield made
    made.store.close()


@pytest.fixture
def job(tmp_path: Path) -> SinkJob:
    folder = tmp_path / "sink"
    folder.mkdir()
    return SinkJob("j1", "grpo", {}, folder)


EVALUATED = Evaluated(incarnation=1, version=2, accuracy=0.5, count=8, prompts=4, pass_at={"4": 0.75})
WARNED = LearningWarned(1, "entropy_gone", "The entropy is gone.", 3)


# -- what a sink is told ----------------------------------------------------------------------------


def test_what_the_reward_function_said_of_held_out_answers_is_a_number_of_the_evaluation(
    written: Written, job: SinkJob
) -> None:
    said = replace(EVALUATED, set="aime", components={"reward.acc": 0.5, "reward.format": 0.75})
    written.event(said)
    sink = make_sink("file", job, {}, [])
    tell_new(written.store, "j1", sink, Cursor())
    sink.close()
    (line,) = (job.directory / "numbers.jsonl").read_text().splitlines()
    assert (json.loads(line)["reward.acc"], json.loads(line)["reward.format"]) == (0.5, 0.75)


def test_a_sink_is_told_steps_evaluations_and_warnings_and_each_once(
    written: Written, tmp_path: Path
) -> None:
    path = tmp_path / "told"
    sink = make_sink(OWN, SinkJob("j1", "grpo", {}, tmp_path, str(path)), {}, [])
    assert tell_new(written.store, "j1", sink, Cursor()) == Cursor(), "there is nothing yet"
    written.event(StepCompleted(1, 1, 1))
    written.step(1, 2)
    written.event(EVALUATED)
    cursor = tell_new(written.store, "j1", sink, Cursor())
    assert cursor == Cursor(step=2, seq=2)
    written.step(3)
    written.event(WARNED)
    cursor = tell_new(written.store, "j1", sink, cursor)
    assert tell_new(written.store, "j1", sink, cursor) == cursor
    assert told(path) == [
        ["step", 1, 0.1],
        ["step", 2, 0.2],
        ["evaluation", "held_out", 2, 0.5],
        ["flush"],
        ["step", 3, 0.3],
        ["warning", "entropy_gone", True],
        ["flush"],
    ]


def test_a_sink_has_flushed_before_its_cursor_moves_whatever_it_was_told(
    written: Written, tmp_path: Path
) -> None:
    """A step, an event alone, and events of which it hears nothing: after a cut it begins at the cursor."""
    path = tmp_path / "told"
    sink = make_sink(OWN, SinkJob("j1", "grpo", {}, tmp_path, str(path)), {}, [])
    cursor = Cursor()
    for tell in (
        lambda: written.step(1),
        lambda: written.event(WARNED),
        lambda: written.event(EVALUATED),
        lambda: written.event(StepCompleted(1, 1, 1)),
    ):
        tell()
        moved = tell_new(written.store, "j1", sink, cursor)
        assert moved != cursor
        assert told(path)[-1] == ["flush"]
        cursor = moved
    assert [line[0] for line in told(path)] == [
        *("step", "flush", "warning", "flush", "evaluation", "flush", "flush")
    ]


def test_a_cursor_that_cannot_be_read_is_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "cursor.json"
    assert read_cursor(path) == Cursor()
    write_cursor(path, Cursor(3, 7))
    assert read_cursor(path) == Cursor(3, 7)
    for damaged in ("", "{", "[]", '{"step": "x", "seq": 1}', "\x00"):
        path.write_text(damaged)
        assert read_cursor(path) == Cursor()


def test_what_is_told_twice_is_in_the_file_once_also_after_a_cut(written: Written, job: SinkJob) -> None:
    written.step(1, 2)
    written.event(EVALUATED)
    written.event(WARNED)
    first = make_sink("file", job, {}, [])
    tell_new(written.store, "j1", first, Cursor())
    path = job.directory / "numbers.jsonl"
    whole = path.read_text()
    assert [json.loads(line)["what"] for line in whole.splitlines()] == [
        "step",
        "step",
        "evaluation",
        "warning",
    ]
    first_line = {"what": "step", "job": "j1", "step": 1, "at": 101.0, "reward_mean": 0.1}
    assert json.loads(whole.splitlines()[0]) == first_line
    first.close()
    path.write_text(whole + '{"what": "st')  # it was killed in the middle of a line
    again = make_sink("file", job, {}, [])
    written.step(3)
    tell_new(written.store, "j1", again, Cursor())
    again.close()
    lines = path.read_text().splitlines()
    assert lines[:4] == whole.splitlines()
    assert [json.loads(line)["step"] for line in lines[4:]] == [3]


def test_what_is_told_has_no_secret_in_its_texts(written: Written, job: SinkJob) -> None:
    """A webhook, or a run that others see, is told what failed and with which words."""
    token = "hf_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY2z"
    KNOWN.learn([("my-own-value-4711", True)])
    failed = SinkWarning("late", f"no answer from https://user:pass4711@host/x by {token}", 1, 1.0, True, 1)
    ended = SinkEnd("failed", "error", "the key my-own-value-4711 is refused", 1.0, 2)
    told = [_discreet(failed).message, _discreet(ended).message]
    assert all("4711" not in text and token not in text for text in told), told
    assert "host/x" in told[0]
    shown = _shown({"config": {"api_key": "abc123def456"}, "roles": {"actor": {"env": {"A": "b"}, "num": 2}}})
    assert shown["config"]["api_key"] == "***"
    assert shown["roles"] == {"actor": {"num": 2}}


def test_jobs_that_write_to_one_file_lose_nothing_to_each_other(tmp_path: Path, job: SinkJob) -> None:
    """Also at the same time, beside lines that are nobody's."""
    shared = tmp_path / "all.jsonl"
    shared.write_text('{"what": "step", "step": 1}\nno json\n[]\n')
    jobs = [replace(job, job_id=name, to=str(shared)) for name in ("a", "b")]
    sinks = [make_sink("file", one, {}, []) for one in jobs]
    for step in (1, 2, 3):
        for number, sink in enumerate(sinks):
            sink.step(step, 100.0, {"step": step, "reward_mean": float(number), "text": 0.0})
            if step != 2:
                sink.flush()
    for sink in sinks:
        sink.close()
    again = make_sink("file", jobs[1], {}, [])
    for step in (3, 4):
        again.step(step, 100.0, {"step": step, "reward_mean": 1.0})
    again.close()
    lines = [json.loads(line) for line in shared.read_text().splitlines()[3:]]
    assert [(line["job"], line["step"]) for line in lines if line["job"] == "a"] == [
        ("a", 1),
        ("a", 2),
        ("a", 3),
    ]
    assert [line["step"] for line in lines if line["job"] == "b"] == [1, 2, 3, 4]


def test_two_jobs_of_one_name_have_folders_of_their_own(tmp_path: Path, job: SinkJob) -> None:
    """TensorBoard shows the points of a folder as one run, and hides those before a later beginning."""
    first, second = (replace(job, job_id=name, name="sums", to=str(tmp_path)) for name in ("a", "b"))
    assert [_own_folder(tmp_path, one).name for one in (first, second, first, second)] == [
        "sums",
        "b",
        "sums",
        "b",
    ]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "events.out").touch()
    assert _own_folder(tmp_path, replace(first, name="old")).name == "a", "it has somebody's points"


# -- the built-in ones ------------------------------------------------------------------------------


def test_tensorboard_reads_what_its_sink_wrote(written: Written, job: SinkJob) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written.step(1, 2, 3)
    written.event(EVALUATED)
    sink = make_sink("tensorboard", job, {}, [])
    cursor = tell_new(written.store, "j1", sink, Cursor())
    sink.close()
    written.step(4)
    again = make_sink("tensorboard", job, {}, [])
    tell_new(written.store, "j1", again, Cursor(step=1, seq=cursor.seq))  # it died before the cursor moved
    again.close()
    read = EventAccumulator(str(job.directory), size_guidance={"scalars": 0})
    read.Reload()
    rewards = [(one.step, round(one.value, 3), one.wall_time) for one in read.Scalars("step/reward_mean")]
    assert rewards == [(1, 0.1, 101.0), (2, 0.2, 102.0), (3, 0.3, 103.0), (4, 0.4, 104.0)]
    others = EventAccumulator(str(job.directory / "held_out"))
    others.Reload()
    (accuracy,) = others.Scalars("evaluation/held_out/accuracy")
    assert (accuracy.step, accuracy.value) == (2, 0.5)


def test_wandb_takes_it_offline(written: Written, job: SinkJob, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(job.directory))
    written.step(1, 2)
    written.event(EVALUATED)
    written.event(WARNED)
    sink = make_sink("wandb", job, {"mode": "offline"}, [])
    assert tell_new(written.store, "j1", sink, Cursor()) == Cursor(2, 2)
    sink.close()
    (run,) = job.directory.glob("wandb/offline-run-*-j1/run-j1.wandb")
    assert b"reward_mean" in run.read_bytes()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own, of SQLAlchemy 2.1
def test_mlflow_goes_on_with_its_run(written: Written, job: SinkJob) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    written.step(1, 2)
    written.event(EVALUATED)
    cursor = tell_new(written.store, "j1", make_sink("mlflow", job, {}, []), Cursor())
    written.step(3)
    again = make_sink("mlflow", job, {}, [])
    tell_new(written.store, "j1", again, cursor)
    again.close()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{job.directory / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("gyre").experiment_id])
    history = client.get_metric_history(run.info.run_id, "step/reward_mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert run.info.status == "FINISHED"


def in_tensorboard(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return [(one.step, round(one.value, 3)) for one in read.Scalars("step/reward_mean")]


def in_wandb(folder: Path) -> list[tuple[int, float]]:
    """From the files that `wandb sync` uploads, of each process one; a step that was logged twice counts once."""
    from wandb.proto import wandb_internal_pb2

    found = {}
    for file in sorted(folder.glob("wandb/offline-run-*-j1/run-j1.wandb")):
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            row = {
                one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.history.item
            }
            if "step/reward_mean" in row:
                found[int(row["step/step"])] = row["step/reward_mean"]
    return sorted(found.items())


def wandb_records(raw: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format, after a header of 7 bytes: blocks of 32 KiB, in which each part has a
    checksum, its length and whether it is whole (1), the first (2), a middle (3) or the last (4) of its record."""
    at, whole = 7, b""
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:  # no part begins in the last bytes of a block
            at += 32768 - at % 32768
            continue
        length, part = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        if part not in (1, 2, 3, 4) or at + 7 + length > len(raw):
            return  # the process was killed in the middle of it
        whole = raw[at + 7 : at + 7 + length] if part in (1, 2) else whole + raw[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):
            yield whole


def in_mlflow(folder: Path) -> list[tuple[int, float]]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("gyre").experiment_id])
    history = client.get_metric_history(run.info.run_id, "step/reward_mean")
    return sorted((one.step, one.value) for one in history)


def in_file(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "numbers.jsonl").read_text().splitlines()]
    return [(line["step"], line["reward_mean"]) for line in lines if line["what"] == "step"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own, of SQLAlchemy 2.1
@pytest.mark.parametrize(
    ("kind", "read"),
    [("file", in_file), ("tensorboard", in_tensorboard), ("wandb", in_wandb), ("mlflow", in_mlflow)],
)
def test_a_built_in_one_that_is_killed_half_way_has_every_step_once(
    written: Written, tmp_path: Path, kind: str, read: Callable[[Path], list[tuple[int, float]]]
) -> None:
    if kind != "file":
        pytest.importorskip(kind, reason=f"the extra {kind} is not installed")
    options = {"mode": "offline"} if kind == "wandb" else {}
    settings = replace(settings_for(written, tmp_path), kind=kind, to="", options=options)
    folder = Path(settings.folder)
    environment = {f"WANDB_{name}_DIR": str(folder) for name in ("CONFIG", "CACHE", "DATA")}
    environment["WANDB_SERVICE"] = "3-1-tcp-localhost-1"  # the helper of whoever started the cluster
    written.step(1, 2)
    first = started(settings, **environment)
    until(lambda: read_cursor(settings.cursor_path).step == 2)
    written.step(3, 4)
    until(lambda: read_cursor(settings.cursor_path).step == 4)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(GENEROUS_S)
    write_cursor(settings.cursor_path, Cursor(step=2))  # as if it had died before its cursor moved
    written.step(5)
    written.event(EVALUATED)
    written.end()
    assert started(settings, **environment).wait(GENEROUS_S) == 0
    assert read(folder) == [(step, step / 10) for step in range(1, 6)]


# -- a process of its own ---------------------------------------------------------------------------


def settings_for(written: Written, folder: Path, **options: Any) -> SinkSettings:
    return SinkSettings(
        store_url=written.url,
        job_id="j1",
        number=0,
        kind=OWN,
        folder=str(folder / "sink-0"),
        parent=os.getpid(),
        to=str(folder / "told"),
        options=options,
        poll_s=0.02,
    )


def started(settings: SinkSettings, **variables: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, **variables, **settings.as_environment()}
    return subprocess.Popen([sys.executable, "-m", "gyre.observe.sinks.process"], env=environment)


def until(holds: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + GENEROUS_S
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def steps_told(path: Path) -> list[int]:
    return [line[1] for line in told(path) if line[0] == "step"]


def test_a_sink_that_dies_and_is_killed_catches_up_and_ends_with_its_job(
    written: Written, tmp_path: Path
) -> None:
    settings = settings_for(written, tmp_path, die_at=2)
    path = Path(settings.to)
    written.step(1, 2, 3)
    assert started(settings).wait(GENEROUS_S) == 9, "it ended its process at step 2"
    second = started(settings)
    until(lambda: 3 in steps_told(path) and read_cursor(settings.cursor_path).step == 3)
    written.step(4)
    until(lambda: read_cursor(settings.cursor_path).step == 4)
    os.kill(second.pid, signal.SIGKILL)
    second.wait(GENEROUS_S)
    written.step(5, 6)
    written.event(EVALUATED)
    written.end()
    assert started(settings).wait(GENEROUS_S) == 0
    assert steps_told(path) == [1, 1, 2, 3, 4, 5, 6], "at least once, and each after the one before"
    assert told(path)[-1] == ["close"]
    assert ["evaluation", "held_out", 2, 0.5] in told(path)


def test_a_sink_ends_when_who_started_it_is_gone(written: Written, tmp_path: Path) -> None:
    settings = settings_for(written, tmp_path)
    written.step(1)
    assert started(replace(settings, parent=1)).wait(GENEROUS_S) == 0
    assert steps_told(Path(settings.to)) == [1]
    assert ["close"] not in told(Path(settings.to)), "the job goes on, and the next one tells the rest"


def test_only_one_process_of_a_sink_tells_it(written: Written, tmp_path: Path) -> None:
    settings = settings_for(written, tmp_path)
    written.step(1)
    first = started(settings)
    until(lambda: steps_told(Path(settings.to)) == [1])
    second = started(settings)
    until(lambda: settings.alive_path.exists())
    written.step(2)
    until(lambda: steps_told(Path(settings.to)) == [1, 2])
    written.end()
    assert (first.wait(GENEROUS_S), second.wait(GENEROUS_S)) == (0, 0)
    assert steps_told(Path(settings.to)) == [1, 2]


def test_a_sink_is_not_told_what_may_be_secret(written: Written) -> None:
    shown = process._shown(written.store.job("j1").spec)
    assert "secret" not in json.dumps(shown)
    assert "env" not in shown
    assert all("env" not in role for role in shown["roles"].values())
    assert shown["roles"]["actor"]["total"] == 2


# -- beside the master ------------------------------------------------------------------------------


class FakeProcess:
    """A sink's process that lives until it is told otherwise."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9


class Machine:
    """Where fake processes are started; `dies_at_once` ends each as soon as it is there."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.started_at: list[float] = []
        self.processes: list[FakeProcess] = []
        self.dies_at_once = False

    def spawn(self, settings: SinkSettings, output: Path) -> FakeProcess:
        self.started_at.append(self.clock.monotonic())
        made = FakeProcess(1000 + len(self.processes))
        made.code = 1 if self.dies_at_once else None
        self.processes.append(made)
        return made


@pytest.fixture
def beside(tmp_path: Path) -> tuple[SinkProcesses, Machine, SinkSettings]:
    clock = VirtualClock()
    machine = Machine(clock)
    spec = parse_job({"observe": {"sinks": [{"kind": "file"}]}, "roles": {}})
    sinks = sinks_of(spec, job_id="j1", store_url="sqlite:////a.db", directory=tmp_path)
    made = SinkProcesses(
        sinks,
        logs=tmp_path / "logs",
        clock=clock,
        spawn=machine.spawn,
    )
    return made, machine, sinks[0]


async def live(sinks: SinkProcesses, seconds: float, *, alive: SinkSettings, clock: VirtualClock) -> None:
    """Let time pass; the sink shows life each second."""
    if sinks._task is None:
        sinks.start()
    for _ in range(int(seconds)):
        if alive.alive_path.exists():
            os.utime(alive.alive_path, (clock.time(), clock.time()))
        await asyncio.sleep(1.0)


def test_a_sink_that_dies_at_once_is_started_again_ever_more_seldom(
    beside: tuple[SinkProcesses, Machine, SinkSettings],
) -> None:
    sinks, machine, settings = beside
    machine.dies_at_once = True

    async def scenario() -> None:
        await live(sinks, 400.0, alive=settings, clock=machine.clock)
        sinks.cancel()

    run_virtual(scenario(), machine.clock)
    pauses = [
        after - before for before, after in zip(machine.started_at, machine.started_at[1:], strict=False)
    ]
    assert pauses[:4] == pytest.approx([2.0, 3.0, 5.0, 9.0], abs=1.1), "1, 2, 4, 8 s, seen each second"
    assert max(pauses) <= LONGEST_PAUSE_S + 3.0
    assert pauses[-1] >= LONGEST_PAUSE_S


def test_a_sink_that_lived_is_started_again_soon(
    beside: tuple[SinkProcesses, Machine, SinkSettings],
) -> None:
    sinks, machine, settings = beside

    async def scenario() -> None:
        for _ in range(3):
            await live(sinks, LIVED_S + 5.0, alive=settings, clock=machine.clock)
            machine.processes[-1].code = -9
        await live(sinks, 5.0, alive=settings, clock=machine.clock)
        sinks.cancel()

    run_virtual(scenario(), machine.clock)
    assert len(machine.processes) == 4


def test_a_sink_that_hangs_is_killed_and_started_again(
    beside: tuple[SinkProcesses, Machine, SinkSettings],
) -> None:
    sinks, machine, settings = beside

    async def scenario() -> None:
        await live(sinks, 10.0, alive=settings, clock=machine.clock)
        os.utime(settings.alive_path, (machine.clock.time(), machine.clock.time()))
        await asyncio.sleep(HANGS_AFTER_S - 5.0)
        assert machine.processes[0].code is None
        await asyncio.sleep(10.0)
        assert machine.processes[0].code == -9
        await live(sinks, 5.0, alive=settings, clock=machine.clock)
        sinks.cancel()

    run_virtual(scenario(), machine.clock)
    assert len(machine.processes) == 2


def test_the_end_of_a_job_waits_for_its_sinks_only_so_long(
    beside: tuple[SinkProcesses, Machine, SinkSettings],
) -> None:
    sinks, machine, settings = beside

    async def scenario() -> None:
        await live(sinks, 5.0, alive=settings, clock=machine.clock)
        await sinks.finish()

    run_virtual(scenario(), machine.clock)
    assert machine.processes[0].code == -9
    assert machine.clock.monotonic() < 30.0


def test_a_sink_that_fails_at_the_end_of_its_job_is_tried_again_at_once(
    beside: tuple[SinkProcesses, Machine, SinkSettings],
) -> None:
    sinks, machine, settings = beside
    machine.dies_at_once = True

    async def scenario() -> None:
        await live(sinks, 100.0, alive=settings, clock=machine.clock)
        begun, ended_at = len(machine.processes), machine.clock.monotonic()
        finish = asyncio.get_running_loop().create_task(sinks.finish())
        await asyncio.sleep(5.0)
        assert len(machine.processes) >= begun + 2, "after a pause of a minute it would not be in time"
        machine.dies_at_once = False
        await asyncio.sleep(5.0)
        machine.processes[-1].code = 0  # it has told all
        await finish
        assert machine.clock.monotonic() - ended_at < FINISH_WITHIN_S

    run_virtual(scenario(), machine.clock)


def test_a_sink_that_goes_on_failing_does_not_hold_up_the_end_beyond_its_last_try(
    beside: tuple[SinkProcesses, Machine, SinkSettings],
) -> None:
    sinks, machine, settings = beside
    machine.dies_at_once = True

    async def scenario() -> float:
        await live(sinks, 5.0, alive=settings, clock=machine.clock)
        begun = machine.clock.monotonic()
        await sinks.finish()
        return machine.clock.monotonic() - begun

    assert run_virtual(scenario(), machine.clock) < FINISH_WITHIN_S - 5.0


# -- the settings -----------------------------------------------------------------------------------


def test_sinks_are_named_in_short_or_with_more(tmp_path: Path) -> None:
    spec = parse_job(
        {
            "observe": {"sinks": ["tensorboard", {"kind": OWN, "to": "x", "options": {"die_at": 1}}]},
            "roles": {},
        }
    )
    first, second = sinks_of(spec, job_id="j1", store_url="u", directory=tmp_path)
    assert (first.kind, first.to, first.options) == ("tensorboard", "", {})
    assert (second.kind, second.to, second.options) == (OWN, "x", {"die_at": 1})
    assert Path(second.folder).name == "1-tests.observe.own_sinks.Told"
    with pytest.raises(ConfigError, match=r"tensorbord.*did you mean.*tensorboard"):
        parse_job({"observe": {"sinks": ["tensorbord"]}, "roles": {}})


def test_what_a_sink_prints_has_time_and_level(tmp_path: Path) -> None:
    output = tmp_path / "sink-0.1.log"
    settings = SinkSettings(
        store_url=f"sqlite:///{tmp_path}/none.db",
        job_id="j",
        number=0,
        kind="file",
        folder=str(tmp_path / "sink"),
        parent=os.getpid(),
    )
    process = spawn(settings, output)
    assert isinstance(process, subprocess.Popen)
    assert process.wait(GENEROUS_S) != 0
    *_, raised = read_page(tmp_path, LogQuery(level="E"), now=math.inf)["lines"]
    assert raised["text"].startswith("There is no store")
    assert output.read_text().splitlines()[-1][24:27] == " E "
