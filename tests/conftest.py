"""What every test starts from."""

from __future__ import annotations

import gc
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

from gyre.api.home import home
from gyre.api.ray_session import connect, disconnect
from tests import machine
from tests.examples import examples

# A suite that is started in the background inherits an ignored SIGINT, and so would every process that its tests
# start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A property holds or fails whatever the machine's speed: no example has a deadline. The suite tries the same examples
# every time, the long suite more of them; `make search` looks for others.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=examples(100))
settings.register_profile("search", deadline=None, max_examples=examples(100))
settings.load_profile("suite")


def pytest_sessionstart(session: pytest.Session) -> None:
    """What a run that was killed left on the machine is removed before the first test."""
    for path in machine.sweep():
        sys.stderr.write(f"removed {path} of a run that was killed\n")


def pytest_collection_finish() -> None:
    """What was imported and collected is no garbage, and makes every collection long."""
    gc.collect()
    gc.freeze()


def mark_most_cases_slow(items: list[pytest.Item]) -> None:
    """A test marked `many_cases(quick=n)` keeps n of its cases in `make test`, spread evenly over the table; the others
    are `slow`."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("many_cases") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for table in cases.values():
        marker = table[0].get_closest_marker("many_cases")
        assert marker is not None
        quick = marker.kwargs["quick"]
        kept = {round(at * len(table) / quick) for at in range(quick)}
        for at, item in enumerate(table):
            if at not in kept:
                item.add_marker(pytest.mark.slow)


SLOW_WITHIN_S = 300.0
"""For a slow test that has no limit of its own: others share the two cores, and whatever else runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_most_cases_slow(items)
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_WITHIN_S))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The address of a Ray cluster that this process starts, and ends with the session. Its folder is short, for Ray's
    sockets."""
    with tempfile.TemporaryDirectory(prefix="gr", dir="/tmp") as folder:
        yield connect("local", start_local=True, place=home(folder))
        disconnect()
