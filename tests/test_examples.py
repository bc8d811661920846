"""The examples load, plan, and import: what stands in the repository can be submitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre.api.entrypoints import check_entrypoints
from gyre.api.jobfile import load_job_file
from gyre.config import parse_job

EXAMPLES = sorted(
    path for path in (Path(__file__).parents[1] / "examples").iterdir() if path.suffix in (".py", ".yaml")
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_loads_and_plans(path: Path) -> None:
    job = load_job_file(path)
    plan = job.plan().plan
    wanted = {f"{name}-{rank}" for name, role in job.plan().spec.roles.items() for rank in range(role.total)}
    assert set(plan.placements) == wanted
    spec = job.spec.model_dump(mode="json")
    assert parse_job(json.loads(json.dumps(spec))) == job.spec


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_classes_of_an_example_have_what_is_called(path: Path) -> None:
    job = load_job_file(path)
    assert set(check_entrypoints(job.spec)) == set(job.plan().spec.roles)


def test_the_asynchronous_example_differs_from_the_synchronous_one_in_its_staleness_alone() -> None:
    folder = Path(__file__).parents[1] / "examples"
    sync = load_job_file(folder / "grpo_arithmetic.py").plan().spec
    other = load_job_file(folder / "async_grpo.yaml").plan().spec
    assert (sync.max_staleness, other.max_staleness) == (0, 1)
    assert other.run == sync.run
    assert {name: role.total for name, role in other.roles.items()} == {
        name: role.total for name, role in sync.roles.items()
    }


def test_the_arithmetic_example_is_the_demo() -> None:
    from gyre.api.demo import STEPS, demo_job

    example = load_job_file(Path(__file__).parents[1] / "examples" / "grpo_arithmetic.py").plan().spec
    demo = demo_job(steps=STEPS).plan().spec
    assert example.run == demo.run
    assert example.roles == demo.roles
    assert example.failover == demo.failover
    assert example.config["seed"] == demo.config["seed"]
