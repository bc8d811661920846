"""Several updates a step: which groups each trains, that they are PPO's, and that a replay gives the same bits."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from gyre.config.sections import OptimSettings, WorkloadSettings
from gyre.errors import ConfigError
from gyre.workloads.algorithms.advantages import advantages_of, gae_of
from gyre.workloads.algorithms.losses import policy_loss, value_loss
from gyre.workloads.learner.errors import HalfUpdated, NotFinite
from gyre.workloads.learner.updates import mini_batches_of, share_of
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.critic import TorchCritic
from tests.workloads.torch_workloads import CONFIG, bind, rolled_out

SEVERAL: dict[str, Any] = {"lr": 0.05, "eps": 0.01, "warmup_steps": 0, "epochs": 2, "mini_batches": 3}
PPO = {
    **CONFIG,
    "optim": SEVERAL,
    "loss": {"adv_estimator": "gae", "lam": 0.95, "cliprange_value": 0.02, "clip_ratio_high": 0.2},
    "critic": {"optim": SEVERAL},
}
TRUNCATED = {**CONFIG, "optim": SEVERAL, "loss": {"tis_imp_ratio_cap": 1.5, "clip_ratio_low": 0.05}}


@pytest.fixture(scope="module")
def groups() -> Any:
    """Seven, whose log-probs are not quite the policy's, and with a value for every token."""
    found = rolled_out(bind(TorchActor()), 0, 7)
    draw = np.random.default_rng(4)
    for sample in (sample for group in found for sample in group.samples):
        sample.logprobs = sample.logprobs + 0.1 * draw.standard_normal(len(sample.logprobs)).astype(
            np.float32
        )
        sample.extras["values"] = 0.3 * draw.standard_normal(len(sample.logprobs)).astype(np.float32)
    return found


def ids(groups: Any) -> list[int]:
    return [group.id for group in groups]


def step_with(learner: Any, micro_batches: Any) -> Any:
    step = learner.step + 1
    learner.begin(step)
    for index, some in enumerate(micro_batches):
        learner.accumulate(some, step=step, index=index)
    everything = [group.id for some in micro_batches for group in some]
    return learner.apply(step=step, indices=len(micro_batches), group_ids=everything)


# -- which groups -----------------------------------------------------------------------------------


def test_each_pass_has_every_group_once_in_an_order_of_its_own() -> None:
    optim = OptimSettings(epochs=3, mini_batches=4)
    found = list(mini_batches_of(range(10, 20), optim, seed=1, step=5))
    assert [len(part) for part in found] == [3, 3, 2, 2] * 3
    passes = [[one for part in found[at : at + 4] for one in part] for at in (0, 4, 8)]
    assert all(sorted(one) == list(range(10, 20)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    again = list(mini_batches_of(list(range(19, 9, -1)), optim, seed=1, step=5))
    assert again == found, "the order in which groups came does not matter"
    assert list(mini_batches_of(range(10, 20), optim, seed=1, step=6)) != found
    assert list(mini_batches_of(range(10, 20), optim, seed=2, step=5)) != found


def test_fewer_groups_than_mini_batches_make_fewer_updates() -> None:
    found = list(mini_batches_of([4, 9], OptimSettings(epochs=2, mini_batches=3), seed=0, step=1))
    assert [len(part) for part in found] == [1, 1] * 2


def test_a_mini_batch_is_dealt_to_the_copies_by_tokens(groups: Any) -> None:
    by_id = {group.id: group for group in groups}
    shares = [share_of([0, 2, 3, 5], by_id, copy=copy_, copies=2) for copy_ in range(2)]
    assert sorted(one for share in shares for one in ids(share)) == [0, 2, 3, 5]
    assert [len(share) for share in shares] == [2, 2]


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"mini_batches": -1}])
@pytest.mark.parametrize("section", ["optim", "critic"])
def test_counts_below_one_are_refused(section: str, wrong: dict[str, int]) -> None:
    config = {"optim": wrong} if section == "optim" else {"critic": {"optim": wrong}}
    with pytest.raises(
        ConfigError, match=r"(epochs|mini_batches): -?\d should be greater than or equal to 1"
    ):
        WorkloadSettings.read(config)


# -- what they do -----------------------------------------------------------------------------------


def plain_steps(model: Any, loss_of: Any, groups: Any, *, seed: int) -> None:
    """PPO as one writes it down: AdamW over the mini-batches, each loss over its own tokens."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SEVERAL["lr"], betas=(0.9, 0.95), eps=SEVERAL["eps"], weight_decay=0.0
    )
    by_id = {group.id: group for group in groups}
    optim = OptimSettings(**SEVERAL)
    for part in mini_batches_of(ids(groups), optim, seed=seed, step=1):
        samples = [(by_id[one], sample) for one in part for sample in by_id[one].samples]
        total, count = torch.zeros(()), 0
        for group, sample in samples:
            total = total + loss_of(group, sample)
            count += len(sample.token_ids)
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def inputs_of(group: Any, sample: Any) -> torch.Tensor:
    return torch.tensor([*group.prompt_ids.tolist(), *sample.token_ids.tolist()])[None, :-1]


def logprobs_of(model: Any, group: Any, sample: Any) -> torch.Tensor:
    logits = (
        model(inputs_of(group, sample))[0, len(group.prompt_ids) - 1 :] / CONFIG["sampling"]["temperature"]
    )
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.token_ids).long()[:, None])[:, 0]


def close(mine: Any, theirs: Any) -> None:
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [PPO, TRUNCATED], ids=["to the engine's", "to its own, truncated"])
def test_the_policys_updates_are_ppos_on_the_log_probs_of_who_generated(
    groups: Any, config: dict[str, Any]
) -> None:
    actor, other = bind(TorchActor(), config), bind(TorchActor(), config)
    settings, truncated = actor.settings.loss, "tis_imp_ratio_cap" in config["loss"]
    metrics = step_with(actor, [groups[:2], groups[2:]])
    samples = [sample for group in groups for sample in group.samples]
    advantages = dict(zip(map(id, samples), advantages_of(groups, settings), strict=True))
    with torch.no_grad():
        before = {id(s): logprobs_of(other.backend.model, g, s) for g in groups for s in g.samples}

    def loss_of(group: Any, sample: Any) -> torch.Tensor:
        engine = torch.from_numpy(sample.logprobs)
        return policy_loss(
            logprobs_of(other.backend.model, group, sample)[None],
            torch.from_numpy(advantages[id(sample)])[None],
            torch.ones(1, len(sample.token_ids), dtype=torch.bool),
            settings,
            old_logprobs=(before[id(sample)] if truncated else engine)[None],
            rollout_logprobs=engine[None],
        ).loss

    plain_steps(other.backend.model, loss_of, groups, seed=CONFIG["seed"])
    close(actor.backend.model, other.backend.model)
    assert (metrics["updates"], metrics["groups"], actor.step) == (6, 7, 1)
    assert metrics["clipped"] > 0
    assert metrics["old_kl"] > 0, "the ratio is no longer 1"


def test_the_critics_updates_clip_at_the_values_from_before_the_step(groups: Any) -> None:
    critic, other = bind(TorchCritic(), PPO), bind(TorchCritic(), PPO)
    metrics = step_with(critic, [groups])

    def loss_of(group: Any, sample: Any) -> torch.Tensor:
        found = other.backend.model(inputs_of(group, sample))[0, len(group.prompt_ids) - 1 :]
        old, returns = sample.extras["values"], gae_of(sample, other.settings.loss)[1]
        mask = torch.ones(1, len(old), dtype=torch.bool)
        given = (found[None], torch.from_numpy(old)[None], torch.from_numpy(returns)[None], mask)
        return value_loss(*given, other.settings.loss).loss

    plain_steps(other.backend.model, loss_of, groups, seed=CONFIG["seed"])
    close(critic.backend.model, other.backend.model)
    assert metrics["value_clipped"] > 0.1


@pytest.mark.parametrize("config", [PPO, TRUNCATED], ids=["to the engine's", "truncated"])
def test_however_the_batch_was_cut_and_whenever_it_is_replayed_the_bits_are_the_same(
    groups: Any, config: dict[str, Any], tmp_path: Any
) -> None:
    later = copy.deepcopy(groups)
    for group in later:
        group.id += 100
    first = bind(TorchActor(), config)
    step_with(first, [groups])
    first.checkpoint(tmp_path)
    metrics = step_with(first, [later[:3], later[3:]])
    for cut in ([later], [later[5:], [], later[:5]]):
        again = bind(TorchActor(), {**config, "warm_start": {"max_steps": 1, "batch": 16, "lr": 3e-3}})
        again.restore(tmp_path)
        assert step_with(again, cut) == metrics
        assert again.state() == first.state()


def test_one_update_is_the_step_of_before(groups: Any) -> None:
    """The defaults say nothing new: no key of the metrics, no group is held."""
    plain, told = (
        bind(TorchActor()),
        bind(TorchActor(), {**CONFIG, "optim": {"lr": 1e-3, "epochs": 1, "mini_batches": 1}}),
    )
    assert step_with(plain, [groups]) == step_with(told, [groups])
    assert plain.state() == told.state()
    assert "updates" not in step_with(plain, [])


# -- what goes wrong --------------------------------------------------------------------------------


def test_a_sample_that_lacks_something_is_refused_when_it_comes(groups: Any) -> None:
    unvalued = copy.deepcopy(groups)
    del unvalued[1].samples[0].extras["values"]
    for learner in (bind(TorchActor(), PPO), bind(TorchCritic(), PPO)):
        with pytest.raises(ValueError, match="no values"):
            learner.accumulate(unvalued, step=1, index=0)
        assert learner.begin(1)["dropped"] == 0


def test_an_update_that_fails_after_others_leaves_a_learner_that_says_so(groups: Any, tmp_path: Any) -> None:
    actor = bind(TorchActor(), PPO)
    actor.checkpoint(tmp_path)
    start = actor.state()
    gradient, calls = actor.gradient, []

    def third_is_wrong(some: Any, rows: Any) -> Any:
        tally = gradient(some, rows)
        calls.append(1)
        if len(calls) == 3:
            actor.backend.gradient *= float("nan")
        return tally

    actor.gradient = third_is_wrong
    with pytest.raises(NotFinite):
        step_with(actor, [groups])
    assert actor.state()["step"] == -1, "nobody takes it for a step"
    assert actor.state()["digest"] != start["digest"]
    for call in (lambda: actor.begin(1), lambda: step_with(actor, [groups])):
        with pytest.raises(HalfUpdated, match="Restore"):
            call()
    actor.restore(tmp_path)
    assert actor.state() == start
    twin = bind(TorchActor(), PPO)
    assert step_with(actor, [groups]) == step_with(twin, [groups])


def test_a_first_update_that_fails_leaves_the_weights_alone(groups: Any) -> None:
    actor = bind(TorchActor(), PPO)
    start = actor.state()
    wrong = copy.deepcopy(groups)
    for sample in (sample for group in wrong for sample in group.samples):
        sample.logprobs[:] = float("nan")
    with pytest.raises(NotFinite):
        step_with(actor, [wrong])
    assert actor.state() == start
    actor.begin(1)
    assert step_with(actor, [groups])["step"] == 1
