"""The same job with its journal and ledger in PostgreSQL: nothing above the store knows the difference."""

from __future__ import annotations

import pytest

from tests.kill.test_nodes import run as run_program
from tests.store.conftest import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]


@pytest.mark.ray
@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.timeout(240)  # with the undisturbed job, where that did not run before
def test_trainer_and_the_node_of_the_master_are_killed_together_and_it_moves_with_its_journal(
    postgres_url: str, undisturbed_digest: str
) -> None:
    """With SQLite it could not: that journal is a file of its machine."""
    out = run_program("tests.kill.master_moves", postgres_url)
    assert out["phase"] == "succeeded"
    assert out["elsewhere"]
    assert out["epochs"][1] > out["epochs"][0]
    assert out["result"]["digest"] == undisturbed_digest
    assert (out["result"]["prompts_lost"], out["result"]["trained_twice"]) == (0, 0)
    assert out["outcomes"] == ["recovered"]
    assert "trainer-0" in out["lost"]
