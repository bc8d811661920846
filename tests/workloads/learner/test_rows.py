"""Rollouts of several turns: what was not drawn is read and not trained, and rows of one rollout are one sample. The
learner's gradient is one that is made by hand, of whole rows and a mask."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.config.sections import LOSS_AGG_MODES, WorkloadSettings
from gyre.rollouts.drawn import of_drawn
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.algorithms.losses import aggregate
from gyre.workloads.fsdp.passes import rows_of as passes_of_one
from gyre.workloads.learner.losses import policy_rows
from gyre.workloads.learner.packing import PATH_KEYS, TrainingRow, laid_out, nodes_of, pack, paths_of
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.critic import TorchCritic
from gyre.workloads.torch.reference import TorchReference
from tests.examples import examples
from tests.rollout_rows import sessions
from tests.workloads.torch_workloads import CONFIG, bind, gradient_of

pytestmark = pytest.mark.landing

TERMS: dict[str, Any] = {"kl_loss_coef": 0.1, "entropy_coeff": 0.02}
SETTINGS = WorkloadSettings.read({**CONFIG, "loss": TERMS})


def bound(workload: type = TorchActor, **sections: Any) -> Any:
    return bind(workload(), {**CONFIG, **sections})


def numbers_of(model: torch.nn.Module, group: Group, sample: Sample) -> torch.Tensor:
    """What a model says after each token of the whole row but the last, `[p + t - 1, …]`."""
    row = np.concatenate([group.prompt_ids, sample.token_ids]).astype(np.int64)
    return model(torch.from_numpy(row[:-1])[None])[0]


def rewards_of(group: Group) -> dict[int, float]:
    return {sample.rollout: sample.reward for sample in group.samples}


def drawn_of(group: Group, rollout: int) -> int:
    return sum(int(sample.mask.sum()) for sample in group.samples if sample.rollout == rollout)


def weight_of(mode: str, group: Group, sample: Sample) -> float:
    if mode == "seq-mean-token-mean":
        return 1.0 / drawn_of(group, sample.rollout)
    return 1.0 / CONFIG["sampling"]["max_new_tokens"] if mode == "seq-mean-token-sum-norm" else 1.0


def by_hand(actor: Any, groups: list[Group], mode: str) -> torch.Tensor:
    """The gradient of GRPO's loss with TERMS, summed over all drawn tokens."""
    total: Any = 0.0
    loss = actor.settings.loss
    for group in groups:
        earned = rewards_of(group)
        mean, deviation = np.mean(list(earned.values())), np.std(list(earned.values()))
        for sample in group.samples:
            mask = torch.from_numpy(sample.mask)
            first = len(group.prompt_ids) - 1
            said = numbers_of(actor.backend.model, group, sample)[first:] / CONFIG["sampling"]["temperature"]
            every = torch.log_softmax(said, dim=-1)
            targets = torch.from_numpy(sample.token_ids.astype(np.int64))
            logprobs = every.gather(1, targets[:, None])[:, 0]
            entropies = -(every.exp() * every).sum(dim=-1)
            ratio = (logprobs - torch.from_numpy(sample.logprobs)).exp()
            advantage = (earned[sample.rollout] - mean) / (deviation + 1e-6)
            held = ratio.clamp(1 - loss.clip_ratio_low, 1 + loss.clip_ratio_high)
            surrogate = -torch.minimum(ratio * advantage, held * advantage)
            gap = (logprobs - torch.from_numpy(sample.extras["ref_logprobs"])).detach()
            one = surrogate + loss.kl_loss_coef * ratio * gap - loss.entropy_coeff * entropies
            total = total + weight_of(mode, group, sample) * (one * mask).sum()
    return flat(torch.autograd.grad(total, list(actor.backend.model.parameters())))


def flat(gradients: Any) -> torch.Tensor:
    return torch.cat([one.reshape(-1) for one in gradients])


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def drawn_in(groups: list[Group]) -> int:
    return sum(int(sample.mask.sum()) for group in groups for sample in group.samples)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("passes", [1, 4])
def test_the_gradient_is_that_of_whole_rows_with_a_mask(mode: str, passes: int) -> None:
    actor = bound(loss={"loss_agg_mode": mode, **TERMS})
    actor.passes = passes  # rows of a rollout are in several of them
    groups = sessions(0, 3)
    found, tally = gradient_of(actor, groups)
    assert distance(found, by_hand(actor, groups, mode)) < 1e-5
    assert (tally.samples, tally.sequences) == (9, 9), "a rollout is one sample, however many rows it has"
    assert tally.tokens == tally.scored_tokens == drawn_in(groups)
    assert tally.reward == sum(sum(rewards_of(group).values()) for group in groups)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_critics_gradient_is_that_of_whole_rows_with_a_mask(mode: str) -> None:
    gamma, lam = 0.9, 0.8
    loss = {"adv_estimator": "gae", "gamma": gamma, "lam": lam, "loss_agg_mode": mode}
    critic = bound(TorchCritic, loss=loss)
    with torch.no_grad():  # a head of zeros has no gradient for anything below it
        critic.backend.model.value_head.weight.normal_(generator=torch.Generator().manual_seed(3))
    groups = sessions(0, 2)
    total: Any = 0.0
    for group in groups:
        for rollout, reward in rewards_of(group).items():
            rows = [sample for sample in group.samples if sample.rollout == rollout]
            expected = np.concatenate([row.extras["values"][row.mask] for row in rows]).astype(float)
            returns, carried = np.zeros_like(expected), 0.0
            for at in reversed(range(len(expected))):
                last = at + 1 == len(expected)
                delta = (reward if last else gamma * expected[at + 1]) - expected[at]
                carried = delta + gamma * lam * carried
                returns[at] = carried + expected[at]
            start = 0
            for row in rows:
                said = numbers_of(critic.backend.model, group, row)[len(group.prompt_ids) - 1 :]
                said = said[torch.from_numpy(row.mask)]
                end = start + len(said)
                old = torch.from_numpy(expected[start:end]).float()
                wanted = torch.from_numpy(returns[start:end]).float()
                reach = critic.settings.loss.cliprange_value
                held = old + (said - old).clamp(-reach, reach)
                error = torch.maximum((said - wanted) ** 2, (held - wanted) ** 2)
                total = total + weight_of(mode, group, row) * 0.5 * error.sum()
                start = end
    wanted = flat(torch.autograd.grad(total, list(critic.backend.model.parameters())))
    found, tally = gradient_of(critic, groups)
    assert distance(found, wanted) < 1e-5
    assert tally.scored_tokens == drawn_in(groups)


def noisy(groups: list[Group], seed: int) -> list[Group]:
    """The groups with other numbers where a token was not drawn, and with more such tokens at the end of rows."""
    draw = np.random.default_rng(seed)
    groups = copy.deepcopy(groups)
    for group in groups:
        for at, sample in enumerate(group.samples):
            more = int(draw.integers(0, 3))
            mask = np.append(sample.mask, np.zeros(more, np.bool_))
            count = len(mask)

            def filled(values: Any, mask: Any = mask, count: int = count) -> Any:
                noise = draw.standard_normal(count).astype(np.float32)
                return np.where(mask, np.append(values, np.zeros(count - len(values), np.float32)), noise)

            group.samples[at] = replace(
                sample,
                token_ids=np.append(sample.token_ids, np.zeros(more, np.int32)),
                logprobs=filled(sample.logprobs),
                versions=(VersionRun(0, 0, count),),
                extras={key: filled(value) for key, value in sample.extras.items()},
                mask=mask,
            )
    return groups


@pytest.mark.parametrize(
    "loss",
    [
        {**TERMS, "kl_reward_coef": 0.05, "loss_agg_mode": "seq-mean-token-mean"},
        {"tis_imp_ratio_cap": 1.1},
        {"adv_estimator": "gae", "kl_reward_coef": 0.05, "lam": 0.9},
    ],
)
def test_numbers_of_tokens_that_were_not_drawn_change_nothing(loss: dict[str, Any]) -> None:
    actor = bound(loss=loss)

    @settings(deadline=None, max_examples=examples(10))
    @given(st.integers(0, 2**20))
    def holds(seed: int) -> None:
        groups = sessions(0, 1, seed=seed)
        plain, tally = gradient_of(actor, groups)
        found, other = gradient_of(actor, noisy(groups, seed))
        assert distance(found, plain) < 1e-5
        assert other.tokens == tally.tokens
        assert other.sums == pytest.approx(tally.sums, rel=1e-4, abs=1e-4)

    holds()


def test_a_mask_of_drawn_tokens_alone_has_the_bits_of_none() -> None:
    groups = sessions(0, 3, most_turns=1)
    plain, masked = copy.deepcopy(groups), copy.deepcopy(groups)
    for group in (*plain, *masked):
        group.samples = [next(one for one in group.samples if one.rollout == rollout) for rollout in range(3)]
    for group in plain:
        group.samples = [replace(sample, mask=None, rollout=None) for sample in group.samples]
    for group in masked:
        group.samples = [replace(one, mask=np.ones_like(one.mask)) for one in group.samples]
    for mode in LOSS_AGG_MODES:
        actor = bound(loss={"loss_agg_mode": mode, **TERMS})
        (found, tally), (wanted, known) = gradient_of(actor, masked), gradient_of(actor, plain)
        assert torch.equal(found, wanted)
        assert tally == known


def test_what_a_model_says_of_tokens_that_were_not_drawn_is_0() -> None:
    groups = sessions(0, 2)
    actor = bound(loss={"tis_imp_ratio_cap": 2.0}, optim={"lr": 1e-3, "epochs": 2})
    judged = bound(TorchReference)
    judged.load_weights(*actor.export_weights(version=0))
    critic = bound(TorchCritic)
    found = iter(actor.by_group(groups))
    reference = judged.logprobs(copy.deepcopy(groups))
    valued = critic.values(copy.deepcopy(groups), step=1)
    prepared = actor.prepared(groups)
    for group, told, worth, kept in zip(groups, reference, valued, prepared, strict=True):
        for at, sample in enumerate(group.samples):
            said = numbers_of(actor.backend.model, group, sample)[len(group.prompt_ids) - 1 :]
            every = torch.log_softmax(said / CONFIG["sampling"]["temperature"], dim=-1)
            targets = torch.from_numpy(sample.token_ids.astype(np.int64))
            wanted = np.where(sample.mask, every.gather(1, targets[:, None])[:, 0].detach().numpy(), 0.0)
            own = next(found)
            np.testing.assert_allclose(own, wanted, atol=1e-5)
            np.testing.assert_allclose(told.samples[at].extras["ref_logprobs"], wanted, atol=1e-5)
            np.testing.assert_array_equal(kept.samples[at].extras["old_logprobs"], own)
            values = worth.samples[at].extras["values"]
            assert values.shape == sample.token_ids.shape
            assert not values[~sample.mask].any()


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_log_probs_that_are_kept_for_people_are_of_drawn_tokens(epochs: int) -> None:
    actor = bound(loss={"tis_imp_ratio_cap": 2.0}, optim={"lr": 1e-3, "epochs": epochs})
    groups = sessions(0, 2)
    wanted = dict(
        zip([(g.id, at) for g in groups for at in range(len(g.samples))], actor.by_group(groups), strict=True)
    )
    actor.begin(1)
    actor.accumulate(groups, step=1, index=0)
    metrics = actor.apply(step=1, indices=1, group_ids=[group.id for group in groups])
    assert (metrics["samples"], metrics["tokens"]) == (6, drawn_in(groups))
    seen = actor.step_logprobs(step=1)
    ends = np.cumsum(seen["lengths"])
    samples = {(group.id, at): one for group in groups for at, one in enumerate(group.samples)}
    assert len(ends) == len(samples)
    for key, part in zip(
        map(tuple, seen["samples"].tolist()), np.split(seen["logprobs"], ends[:-1]), strict=True
    ):
        np.testing.assert_allclose(part, of_drawn(samples[key], wanted[key]), atol=1e-6)


@settings(deadline=None, max_examples=examples(40))
@given(st.integers(0, 2**20), st.integers(8, 60), st.booleans())
def test_each_row_is_its_path_and_predicts_what_was_drawn(seed: int, max_tokens: int, once: bool) -> None:
    groups = sessions(0, 2, seed=seed)
    rows = policy_rows(groups, SETTINGS)
    left = list(rows)
    for part in pack(rows, max_tokens=max_tokens, prompts_once=once):
        paths = paths_of(part.lengths, part.parents or [-1] * len(part.lengths))
        leaves = [path for at, path in enumerate(paths) if at not in set(part.parents)]
        mine = left[: len(part.tags)]
        if len(part.tags) > 1:
            assert sum(map(len, paths)) <= PATH_KEYS * max_tokens
            assert len(part.tokens) <= max_tokens
        first = 0
        for path, tag, count in zip(leaves, part.tags, part.counts, strict=True):
            row, left = left[0], left[1:]
            predicted = slice(first, first + count)
            assert row.tag == tag
            assert part.tokens[path].tolist() == [*row.prompt_ids, *row.token_ids[:-1]]
            assert part.positions[path].tolist() == list(range(row.length))
            places = np.flatnonzero(row.mask)
            assert part.columns[predicted].tolist() == path[len(row.prompt_ids) - 1 + places].tolist()
            assert part.targets[predicted].tolist() == row.token_ids[places].tolist()
            assert part.values["engine"][predicted].tolist() == row.values["engine"][places].tolist()
            first += count
        assert first == len(part.targets)
        for row, alone in zip(mine, passes_of_one(part), strict=True):
            assert alone.tokens.tolist() == [*row.prompt_ids, *row.token_ids[:-1]]
            assert alone.columns.tolist() == (len(row.prompt_ids) - 1 + np.flatnonzero(row.mask)).tolist()
            assert alone.targets.tolist() == row.token_ids[row.mask].tolist()
        assert len(set(part.columns.tolist())) == len(part.columns), "a token predicts for one sequence"
    assert not left


def test_what_was_drawn_for_one_row_is_computed_once_for_those_that_go_on_after_it() -> None:
    def row(tokens: list[int], drawn: str) -> TrainingRow:
        mask = np.array([one == "x" for one in drawn])
        return TrainingRow(np.array([1, 2, 3], np.int32), np.array(tokens, np.int32), mask=mask)

    rows = [
        row([4, 5, 6, 7, 8], "xx.xx"),
        row([4, 5, 6, 7, 9, 9], ".....x"),  # but the first one's last input is its own
        row([4, 5, 6, 3, 3], "....x"),
        row([4, 5, 6, 3, 3, 3], "....xx"),  # drew what the one before drew: that is its own
        row([4, 5], "xx"),
    ]
    nodes = nodes_of(rows, prompts_once=True)
    told = [(node.tokens.tolist(), node.parent, node.row is not None) for node in nodes]
    assert told == [
        ([1, 2], -1, False),
        ([3, 4, 5, 6], 0, False),
        ([7], 1, True),
        ([7, 9], 1, True),
        ([3], 1, True),
        ([3, 3], 1, True),
        ([3, 4], 0, True),
    ]
    part = laid_out(nodes)
    assert len(set(part.columns.tolist())) == len(part.columns) == 4 + 1 + 1 + 2 + 2
    assert part.targets.tolist() == [4, 5, 7, 8, 9, 3, 3, 3, 4, 5]


def own(logprobs: Any, advantages: Any, mask: Any, settings: Any, **given: Any) -> Any:
    """A loss of a user's own, from before rollouts had rows."""
    per_token = -logprobs * advantages
    shape = {"rows": given["rows"], "norm_length": given["norm_length"]}
    return aggregate(per_token, mask, settings.loss_agg_mode, {}, **shape)


def own_of_rollouts(
    logprobs: Any, advantages: Any, mask: Any, settings: Any, *, rows: Any, lengths: Any = None, **given: Any
) -> Any:
    shape = {"rows": rows, "norm_length": given["norm_length"], "lengths": lengths}
    return aggregate(-logprobs * advantages, mask, settings.loss_agg_mode, {}, **shape)


def test_a_loss_of_ones_own_gets_lengths_or_is_refused_means_of_rollouts_in_rows() -> None:
    groups = sessions(0, 2)
    single = [replace(one, samples=[one.samples[rows[-1]] for rows in one.rollouts]) for one in groups]
    mode = "seq-mean-token-mean"
    without = bound(loss={"loss_mode": f"{__name__}:own", "loss_agg_mode": mode})
    with_lengths = bound(loss={"loss_mode": f"{__name__}:own_of_rollouts", "loss_agg_mode": mode})
    with pytest.raises(ValueError, match="own has no parameter `lengths`, and a rollout has several rows"):
        without.rows(groups)
    with_lengths.passes = 1
    whole, _ = gradient_of(with_lengths, groups)
    with_lengths.passes = 5
    assert distance(gradient_of(with_lengths, groups)[0], whole) < 1e-5, "rows in other passes count"
    assert distance(gradient_of(without, single)[0], gradient_of(with_lengths, single)[0]) < 1e-6
    sums = bound(loss={"loss_mode": f"{__name__}:own", "loss_agg_mode": "seq-mean-token-sum"})
    assert len(sums.rows(groups)) == sum(len(group.samples) for group in groups)


def test_a_critic_of_several_updates_refuses_at_once_what_has_no_values() -> None:
    critic = bound(TorchCritic, critic={"optim": {"lr": 1e-3, "epochs": 2}}, loss={"adv_estimator": "gae"})
    groups = sessions(0, 1)
    critic.accumulate(copy.deepcopy(groups), step=1, index=0)
    for sample in groups[0].samples:
        del sample.extras["values"]
    with pytest.raises(ValueError, match="a sample has no values"):
        critic.check(groups)
