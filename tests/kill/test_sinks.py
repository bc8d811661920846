"""Sinks and notifications of a job that runs: whatever becomes of their processes, training notices nothing of it, and
they are told everything."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from gyre.api.home import home
from gyre.observe.sinks import process
from gyre.observe.sinks.process import SETTINGS, SinkSettings
from tests.kill.conftest import Run
from tests.kill.jobs import STEPS
from tests.kill.test_kills import PATIENT
from tests.observe.webhooks import Hook

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

Start = Callable[..., Run]
COMES_WITHIN_S = 60.0


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.close()


def sink_of(run: Run, label: str) -> tuple[psutil.Process, SinkSettings] | None:
    """The process of this sink of the job, and its settings."""
    for one in psutil.process_iter():
        try:
            if "gyre.observe.sinks.process" not in one.cmdline():
                continue
            settings = SinkSettings(**json.loads(one.environ().get(SETTINGS, "{}") or "{}"))
        except (psutil.Error, TypeError):
            continue
        if settings.job_id == run.handle.job_id and settings.label == label:
            return one, settings
    return None


def found(run: Run, label: str, *, other_than: int = 0) -> tuple[psutil.Process, SinkSettings]:
    def look(_: dict[str, Any]) -> tuple[psutil.Process, SinkSettings] | None:
        seen = sink_of(run, label)
        return seen if seen is not None and seen[0].pid != other_than else None

    return run.faults.until(look, f"{label} running", timeout_s=COMES_WITHIN_S)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in lines_of(path) if line["what"] == "step"]


def is_gone(one: psutil.Process) -> bool:
    return not one.is_running() or one.status() == psutil.STATUS_ZOMBIE


def test_sinks_that_are_killed_or_hang_hold_nothing_up_and_are_told_everything(
    start: Start, hook: Hook, kill_home: Path
) -> None:
    hook.answers = [500]
    run = start(
        failover=PATIENT,
        observe={"sinks": ["file", "file"], "notify": [{"webhook": hook.address, "on": ["incident", "end"]}]},
    )
    run.faults.reach_step(3)
    killed, _ = found(run, "sink-0")
    killed.kill()
    hung, hung_settings = found(run, "sink-1")
    hung.send_signal(signal.SIGSTOP)
    (victim,) = run.faults.kill("reward-0")
    run.faults.replaced(victim)
    notifier, _ = found(run, "notify-0")
    notifier.kill()
    run.faults.reach_step(8)
    again, _ = found(run, "sink-0", other_than=killed.pid)
    again.kill()
    run.faults.until(lambda _: len(hook.requests) >= 2 or None, "the notification", timeout_s=COMES_WITHIN_S)
    run.end()

    folder = home(kill_home).job_directory(run.handle.job_id) / "sinks"
    told = folder / "0-file" / "numbers.jsonl"
    run.faults.until(
        lambda _: any(line["what"] == "end" for line in lines_of(told)) or None,
        "the end in the file",
        timeout_s=COMES_WITHIN_S,
    )
    assert steps_of(told) == list(range(1, STEPS + 1)), "each once, and none is missing"
    incidents = [line for line in lines_of(told) if line["what"] == "incident"]
    assert [(one["vertex"], one["outcome"]) for one in incidents] == [
        ("reward-0", "open"),
        ("reward-0", "recovered"),
    ]

    run.faults.until(
        lambda _: hook.requests[-1][1]["events"][-1]["kind"] == "end" or None,
        "the end at the webhook",
        timeout_s=COMES_WITHIN_S,
    )
    by_key = {headers["Idempotency-Key"]: body for headers, body in hook.requests}
    kinds = [one["kind"] for body in by_key.values() for one in body["events"]]
    assert kinds == ["incident", "end"], "what was sent twice has one key"
    assert len(hook.requests) > len(by_key), "the first was refused"

    slow = Path(hung_settings.folder) / "numbers.jsonl"
    run.faults.until(lambda _: is_gone(hung) or None, "the hung one ended", timeout_s=COMES_WITHIN_S)
    assert len(steps_of(slow)) < STEPS
    process.run(replace(hung_settings, parent=os.getppid()))  # as the master of a job that goes on would
    assert steps_of(slow) == list(range(1, STEPS + 1))
