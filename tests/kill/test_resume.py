"""Real jobs that ended go on, and end as if they had never been interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gyre.api.home import home
from gyre.api.resume import resume_job
from gyre.config.parse import apply_overrides
from gyre.errors import ConfigError, Conflict
from gyre.rollouts.trainer.sample_ledger import account_of
from gyre.store import open_store
from gyre.testing.processes import ProcessFaults
from tests.kill.conftest import Run
from tests.kill.gate import Gate
from tests.kill.jobs import STEPS

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(300)]


def spec_of(run: Run) -> dict[str, Any]:
    with open_store(run.handle.store_url) as store:
        return store.job(run.handle.job_id).spec


@pytest.mark.parametrize(
    "stopped", [True, False], ids=["stopped in the middle", "succeeded with fewer steps"]
)
def test_an_ended_job_goes_on_to_the_weights_of_one_that_was_never_interrupted(
    start: Callable[..., Run], kill_home: Path, undisturbed_digest: str, stopped: bool
) -> None:
    run = start(steps=STEPS if stopped else 8)
    if stopped:
        run.faults.reach_step(7)
        run.handle.stop("enough for today")
    run.gate.open()
    first = run.handle.wait(60.0)
    assert first["job"]["phase"] == ("stopped" if stopped else "succeeded")
    spec = apply_overrides(spec_of(run), [f"run.steps={STEPS}", "roles.rollout.total=1"])
    with pytest.raises(ConfigError, match=r"config.seed: 7 cannot become 8"):
        resume_job(run.handle.job_id, apply_overrides(spec, ["config.seed=8"]), home_path=kill_home)
    handle = resume_job(run.handle.job_id, spec, home_path=kill_home)
    again = Run(handle, ProcessFaults(handle), Gate(home(kill_home).job_directory(handle.job_id)))
    with pytest.raises(Conflict, match="only one that has ended can go on"):
        resume_job(handle.job_id, home_path=kill_home)
    view = again.end()
    assert handle.job_id == run.handle.job_id
    assert view["job"]["result"]["digest"] == undisturbed_digest
    assert max(one["incarnation"] for one in view["vertices"] if one["role"] == "actor") == 2
    with open_store(handle.store_url) as store:
        account = account_of(store.ledger(handle.job_id))
    assert account.trained == STEPS * 16
    handle.close()
