"""What every test starts from."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

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

REAL_RAY = {"kill": "kill", "e2e": "e2e", "compat": "e2e"}
"""The folders whose tests run on a real Ray cluster, by the name under which they share one, and so one worker. They
are two, for one worker with all of them would end long after the others."""

CLUSTERS_OF_THEIR_OWN = {"tests/kill/test_nodes.py": "nodes"}
"""Files whose tests start clusters of their own, by the name of what another worker than their folder's may take."""

ORDER = (
    "e2e",
    "kill",
    "nodes",
    "workloads/trainer",
    "top",
    "ui",
    "machines",
    "megatron",
    "rollouts/agent",
    "api",
    "weights",
    "engines",
    "engines/embedded",
    "workloads/torch",
    "master",
    "workloads",
    "workloads/gang",
    "rollouts/manager",
)
"""The longest first, so that the workers end together."""

SPLIT = ("engines", "rollouts", "workloads")
"""The folders that are too much for one worker; their tests share little."""


def folder_of(path: str) -> str:
    """The folder of `tests/` that a test is in, by its path or node id from the root; `top` for those in none. Of a
    folder in `SPLIT`, the folder in it; one in `REAL_RAY`, the name there, as of a file in `CLUSTERS_OF_THEIR_OWN`."""
    if own := CLUSTERS_OF_THEIR_OWN.get(path.partition("::")[0]):
        return own
    parts = path.partition("::")[0].split("/")[1:-1]
    if not parts:
        return "top"
    if parts[0] in REAL_RAY:
        return REAL_RAY[parts[0]]
    return "/".join(parts[: 2 if parts[0] in SPLIT else 1])


class ByFolder(LoadScopeScheduling):
    """One worker a folder, for what a folder's tests share (a Ray cluster, a PostgreSQL server) is a session's."""

    def _split_scope(self, nodeid: str) -> str:
        return folder_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFolder | None:
    return ByFolder(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_sessionstart(session: pytest.Session) -> None:
    """What a run that was killed left on the machine is removed before the first test."""
    if not hasattr(session.config, "workerinput"):  # xdist's workers come after the process that starts them
        for path in machine.sweep():
            sys.stderr.write(f"removed {path} of a run that was killed\n")


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
"""For a test of the long suite that has no limit of its own: four of them share two cores, and whatever else runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_most_cases_slow(items)
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_WITHIN_S))

    def turn(item: pytest.Item) -> int:
        folder = folder_of(item.nodeid)
        return ORDER.index(folder) if folder in ORDER else len(ORDER)

    items.sort(key=turn)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The address of a Ray cluster that this process starts, and ends with the session. Its folder is short, for Ray's
    sockets."""
    with tempfile.TemporaryDirectory(prefix="gr", dir="/tmp") as folder:
        yield connect("local", start_local=True, place=home(folder))
        disconnect()
