"""The same job with its journal and ledger in PostgreSQL: nothing above the store knows the difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kill.conftest import Run
from tests.kill.test_nodes import run as run_program
from tests.store.conftest import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.timeout(240)
def test_master_and_trainer_killed_together_on_postgres(
    postgres_url: str, start: Callable[..., Run], undisturbed_digest: str
) -> None:
    run = start(store=postgres_url, rollout_total=1)
    run.faults.reach_step(6)
    for victim in run.faults.kill("trainer-0", "master"):
        run.faults.replaced(victim)
    view = run.end()
    assert view["job"]["result"]["digest"] == undisturbed_digest


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.timeout(300)
def test_the_master_moves_with_its_journal_to_another_node(
    postgres_url: str, undisturbed_digest: str
) -> None:
    """With SQLite it cannot: its journal is a file of its machine."""
    out = run_program("tests.kill.master_moves", postgres_url)
    assert out["phase"] == "succeeded"
    assert out["elsewhere"]
    assert out["epochs"][1] > out["epochs"][0]
    assert out["result"]["digest"] == undisturbed_digest
    assert (out["result"]["prompts_lost"], out["result"]["trained_twice"]) == (0, 0)
    assert out["outcomes"] in ([], ["recovered"])
