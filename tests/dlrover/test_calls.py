"""Calls between workers, in one process: beside each other, with exceptions, and over deaths of who carries them."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gyre.config import JobSpec
from gyre.errors import JobFailed
from gyre.testing import InProcessJob
from gyre_dlrover.api.builder import DLJobBuilder
from tests.dlrover import calling
from tests.waits import GENEROUS_S

HERE = calling.__name__


def spec_of(builder: DLJobBuilder, folder: Path, **options: Any) -> JobSpec:
    builder.device_type("CPU").no_setup_process_group().config({"folder": str(folder)})
    spec: JobSpec = builder.build().to_gyre("job", **options).spec
    return spec


def offices(trainer: str) -> DLJobBuilder:
    builder = DLJobBuilder()
    builder.workload("TRAINER", f"{HERE}.{trainer}").resource(cpu=0.5)
    builder.workload("OFFICE", f"{HERE}.Office").not_driver()
    builder.workload("BRANCH", f"{HERE}.Office").not_driver()
    builder.role("RANKS").train(f"{HERE}.Rank").total(2).not_driver()
    return builder


def test_calls_wait_for_each_other_in_one_worker(tmp_path: Path) -> None:
    with InProcessJob(spec_of(offices("wait_for_each_other"), tmp_path), tmp_path) as run:
        assert run.result(timeout_s=30) == {
            "letters": [f"letter {number}" for number in range(calling.WAITING)],
            "opened": True,
            "asked": 4,
            "own": [8],
            "batch": [2, 4, 6],
            "scattered": [10],
        }


def test_callers_catch_what_was_raised(tmp_path: Path) -> None:
    with InProcessJob(spec_of(offices("catch"), tmp_path), tmp_path) as run:
        seen = run.result(timeout_s=30)
    for role in ("BRANCH", "RANKS"):
        assert seen.pop(f"{role} key") == "KeyError none of these"
        assert seen.pop(f"{role} odd") == "Odd 7 it is"
        assert seen.pop(f"{role} os") == "OSError 2"
        assert "raised Unsendable: not to be sent" in seen.pop(f"{role} unsendable")
        assert "cannot be sent" in seen.pop(f"{role} result")
        assert seen.pop(f"{role} later") == "later"
    assert "exports no RPC method 'nobody'" in seen.pop("missing")
    assert "No actors found for role 'NOBODY'" in seen.pop("no role")
    assert seen == {"between workers": "it is 7"}


def test_coroutines_of_proxies(tmp_path: Path) -> None:
    with InProcessJob(spec_of(offices("await_proxies"), tmp_path), tmp_path) as run:
        assert run.result(timeout_s=30) == {
            "alone": "stamped form",
            "together": ["stamped one", "stamped two"],
            "at once": "signed x",
        }


def test_a_full_queue_holds_up_no_other(tmp_path: Path) -> None:
    with InProcessJob(spec_of(offices("fill_queues"), tmp_path), tmp_path) as run:
        assert run.result(timeout_s=30) == {"got": list(range(20))}


def test_while_the_job_is_paused_no_call_begins(tmp_path: Path) -> None:
    with InProcessJob(spec_of(offices("calls_until_told"), tmp_path), tmp_path) as run:
        appears(tmp_path / "made")
        run.pause()
        time.sleep(0.3)  # what was on its way ends
        made = (tmp_path / "made").read_text()
        time.sleep(0.3)
        assert (tmp_path / "made").read_text() == made
        run.resume()
        time.sleep(0.05)
        (tmp_path / "enough").touch()
        assert run.result(timeout_s=30)["made"] >= int(made)


@pytest.mark.parametrize("place", ["trainer", "worker"])
def test_a_mistake_that_repeats_surely_ends_the_job_at_once(tmp_path: Path, place: str) -> None:
    builder = DLJobBuilder()
    name = "TRAINER" if place == "trainer" else "OTHER"
    builder.workload(name, f"{HERE}.names_a_role_that_is_none").resource(cpu=0.5)
    builder.workload("OFFICE", f"{HERE}.Office").not_driver()
    said = re.escape("No actors found for role 'OFICE'; did you mean 'OFFICE'?")
    with InProcessJob(spec_of(builder, tmp_path), tmp_path) as run, pytest.raises(JobFailed, match=said):
        run.result(timeout_s=30)
    assert (tmp_path / f"tries-{name}_1-0_1-0").read_text() == "x"


def test_so_does_a_name_that_is_exported_twice(tmp_path: Path) -> None:
    builder = DLJobBuilder().workload("TWICE", f"{HERE}.Twice")
    said = "'ledger.enter' is exported twice. Give one of them another name"
    with InProcessJob(spec_of(builder, tmp_path), tmp_path) as run, pytest.raises(JobFailed, match=said):
        run.result(timeout_s=30)
    assert (tmp_path / "tries-TWICE_1-0_1-0").read_text() == "x"


def appears(path: Path, text: str = "") -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.01)


def test_a_call_outlives_the_trainer_that_carries_it(tmp_path: Path) -> None:
    """And so does the end of a main, which the trainer's successor was not there to hear of."""
    builder = DLJobBuilder()
    builder.workload("ASKS", f"{HERE}.asks_slowly")
    builder.workload("ENDS", f"{HERE}.ends_at_once")
    builder.workload("SLOW", f"{HERE}.Slow").not_driver()
    spec = spec_of(builder, tmp_path, failover_exec_strategy=2)
    with InProcessJob(spec, tmp_path) as run:
        appears(tmp_path / "asked")
        appears(tmp_path / "tries-ENDS_1-0_1-0")
        time.sleep(0.2)  # until the trainer has heard; where it has not, the test shows less
        run.kill_trainer()
        (tmp_path / "asked").unlink()
        appears(tmp_path / "asked")
        (tmp_path / "may-answer").touch()
        run.result(timeout_s=30)
    assert (tmp_path / "answered").read_text() == "slowly"
    assert (tmp_path / "tries-ASKS_1-0_1-0").read_text() == "x"
    assert (tmp_path / "tries-ENDS_1-0_1-0").read_text() == "x"


def test_a_trainer_whose_main_has_returned_serves_on(tmp_path: Path) -> None:
    builder = DLJobBuilder()
    builder.workload("TRAINER", f"{HERE}.returns_early").resource(cpu=0.5)
    builder.workload("ASKS", f"{HERE}.asks_before_and_after")
    with InProcessJob(spec_of(builder, tmp_path, job_max_restart=0), tmp_path) as run:
        run.result(timeout_s=30)
    assert (tmp_path / "heard").read_text() == "later before later after"


@pytest.mark.parametrize("victim", ["puts-0", "belt-0"])
def test_a_queue_goes_on_where_its_producer_or_owner_dies(tmp_path: Path, victim: str) -> None:
    """What the owner held is lost with it, and what the producer had put is put again."""
    builder = DLJobBuilder()
    builder.workload("TRAINER", f"{HERE}.gets").resource(cpu=0.5)
    builder.workload("PUTS", f"{HERE}.puts")
    builder.workload("BELT", f"{HERE}.Belt")
    spec = spec_of(builder, tmp_path, failover_exec_strategy=2)
    with InProcessJob(spec, tmp_path) as run:
        appears(tmp_path / "got two")
        run.kill(victim)
        got = run.result(timeout_s=30)["got"]
    assert got[-1] == 5
    if victim == "puts-0":
        assert set(got) == set(range(6))


def test_a_job_that_has_ended_leaves_no_threads(tmp_path: Path) -> None:
    def ours() -> set[str]:
        return {one.name for one in threading.enumerate() if one.name.startswith("dlrover-")}

    before = ours()
    with InProcessJob(spec_of(offices("wait_for_each_other"), tmp_path), tmp_path) as run:
        run.result(timeout_s=30)
    deadline = time.monotonic() + GENEROUS_S
    while left := ours() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
