"""Exceptions and hangs in the user's own code: the traceback first, whose code it was, and status 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.api import RLJobBuilder
from tests.e2e.conftest import ENDS_WITHIN_S, HERE, Ended, Process, Shared

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]

MODULE = "tests.e2e.workloads"

JOB = f"""
from gyre.api import RLJobBuilder

job = (
    RLJobBuilder()
    .trainer("{MODULE}", "Careless")
    .rollout("{MODULE}", "CarelessRollout").total(1)
    .failover(user_code={{"max": 1, "window_s": 600}})
)
"""

GRPO = """
name: mended
recipe: grpo
config:
  task: {digits: 1}
  model: {layers: 1, hidden: 32, heads: 2, kv_heads: 1, mlp: 64}
  sampling: {n: 2}
  warm_start: {max_steps: 1, batch: 8, lr: 3.0e-3}
  optim: {lr: 1.0e-3}
run: {steps: 3, prompts_per_step: 4, groups_per_firing: 2, groups_per_micro_batch: 4, evaluate_every: 0}
failover: {retry: {max: 1, window_s: 60}, user_code: {max: 1, window_s: 60}, backoff_s: 0.1}
roles:
  trainer:
  actor:
  rollout:
  reward: {entrypoint: "mended_reward:Score"}
"""


MENDED = """
from gyre.workloads import BaseWorkload, operator


class Score(BaseWorkload):
    @operator
    def score(self, groups):
        if any({fails} for group in groups):
            raise ValueError("no boxed answer")
        for group in groups:
            for sample in group.samples:
                sample.reward = float(len(sample.token_ids) % 3)
        return groups
"""


def said(ended: Ended) -> str:
    """What `gyre run` of a job that fails prints: the traceback, then one sentence."""
    assert ended.code == 1, ended.err
    assert ended.out == ""
    before, traceback, after = ended.err.partition("Traceback (most recent call last):")
    assert traceback, ended.err
    assert "error:" not in before
    assert after.count("error: Job") == 1
    assert "user code raised" in after
    assert "in the job's own code" in before  # the incident, while it ran
    return after


RAISED = {
    "fit": ("raise ValueError", "ValueError: the learning rate is nonsense"),
    "setup": ("raise RuntimeError", "RuntimeError: there is no model here"),
    "rollout": ('return prices["missing"] * n', "KeyError: 'missing'"),
}
"""By where it is raised, the line and the error that are shown."""


def test_an_exception_of_the_users_ends_the_job(shared: Shared, tmp_path: Path) -> None:
    """Three jobs beside each other: each is told of its own."""
    file = tmp_path / "job.py"
    file.write_text(JOB)
    running = {
        where: Process.start(
            shared.home,
            *("run", str(file), "--set", f"config.fail={where}", "--name", f"careless-{where}"),
            ray_address=shared.address,
        )
        for where in RAISED
    }
    told = {where: process.end() for where, process in running.items()}
    for where, (line, error) in RAISED.items():
        text = said(told[where])
        assert line in text
        assert str(HERE / "workloads.py") in text
        assert error in text
        assert "gyre/workloads/" not in text  # no frame of ours


def test_an_operator_that_always_raises_is_given_up_after_its_budget_and_mended_goes_on_where_the_job_was(
    shared: Shared, tmp_path: Path
) -> None:
    """The last sentence says what to mend, with file, line and exception."""
    (tmp_path / "mended_reward.py").write_text(MENDED.format(fails="group.id >= 5"))
    file = tmp_path / "job.yaml"
    file.write_text(GRPO)
    text = said(shared.gyre("run", str(file)))
    assert "ValueError: no boxed answer" in text
    incidents = shared.verb("show", "mended", "--json").json()["incidents"]
    assert {incident["vertex"] for incident in incidents} == {"reward-0"}
    assert all(incident["user_code"] for incident in incidents)
    assert [incident["scope"] for incident in incidents] == ["retry", "vertex", "give_up"]
    (last,) = (line for line in text.splitlines() if line.startswith("error: Job mended failed"))
    assert "mended_reward.py:9: ValueError: no boxed answer (mended_reward:Score.score on reward-0" in last
    (tmp_path / "mended_reward.py").write_text(MENDED.format(fails="False"))
    again = shared.gyre("resume", "mended")
    assert again.code == 0, again.err
    job = shared.verb("show", "mended", "--json").json()["job"]
    assert (job["phase"], job["step"]) == ("succeeded", 3)
    assert (job["result"]["prompts"], job["result"]["prompts_lost"], job["result"]["trained_twice"]) == (
        12,
        0,
        0,
    )


def test_an_endless_loop_is_found_named_and_replaced(shared: Shared) -> None:
    builder = (
        RLJobBuilder()
        .config({"fail": "spin"})
        .trainer(MODULE, "Careless")
        .rollout(MODULE, "CarelessRollout")
        .stall_timeout(3.0)
    )
    handle = shared.submit(builder, "spinner")
    view = handle.wait(ENDS_WITHIN_S)
    assert view["job"]["phase"] == "succeeded"
    (incident,) = view["incidents"]
    assert (incident["vertex"], incident["cause"], incident["outcome"]) == (
        "rollout-0",
        "stalled",
        "recovered",
    )
    assert 3.0 <= incident["detected_after_s"] < 30.0  # by its own deadline, however busy the machine is
    assert "while True:" in incident["evidence"]["stack"] or "pass" in incident["evidence"]["stack"]
    assert str(HERE / "workloads.py") in incident["evidence"]["stack"]
    handle.close()
