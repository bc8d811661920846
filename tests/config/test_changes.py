"""What a job that goes on may change, and that the journal can take it back."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.config import parse_job
from gyre.config.changes import HIDDEN, changes_between, check_changes, undone
from gyre.config.parse import apply_overrides
from gyre.errors import ConfigError

BEFORE = {
    "recipe": "grpo",
    "config": {"seed": 7, "optim": {"lr": 1e-3}, "model": {"layers": 1}},
    "env": {"KEY": "one"},
    "roles": {
        "actor": {"total": 2},
        "rollout": {"total": 2, "resources": {"labels": {"zone": "a"}}},
        "reward": {"env": {"SECRET": "s"}},
    },
}


def plain(data: dict[str, Any]) -> dict[str, Any]:
    return parse_job(data).model_dump(mode="json")


@pytest.mark.parametrize(
    "override",
    [
        "run.steps=200",
        "roles.actor.total=3",
        "roles.rollout.elastic={min: 1, max: 4}",
        "roles.rollout.resources.labels={}",
        "roles.rollout.resources.custom={net: 1}",
        "failover.vertex={max: 3, window_s: 60}",
        "rollouts.engine_args=[--x]",
        "config.optim.lr=1e-4",
        "config.evaluation.threshold=0.5",
        "config.optim.betas=[0.9, 0.95]",
        "config.megatron.tensor_parallel=2",
        "node_num=3",
        "device_type=GPU",
    ],
)
def test_where_and_how_long_may_change_and_can_be_taken_back(override: str) -> None:
    before = plain(BEFORE)
    after = plain(apply_overrides(BEFORE, [override]))
    changes = changes_between(before, after)
    assert changes
    check_changes(changes)
    taken_back = undone(after, changes)
    assert plain(taken_back) == before
    assert taken_back["config"].get("optim") == before["config"]["optim"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("recipe=ppo", "recipe: 'grpo' cannot become 'ppo' in a job that goes on"),
        ("config.seed=8", "config.seed: 7 cannot become 8"),
        ("config.model.layers=2", "config.model.layers: 1 cannot become 2"),
        ("config.loss.kl_loss_coef=0.5", "config.loss: None cannot become {'kl_loss_coef'"),
        ("config.sampling.temperature=0.5", "config.sampling"),
        ("run.prompts_per_step=128", "run.prompts_per_step: 64 cannot become 128"),
        ("roles.critic.total=1", "roles.critic: None cannot become"),
        ("max_staleness=2", "max_staleness: 0 cannot become 2"),
    ],
)
def test_what_the_job_is_may_not(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_changes(changes_between(plain(BEFORE), plain(apply_overrides(BEFORE, [override]))))


def test_values_of_environment_variables_are_not_told() -> None:
    after = apply_overrides(BEFORE, ["env.KEY=two", "env.NEW=x", "roles.reward.env.SECRET=t"])
    changes = changes_between(plain(BEFORE), plain(after))
    assert {tuple(change) for change in changes.values()} == {(HIDDEN, HIDDEN)}
    assert not {"two", "one", "t", "s", "x"} & {str(one) for change in changes.values() for one in change}
    check_changes(changes)
    undone(plain(after), changes)


def test_nor_is_whom_the_job_notifies() -> None:
    def notifying(webhook: str) -> dict[str, Any]:
        return {**BEFORE, "observe": {"notify": [{"webhook": webhook}]}}

    after = plain(notifying("https://a.example/s3cret"))
    changes = changes_between(plain(notifying("https://b.example/0ther")), after)
    assert changes == {"observe.notify": [HIDDEN, HIDDEN]}
    check_changes(changes)
    assert undone(after, changes)["observe"]["notify"] == after["observe"]["notify"]
