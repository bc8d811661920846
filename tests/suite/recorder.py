"""A pytest plug-in that writes what becomes of each test to a file, a line of JSON an event, as it happens: so that it
is known of a process that dies, too.

The file is named by `GYRE_TEST_RECORD`. A process that begins with a record goes on behind it: what ended is not run
again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORD = "GYRE_TEST_RECORD"


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a record; a line that is still being written is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Recorder:
    def __init__(self, path: Path) -> None:
        self._ended = {event["test"] for event in read(path) if event["kind"] == "ended"}
        self._file = path.open("a", buffering=1)
        self._reports: list[pytest.TestReport] = []

    def _write(self, kind: str, **body: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **body}) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._ended:
            before = [item for item in items if item.nodeid in self._ended]
            items[:] = [item for item in items if item.nodeid not in self._ended]
            config.hook.pytest_deselected(items=before)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("uncollected", test=report.nodeid, text=report.longreprtext)
        elif report.skipped:
            self._write("ended", test=report.nodeid, outcome="skipped", text=_reason(report), seconds=0.0)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write("collected", tests=[item.nodeid for item in session.items])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        limit = item.get_closest_marker("timeout")
        self._write(
            "begun",
            test=item.nodeid,
            limit_s=float(limit.args[0] if limit is not None else item.config.getini("timeout") or 0),
        )
        self._reports, begun, cpu = [], time.monotonic(), _cpu_s()
        result = yield
        outcome, text = _outcome(self._reports)
        self._write(
            "ended",
            test=item.nodeid,
            outcome=outcome,
            text=text,
            seconds=round(time.monotonic() - begun, 3),
            cpu_s=round(_cpu_s() - cpu, 3),
        )
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)


def _cpu_s() -> float:
    """Of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def _outcome(reports: list[pytest.TestReport]) -> tuple[str, str]:
    failed = [report for report in reports if report.failed]
    if failed:
        return "failed", "\n".join(_text(report) for report in failed)
    skipped = [report for report in reports if report.skipped and not hasattr(report, "wasxfail")]
    if skipped:
        return "skipped", _reason(skipped[0])
    return "passed", ""


def _text(report: pytest.TestReport) -> str:
    sections = "".join(f"\n--- {name}\n{text[-4000:]}" for name, text in report.sections)
    return f"{report.when}: {report.longreprtext}{sections}"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext)


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get(RECORD):
        config.pluginmanager.register(Recorder(Path(path)), "recorder-of-the-suite")
