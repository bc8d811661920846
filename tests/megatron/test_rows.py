"""Rollouts of several turns, split in every way: what was not drawn is not trained, and the step is plain torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.megatron import learner_work
from tests.megatron.work import CONFIG, LAYOUTS, VOCAB, config_of
from tests.rank_pool import RankPool
from tests.rollout_rows import sessions
from tests.workloads.rows_work import LOSSES, OPTIM, plain_steps, plain_values

pytestmark = pytest.mark.slow

GROUPS = {name: sessions(10 * at, 4, vocab=VOCAB) for at, name in enumerate(LOSSES)}


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return plain_steps({**CONFIG, "optim": OPTIM}, LOSSES, GROUPS)


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("layout", ["tp2-pp2", "alone", "tp2-sequence", "dp2"])
def test_a_step_of_rows_is_plain_torchs(pool: RankPool, plain: list[dict[str, Any]], layout: str) -> None:
    config = config_of(layout, optim=OPTIM)
    found = pool.run(learner_work.steps_by, LAYOUTS[layout][0], config, LOSSES, GROUPS)
    for name, mine, wanted in zip(LOSSES, found[0], plain, strict=True):
        assert mine["metrics"] == pytest.approx(wanted["metrics"], rel=2e-5, abs=1e-5), name
        for key, expected in wanted["weights"].items():
            np.testing.assert_allclose(mine["weights"][key], expected, atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.parametrize("layout", ["tp2-pp2"])
def test_a_critics_values_and_step_are_plain_torchs(pool: RankPool, layout: str) -> None:
    config = config_of(layout, critic={"optim": OPTIM}, loss={"adv_estimator": "gae", "lam": 0.9})
    groups = GROUPS["ppo"]
    wanted = plain_values(config, groups)
    found = pool.run(learner_work.train_critic, LAYOUTS[layout][0], config, [[groups]])
    np.testing.assert_allclose(found[0]["values"][0], wanted["values"], atol=1e-5)
    assert found[0]["metrics"][0] == pytest.approx(wanted["metrics"], rel=2e-5, abs=1e-5)
