"""What every test starts from."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# A suite that is started in the background inherits an ignored SIGINT, and so would every process that its tests
# start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A property holds or fails whatever the machine's speed: no example has a deadline.
settings.register_profile("gyre", deadline=None)
settings.load_profile("gyre")

ORDER = (
    "kill",
    "megatron",
    "workloads/trainer",
    "e2e",
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
"""The longest first, so that the workers end together. Who has `kill`, which is one test, is given the fourth, too."""

SPLIT = ("engines", "rollouts", "workloads")
"""The folders that are too much for one worker; their tests share little."""


def folder_of(path: str) -> str:
    """The folder of `tests/` that a test is in, by its path or node id from the root; `top` for those in none. Of a
    folder in `SPLIT`, the folder in it."""
    parts = path.partition("::")[0].split("/")[1:-1]
    if not parts:
        return "top"
    return "/".join(parts[: 2 if parts[0] in SPLIT else 1])


class ByFolder(LoadScopeScheduling):
    """One worker a folder, for what a folder's tests share (a Ray cluster, a PostgreSQL server) is a session's."""

    def _split_scope(self, nodeid: str) -> str:
        return folder_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFolder | None:
    return ByFolder(config, log) if config.getvalue("dist") == "loadscope" else None


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_most_cases_slow(items)

    def turn(item: pytest.Item) -> int:
        folder = folder_of(item.nodeid)
        return ORDER.index(folder) if folder in ORDER else len(ORDER)

    items.sort(key=turn)
