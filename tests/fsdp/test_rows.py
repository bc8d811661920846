"""Rollouts of several turns by FSDP2's learners: what was not drawn is not trained, and the step is plain torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.fsdp.learner_work import CONFIG, steps_by, valued_step
from tests.rank_pool import RankPool
from tests.rollout_rows import sessions
from tests.workloads.rows_work import LOSSES, OPTIM, plain_steps, plain_values

pytestmark = pytest.mark.slow

VOCAB = 17
GROUPS = {name: sessions(10 * at, 4, vocab=VOCAB) for at, name in enumerate(LOSSES)}


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return plain_steps({**CONFIG, "optim": OPTIM}, LOSSES, GROUPS)


@pytest.mark.parametrize(
    ("ranks", "fsdp"),
    [(2, {"pass_tokens": 64}), (1, {"pass_tokens": 200}), (1, {"prompts_once": False})],
)
def test_a_step_of_rows_is_plain_torchs(
    pool: RankPool, plain: list[dict[str, Any]], ranks: int, fsdp: dict[str, Any]
) -> None:
    found = pool.run(steps_by, ranks, {**CONFIG, "optim": OPTIM, "fsdp": fsdp}, LOSSES, GROUPS)
    for name, mine, wanted in zip(LOSSES, found[0]["steps"], plain, strict=True):
        assert mine["metrics"] == pytest.approx(wanted["metrics"], rel=5e-5, abs=5e-5), name
        for key, expected in wanted["weights"].items():
            np.testing.assert_allclose(mine["weights"][key], expected, atol=2e-5, rtol=0, err_msg=name)
    assert bool(found[0]["depth"] > 1) == ("pass_tokens" in fsdp), "rows share more than a prompt"


def test_a_critics_values_and_step_are_plain_torchs(pool: RankPool) -> None:
    config = {**CONFIG, "critic": {"optim": OPTIM}, "loss": {"adv_estimator": "gae", "lam": 0.9}}
    groups = GROUPS["ppo"]
    wanted = plain_values(config, groups)
    found = pool.run(valued_step, 2, config, groups)
    np.testing.assert_allclose(found[0]["values"], wanted["values"], atol=1e-5)
    assert found[0]["metrics"] == pytest.approx(wanted["metrics"], rel=5e-5, abs=5e-5)
