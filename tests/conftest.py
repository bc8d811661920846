"""What every test starts from."""

from __future__ import annotations

import signal

import pytest

# A suite that is started in the background inherits an ignored SIGINT, and so would every process that its tests
# start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


ORDER = ("kill", "", "e2e")
"""The tests that kill mostly wait: begun first, they leave a core to the others, and to those that start many
processes when they have ended."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker a folder, for what a folder's tests share (a Ray cluster, a PostgreSQL server) is a session's."""

    def folder_of(item: pytest.Item) -> str:
        parts = item.path.relative_to(item.config.rootpath / "tests").parts
        return parts[0] if len(parts) > 1 else "top"

    items.sort(key=lambda item: ORDER.index(folder if (folder := folder_of(item)) in ORDER else ""))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(folder_of(item)))
