"""A small job and its coordinator: a trainer, a gang of two actors, two elastic rollouts and a reward."""

from __future__ import annotations

import pytest

from gyre.config import JobSpec
from gyre.failover import FailoverCoordinator
from tests.failover.histories import History, coordinator_of, spec_with


@pytest.fixture
def spec() -> JobSpec:
    return spec_with()


@pytest.fixture
def coordinator(spec: JobSpec) -> FailoverCoordinator:
    return coordinator_of(spec)


@pytest.fixture
def history(coordinator: FailoverCoordinator) -> History:
    """Submitted, under its first master, nothing running yet."""
    return History(coordinator).submit()
