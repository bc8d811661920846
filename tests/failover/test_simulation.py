"""Thousands of faults in virtual time, every decision watched; the fold is the snapshot at the end of each job."""

from __future__ import annotations

import pytest

from gyre.config import Budget, JobSpec
from gyre.failover import JobPhase, differences, fold, rows_of
from gyre.failover import events as e
from gyre.graph import compile_job
from gyre.sim import Delivery, Fault, FaultKind, SimResult, random_faults, simulate, spot_trace
from tests.doubles.fault_injector import FaultInjector
from tests.doubles.standing_job import small_spec
from tests.failover.histories import coordinator_of

VERTICES = ("trainer-0", "actor-0", "actor-1", "rollout-0", "rollout-1", "reward-0")


def generous(spec: JobSpec) -> JobSpec:
    spec.failover.vertex = spec.failover.region = Budget(max=8, window_s=600)
    spec.failover.job = Budget(max=1000, window_s=600)
    return spec


def check(spec: JobSpec, result: SimResult) -> None:
    folded = fold(coordinator_of(compile_job(spec).spec), result.history)
    assert differences(folded, rows_of(result.state)) == []
    assert [i for i in result.state.incidents.values() if i.outcome == "open"] == []


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_job_outlives_more_than_a_thousand_faults(seed: int) -> None:
    spec = generous(small_spec())
    injector = FaultInjector(
        seed=seed, vertices=VERTICES, count=2000, mean_gap_s=12.0, master_share=0.1, start_s=10.0
    )
    result = simulate(
        spec, seed=seed, faults=injector.faults, steps=6500, delivery=Delivery(delay_s=0.2, duplicate=0.1)
    )
    assert sum(result.faults.values()) > 1250
    assert result.phase is JobPhase.SUCCEEDED
    assert result.steps == 6500
    assert min(result.repairs[scope] for scope in ("vertex", "region", "job")) > 0
    assert result.masters > 100
    assert 0.0 < result.goodput < 1.0
    check(spec, result)


@pytest.mark.many_cases(quick=3)
@pytest.mark.parametrize("seed", range(8))
def test_small_budgets_end_the_job_and_say_why(seed: int) -> None:
    spec = small_spec()
    spec.failover.vertex = spec.failover.region = Budget(max=2, window_s=600)
    kinds = (FaultKind.KILL, FaultKind.FAIL_START, FaultKind.HANG)
    faults = random_faults(VERTICES, seed=seed, count=500, mean_gap_s=8.0, kinds=kinds)
    result = simulate(spec, seed=seed, faults=faults, steps=100_000)
    assert result.phase is JobPhase.FAILED
    assert result.repairs["job"] == spec.failover.job.max
    assert result.repairs["give_up"] == 1
    assert "times in" in result.message or "with no step between" in result.message
    check(spec, result)


def test_user_errors_are_retried_then_restarted_then_given_up() -> None:
    spec = small_spec()
    faults = [Fault(20.0 + 3 * n, "reward-0", FaultKind.USER_CODE) for n in range(10)]
    result = simulate(spec, seed=1, faults=faults, steps=1000)
    assert result.phase is JobPhase.FAILED
    assert (result.repairs["retry"], result.repairs["vertex"], result.repairs["give_up"]) == (2, 1, 1)
    check(spec, result)


def test_spot_instances_come_and_go() -> None:
    spec = small_spec()
    spec.roles["rollout"].total = 4
    spec.failover.vertex = Budget(max=40, window_s=600)
    trace = spot_trace(
        [f"rollout-{n}" for n in range(4)], seed=5, until_s=8000.0, mean_up_s=200.0, mean_away_s=40.0
    )
    result = simulate(spec, seed=5, faults=trace, steps=2000)
    assert result.phase is JobPhase.SUCCEEDED
    assert result.faults["preempted"] > 40
    assert result.repairs["job"] == 0, "waiting for room is not failing"
    check(spec, result)


def test_people_ask_in_the_middle_of_it() -> None:
    spec = generous(small_spec())
    requests: list[tuple[float, e.Event]] = []
    for n in range(60):
        requests.append((50.0 + 20 * n, e.ScaleRequested("rollout", 1 + n % 4)))
        requests.append((55.0 + 20 * n, e.PauseRequested() if n % 2 else e.ResumeRequested()))
    requests += [(2000.0, e.ResumeRequested()), (2500.0, e.StopRequested("enough"))]
    faults = random_faults(VERTICES, seed=9, count=150, mean_gap_s=15.0, master_share=0.1)
    result = simulate(spec, seed=9, faults=faults, steps=100_000, requests=requests)
    assert result.phase is JobPhase.STOPPED
    check(spec, result)


def test_the_same_arguments_give_the_same_history() -> None:
    faults = random_faults(VERTICES, seed=3, count=50, mean_gap_s=15.0, master_share=0.2)
    once, twice = (
        simulate(generous(small_spec()), seed=3, faults=faults, steps=500, delivery=Delivery(0.1, 0.1))
        for _ in range(2)
    )
    assert once == twice
    assert simulate(generous(small_spec()), seed=4, faults=faults, steps=500).history != once.history
