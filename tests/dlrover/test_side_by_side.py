"""DLRover's own tests of its unified API, under DLRover and under Gyre, in an environment of its own
(`make test-long PART=dlrover`): they end alike, and the user's code in them does the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dlrover.of_dlrover import PYTHONS, Ran, run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.dlrover,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not PYTHONS["dlrover"].exists(), reason="make test-long PART=dlrover makes DLRover's environment"
    ),
]

RUN_S = 1100.0

JOBS = {
    "test_api": "a trainer that drives actors, critics, rollouts, a reference and a reward by RPC",
    "test_api_full": "elastic training by a function",
    "test_api_full_with_cmd": "elastic training by a script with arguments",
    "test_api_full_with_error_with_no_failover": "an exception that ends the job",
    "test_api_full_with_error_with_job_failover": "one that restarts the job first",
    "test_api_full_with_error_with_role_failover": "one that restarts the role first",
    "test_master_worker_isolation_scheduling[tmp_ray0]": "workers that take a resource of Ray's",
}
"""DLRover's tests that run jobs and reach for nothing inside of it."""

INSIDE = {
    "test_role_builder": "it reads the builder's private fields",
    "test_submit": "it has a mock in the place of the function that starts DLRover's master",
}
"""Tests of the builders that are about DLRover's own parts."""


@pytest.fixture
def sides(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], dict[str, Ran]]:
    """Run the modules under both. The folders have short names, for Ray's sockets."""

    def both(modules: list[str]) -> dict[str, Ran]:
        found = {}
        for side in PYTHONS:
            place = Path(tmp_path_factory.mktemp("s"))
            found[side] = run(side, place, modules, RUN_S)
        return found

    return both


def test_their_jobs_end_alike_and_do_the_same(sides: Callable[[list[str]], dict[str, Ran]]) -> None:
    ran = sides(
        [
            "integration_test/elastic_training_test.py",
            "integration_test/dummy_run.py",
            "integration_test/rl_mock",
        ]
    )
    for side, one in ran.items():
        assert one.outcomes == dict.fromkeys(JOBS, "passed"), f"{side}: {one.told[-4000:]}"
    assert ran["dlrover"].printed["elastic_workload_run run called"] == 8, "what is printed is not found"
    assert ran["dlrover"].printed["Training completed."] == 1
    assert ran["gyre"].printed == ran["dlrover"].printed


def test_their_tests_of_the_builders(sides: Callable[[list[str]], dict[str, Ran]]) -> None:
    ran = sides(["api/test_builder.py", "common/test_workload_desc.py"])
    theirs = ran["dlrover"].outcomes
    assert len(theirs) == 13
    assert set(theirs.values()) == {"passed"}
    assert ran["gyre"].outcomes == theirs | dict.fromkeys(INSIDE, "failed"), ran["gyre"].told[-4000:]
