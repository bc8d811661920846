"""What a job has cost: while its machines are reserved, by what they are at each time, and no longer than it runs."""

from __future__ import annotations

import pytest

from gyre.config import JobSpec
from gyre.failover import events as e
from gyre.failover.costs import cost_of, has_prices
from gyre.failover.state import JobState, fields_of, rows_of, state_from
from gyre.graph import compile_job
from gyre.graph.devices import devices_of, rate_per_hour
from tests.doubles.standing_job import small_spec
from tests.failover.histories import History, coordinator_of

HOUR = 3600.0


def priced(price: float = 2.0) -> JobSpec:
    spec = small_spec()
    spec.device_price_per_hour = price
    return compile_job(spec).spec


def cost(history: History, now: float | None = None) -> float:
    return cost_of(fields_of(history.state.job), history.now if now is None else now)


@pytest.fixture
def running() -> History:
    return History(coordinator_of(priced())).submit().start_all()


def test_a_job_costs_from_its_submission_to_its_end(running: History) -> None:
    spec, job = running.coordinator.spec, running.state.job
    devices = devices_of(spec, job.roles)
    assert job.price_per_hour == 2.0 * devices > 0
    began = job.priced_at
    assert cost(running, began + HOUR) == pytest.approx(2.0 * devices)
    running.decide(e.StopRequested("enough"), after_s=HOUR)
    running.report(e.TrainerFinished, result={"steps": 1}, stopped=True)
    running.stop_all()
    ended = running.state.job
    assert ended.price_per_hour == 0.0
    assert ended.spent == pytest.approx(2.0 * devices * (ended.ended_at - began) / HOUR)  # type: ignore[operator]
    assert cost(running, running.now + 10 * HOUR) == ended.spent
    assert state_from(rows_of(running.state)) == running.state


def test_more_instances_cost_more_from_then_on(running: History) -> None:
    before = running.state.job
    running.decide(e.ScaleRequested("rollout", before.roles["rollout"] + 1), after_s=HOUR)
    after = running.state.job
    assert after.price_per_hour == before.price_per_hour + 2.0
    assert after.spent == pytest.approx(before.price_per_hour * (running.now - before.priced_at) / HOUR)


def test_between_two_runs_nothing_is_paid(running: History) -> None:
    running.decide(e.StopRequested("enough"))
    running.report(e.TrainerFinished, result={"steps": 1}, stopped=True)
    running.stop_all()
    spent = running.state.job.spent
    running.decide(e.JobContinued(dict(running.state.job.roles)), after_s=100 * HOUR)
    assert running.state.job.spent == spent
    assert cost(running, running.now + HOUR) == pytest.approx(spent + running.state.job.price_per_hour)


def test_a_job_without_prices_has_no_cost_and_its_row_nothing_of_it() -> None:
    free = History(coordinator_of(compile_job(small_spec()).spec)).submit().start_all()
    assert not has_prices(fields_of(free.state.job))
    assert "spent" not in rows_of(free.state)["job", "job"]
    assert state_from(rows_of(free.state)) == free.state
    assert rate_per_hour(free.coordinator.spec, {}) is None


def test_a_pool_has_its_own_price_and_shared_devices_are_paid_once() -> None:
    roles = {
        "actor": {"total": 2},
        "reference": {"total": 2},
        "rollout": {"total": 1},
        "rollout_spot": {"total": 3, "pool": {"price_per_hour": 0.5}},
        "reward": {"resources": {"accelerator": 0}},
    }
    spec = JobSpec.model_validate(
        {
            "recipe": "grpo",
            "device_price_per_hour": 4.0,
            "roles": roles,
            "affinity": {"collocate": [["actor", "reference"]]},
            "config": {"loss": {"kl_loss_coef": 0.1}},
        }
    )
    compiled = compile_job(spec).spec
    assert devices_of(compiled, {}) == 2 + 1 + 3
    assert rate_per_hour(compiled, {}) == 4.0 * 3 + 0.5 * 3
    assert rate_per_hour(compiled, {"rollout_spot": 0, "rollout": 2}) == 4.0 * 4
    assert JobState().job.priced_at == 0.0


def test_a_job_that_was_lost_costs_no_longer_than_it_is_known_to_have_run(running: History) -> None:
    """Its record has an end that no event has settled yet."""
    job = fields_of(running.state.job) | {"ended_at": running.state.job.priced_at + HOUR}
    assert cost_of(job, running.now + 50 * HOUR) == pytest.approx(running.state.job.price_per_hour)
