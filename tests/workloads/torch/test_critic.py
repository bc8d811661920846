"""The critic: values that belong to their step, the value loss's gradient, and restarts that are bit-exact."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from gyre.workloads.algorithms.advantages import gae_of
from gyre.workloads.learner.errors import StepGap, TrainedTwice
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.critic import TorchCritic
from tests.workloads.torch_workloads import CONFIG, bind, gradient_of, rolled_out

PPO = {**CONFIG, "loss": {"adv_estimator": "gae", "lam": 0.95}, "critic": {"optim": {"lr": 0.01}}}


@pytest.fixture(scope="module")
def scored():
    return rolled_out(bind(TorchActor(), PPO), 0, 6)


@pytest.fixture
def critic():
    return bind(TorchCritic(), PPO)


def stepped(critic, groups, cuts=(6,)):
    step = critic.step + 1
    valued = critic.values(copy.deepcopy(groups), step=step)
    start = 0
    for index, end in enumerate(cuts):
        critic.accumulate(valued[start:end], step=step, index=index)
        start = end
    return critic.apply(step=step, indices=len(cuts), group_ids=[group.id for group in groups])


def later(groups, turn):
    """The same groups under other ids: a group is trained once."""
    found = copy.deepcopy(groups)
    for group in found:
        group.id += 100 * turn
    return found


def test_values_stand_at_every_token_and_do_not_see_what_follows(critic, scored):
    with torch.no_grad():
        critic.backend.model.value_head.weight.normal_()
    groups = critic.values(copy.deepcopy(scored), step=1)
    sample = groups[0].samples[0]
    assert sample.extras["values"].dtype == np.float32
    assert len(sample.extras["values"]) == len(sample.token_ids)
    changed = copy.deepcopy(groups)
    changed[0].samples[0].token_ids[-1] ^= 1
    again = critic.values(changed, step=1)[0].samples[0].extras["values"]
    assert again.tolist() == sample.extras["values"].tolist()


def test_values_of_another_step_than_the_next_are_refused(critic, scored):
    for step in (0, 2):
        with pytest.raises(StepGap, match="last applied step is 0"):
            critic.values(scored, step=step)


def test_the_gradient_is_that_of_the_squared_error(critic, scored):
    groups = critic.values(copy.deepcopy(scored), step=1)
    found, tally = gradient_of(critic, groups)
    total = torch.zeros(())
    for group in groups:
        for sample in group.samples:
            tokens = torch.tensor([*group.prompt_ids.tolist(), *sample.token_ids.tolist()])
            values = critic.backend.model(tokens[None, :-1])[0, len(group.prompt_ids) - 1 :]
            returns = torch.from_numpy(gae_of(sample, critic.settings.loss)[1])
            total = total + 0.5 * (values - returns).square().sum()
    expected = torch.cat(
        [part.reshape(-1) for part in torch.autograd.grad(total, list(critic.backend.model.parameters()))]
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert tally.loss == pytest.approx(total.item(), rel=1e-5)


def test_micro_batches_give_the_gradient_of_the_whole_batch(scored):
    whole, cut = bind(TorchCritic(), PPO), bind(TorchCritic(), PPO)
    expected, found = stepped(whole, scored), stepped(cut, scored, cuts=(1, 4, 6))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_smaller_passes_give_the_gradient_of_whole_ones(critic, scored):
    groups = critic.values(copy.deepcopy(scored), step=1)
    expected, told = gradient_of(critic, groups)
    assert critic.begin(1, 2)["passes"] == 4
    found, tally = gradient_of(critic, groups)
    assert torch.allclose(found, expected, atol=1e-4)
    assert tally.loss == pytest.approx(told.loss, rel=1e-4)


def test_the_critic_learns_what_its_samples_return(critic, scored):
    first = stepped(critic, scored)
    for turn in range(1, 40):
        last = stepped(critic, later(scored, turn))
    assert last["loss"] < 0.6 * first["loss"]
    assert last["explained"] > 0.3


def test_it_begins_with_a_policy_s_decoder_and_only_then(critic, scored):
    actor = bind(TorchActor(), {**PPO, "seed": 12})
    assert critic.load_weights(*actor.export_weights(version=0)) == 0
    mine = dict(critic.backend.model.decoder.named_parameters())
    for name, theirs in actor.backend.model.named_parameters():
        assert torch.equal(mine[name], theirs), name
    stepped(critic, scored)
    digest = critic.state()["digest"]
    critic.load_weights(*actor.export_weights(version=0))
    assert critic.state()["digest"] == digest


def test_a_restored_critic_goes_on_with_the_same_bits(critic, scored, tmp_path):
    stepped(critic, scored)
    critic.checkpoint(tmp_path)
    stepped(critic, later(scored, 1))
    other = bind(TorchCritic(), PPO)
    other.restore(tmp_path)
    assert (other.step, other.trained) == (1, [(0, 6)])
    stepped(other, later(scored, 1))
    assert other.state() == critic.state()
    with pytest.raises(TrainedTwice):
        other.accumulate(scored, step=3, index=0)
