"""The actor: one gradient however it is cut, every call idempotent, nothing trained twice, bit-exact restarts."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from gyre.config.sections import OptimSettings
from gyre.graph.backends import backend_named
from gyre.models.flops import flops_of
from gyre.workloads.learner.errors import (
    CheckpointMismatch,
    MicroBatchMismatch,
    NotFinite,
    StepGap,
    TrainedTwice,
)
from gyre.workloads.learner.learner import learning_rate
from gyre.workloads.learner.packing import TrainingRow, pack
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.reference import TorchReference
from gyre.workloads.torch.saved_policy import sum_file, write_sum
from tests.other_checkpoints import write_beginnings
from tests.workloads.torch_workloads import CONFIG, bind, gradient_of, rolled_out, train_as_peer


@pytest.fixture
def actor():
    return bind(TorchActor())


@pytest.fixture(scope="module")
def groups():
    return rolled_out(bind(TorchActor()), 0, 6)


def ids(groups):
    return [group.id for group in groups]


def one_step(actor, groups, step=None):
    step = actor.step + 1 if step is None else step
    actor.accumulate(groups, step=step, index=0)
    return actor.apply(step=step, indices=1, group_ids=ids(groups))


def test_entropy_and_kl_are_measured_without_a_term_of_them_and_not_where_nothing_was_computed(actor, groups):
    assert (actor.settings.loss.entropy_coeff, actor.settings.loss.kl_loss_coef) == (0.0, 0.0)
    metrics = one_step(actor, groups)
    assert metrics["entropy"] > 0.1
    assert {"policy_loss", "old_kl", "clipped"} <= metrics.keys()
    flat = [
        replace(group, id=group.id + 100, samples=[replace(sample, reward=1.0) for sample in group.samples])
        for group in groups
    ]
    metrics = one_step(actor, flat)
    assert (metrics["loss"], metrics["grad_norm"]) == (0.0, 0.0)
    assert not {"policy_loss", "old_kl", "entropy", "clipped"} & metrics.keys(), (
        "a mean over nothing is not 0"
    )


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_micro_batches_give_the_gradient_of_the_whole_batch(groups, mode):
    config = {**CONFIG, "loss": {"loss_agg_mode": mode}}
    whole, cut = bind(TorchActor(), config), bind(TorchActor(), config)
    expected = one_step(whole, groups)
    for index, part in enumerate([groups[:1], [], groups[1:4], groups[4:]]):
        cut.accumulate(part, step=1, index=index)
    found = cut.apply(step=1, indices=4, group_ids=ids(groups))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for mine, theirs in zip(cut.backend.model.parameters(), whole.backend.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize(("halved", "most"), [(0, 24), (1, 12), (2, 6), (9, 1)])
def test_smaller_passes_give_the_gradient_of_whole_ones(actor, groups, halved, most):
    expected, told = gradient_of(actor, groups)
    assert actor.begin(1, halved)["passes"] == 2**halved
    rows, forward = [], actor.backend.model.forward
    actor.backend.model.forward = lambda tokens, *rest, **named: (
        rows.append(len(tokens)) or forward(tokens, *rest, **named)
    )
    found, tally = gradient_of(actor, groups)
    samples = sum(rows)
    assert max(rows) <= -(-samples // 2**halved) <= most
    assert torch.allclose(found, expected, atol=1e-5)
    assert (tally.tokens, tally.scored_tokens) == (told.tokens, told.scored_tokens)
    assert tally.loss == pytest.approx(told.loss, abs=1e-4)


def test_the_gradient_is_that_of_the_loss_by_autograd_on_every_sample(actor, groups):
    """Samples without advantage are left out of the forward; with a vanishing KL term they are all in it."""
    lean, lean_tally = gradient_of(actor, groups)
    reference = bind(TorchReference())
    reference.load_weights(*actor.export_weights(version=0))
    other = bind(TorchActor(), {**CONFIG, "loss": {"kl_loss_coef": 1e-12}})
    full, full_tally = gradient_of(other, reference.logprobs(groups))
    assert torch.allclose(lean, full, atol=1e-5)
    assert full_tally.scored_tokens == full_tally.tokens == lean_tally.tokens
    assert full_tally.sums["kl"] == pytest.approx(0.0, abs=1e-4)


def test_a_step_makes_what_was_rewarded_likelier(actor, groups):
    first = one_step(actor, groups)
    assert first["loss"] == pytest.approx(0.0, abs=0.5)
    assert first["tokens"] == sum(group.token_count for group in groups)
    assert first["samples"] == 24
    assert gradient_of(actor, groups)[1].loss < first["loss"] * first["tokens"]


def test_repeated_calls_change_nothing_and_return_what_the_first_returned(actor, groups):
    first = actor.accumulate(groups, step=1, index=0)
    before = actor.backend.gradient.clone()
    assert actor.accumulate(groups, step=1, index=0) == first
    assert torch.equal(actor.backend.gradient, before)
    applied = actor.apply(step=1, indices=1, group_ids=ids(groups))
    digest = actor.state()["digest"]
    assert actor.apply(step=1, indices=1, group_ids=ids(groups)) == applied
    assert actor.accumulate(groups, step=1, index=0) == {"already_applied": True}
    assert actor.begin(1) == {"already_applied": True}
    assert actor.apply(step=0, indices=1, group_ids=[]) == {"already_applied": True}
    assert actor.state() == {"step": 1, "trained": [[0, 6]], "digest": digest}


def test_a_step_out_of_order_is_refused(actor, groups):
    for call in (
        lambda: actor.begin(2),
        lambda: actor.accumulate(groups, step=2, index=0),
        lambda: actor.apply(step=2, indices=0, group_ids=[]),
    ):
        with pytest.raises(StepGap, match="next step is 1"):
            call()


def test_begin_forgets_what_an_earlier_controller_accumulated(actor, groups):
    actor.accumulate(groups[:3], step=1, index=0)
    assert actor.begin(1) == {"step": 1, "dropped": 1, "passes": 1}
    fresh = bind(TorchActor())
    assert one_step(actor, groups) == one_step(fresh, groups)
    assert actor.state() == fresh.state()


def test_nothing_is_trained_twice(actor, groups):
    one_step(actor, groups)
    with pytest.raises(TrainedTwice, match="group 0") as caught:
        actor.accumulate(groups, step=2, index=0)
    assert caught.value.code == "trained_twice"
    with pytest.raises(TrainedTwice):
        actor.apply(step=2, indices=0, group_ids=[5])
    with pytest.raises(TrainedTwice):
        actor.apply(step=2, indices=0, group_ids=[9, 9])
    other = rolled_out(bind(TorchActor()), 6, 1)
    actor.accumulate(other, step=2, index=0)
    with pytest.raises(TrainedTwice):
        actor.accumulate(other, step=2, index=1)
    assert actor.state()["step"] == 1


def test_applying_other_micro_batches_than_were_accumulated_is_refused(actor, groups):
    actor.accumulate(groups, step=1, index=0)
    digest = actor.state()["digest"]
    for indices, group_ids in [(2, ids(groups)), (1, ids(groups)[:-1]), (1, [*ids(groups), 99])]:
        with pytest.raises(MicroBatchMismatch, match="begin"):
            actor.apply(step=1, indices=indices, group_ids=group_ids)
    assert actor.state() == {"step": 0, "trained": [], "digest": digest}
    assert actor.apply(step=1, indices=1, group_ids=ids(groups))["step"] == 1


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(actor, groups):
    digest = actor.state()["digest"]
    actor.accumulate(groups, step=1, index=0)
    actor.backend.gradient[0] = float("nan")
    with pytest.raises(NotFinite):
        actor.apply(step=1, indices=1, group_ids=ids(groups))
    assert actor.state()["digest"] == digest


def test_a_step_that_is_skipped_leaves_weights_and_optimizer_alone(actor, groups):
    before = [parameter.detach().clone() for parameter in actor.backend.model.parameters()]
    actor.accumulate(groups, step=1, index=0)
    skipped = actor.apply(step=1, indices=1, group_ids=ids(groups), skip=True)
    assert skipped == {"step": 1, "skipped": 1}
    assert actor.apply(step=1, indices=0, group_ids=[]) == skipped, "it is applied, and told again"
    assert actor.state()["step"] == 1
    assert all(
        torch.equal(was, now) for was, now in zip(before, actor.backend.model.parameters(), strict=True)
    )
    assert not actor.backend.optimizer.state
    actor.accumulate(groups, step=2, index=0)
    assert actor.apply(step=2, indices=1, group_ids=ids(groups))["groups"] == len(groups)


def test_a_group_without_rewards_is_refused(actor):
    unscored = rolled_out(actor, 0, 1)
    unscored[0].samples[2].reward = None
    with pytest.raises(ValueError, match="group 0 has samples without a reward"):
        actor.accumulate(unscored, step=1, index=0)
    assert actor.begin(1)["dropped"] == 0


def test_a_restored_checkpoint_goes_on_bit_by_bit(actor, groups, tmp_path):
    actor.warm_start()
    one_step(actor, groups[:3])
    actor.checkpoint(tmp_path)
    restored = bind(TorchActor(), {**CONFIG, "seed": 99})
    restored.accumulate(groups[:1], step=1, index=0)
    restored.restore(tmp_path)
    assert restored.state() == actor.state()
    assert restored.apply(step=1, indices=1, group_ids=[]) == actor.apply(step=1, indices=1, group_ids=[])
    assert restored.warm_start() == actor.warm_start()
    assert one_step(restored, groups[3:]) == one_step(actor, groups[3:])
    assert restored.state() == actor.state()
    assert restored.state()["trained"] == [[0, 6]]


def test_a_damaged_or_absent_checkpoint_is_refused(actor, tmp_path):
    with pytest.raises(CheckpointMismatch, match="no checkpoint of"):
        actor.restore(tmp_path)
    actor.checkpoint(tmp_path)
    file = tmp_path / "rank_00000.pt"
    content = torch.load(file, weights_only=True)
    content["model"]["norm.weight"][0] += 1.0
    torch.save(content, file)
    other = bind(TorchActor())
    before = other.state()
    with pytest.raises(CheckpointMismatch, match="its bytes are not those that were written"):
        other.restore(tmp_path)
    assert other.state() == before, "nothing of it was taken"
    sum_file(file).unlink()
    with pytest.raises(CheckpointMismatch, match="its checksum, is missing"):
        other.restore(tmp_path)
    torch.save(content | {"format": 1}, file)
    write_sum(file)
    with pytest.raises(CheckpointMismatch, match="has format 1, this Gyre reads 2"):
        other.restore(tmp_path)
    torch.save(content, file)
    write_sum(file)
    with pytest.raises(CheckpointMismatch, match=r"the weights in .* are not those that were written"):
        other.restore(tmp_path)
    assert other.state()["step"] == -1, "nobody goes on from these weights"


def test_another_back_ends_or_models_checkpoint_is_refused_with_what_to_do(actor, tmp_path):
    beginnings, before = write_beginnings(tmp_path / "others"), actor.state()
    for writer in ("megatron", "fsdp"):
        with pytest.raises(
            CheckpointMismatch, match=f"is one of {backend_named(writer).writer}, not of plain torch"
        ) as found:
            actor.restore(beginnings[writer])
        assert found.value.hint.startswith("A new job begins with its weights")
    deeper = {**CONFIG, "model": {**CONFIG["model"], "layers": CONFIG["model"]["layers"] + 1}}
    bind(TorchActor(), deeper).checkpoint(tmp_path)
    with pytest.raises(
        CheckpointMismatch, match="of another model: num_hidden_layers is 3 instead of 2"
    ) as found:
        actor.restore(tmp_path)
    assert "config.model or" in found.value.hint
    assert actor.state() == before


def test_every_byte_of_a_checkpoint_is_covered(actor, groups, tmp_path):
    one_step(actor, groups[:3])
    actor.checkpoint(tmp_path)
    file, rng = tmp_path / "rank_00000.pt", random.Random(0)
    whole = file.read_bytes()
    state = torch.load(file, weights_only=True)["optimizer"]["state"]
    moment = max((one["exp_avg"] for one in state.values()), key=lambda tensor: tensor.abs().max())
    of_adam = whole.index(moment.contiguous().numpy().tobytes())
    other = bind(TorchActor())
    before = other.state()
    for at in (of_adam, 0, len(whole) - 1, *rng.sample(range(len(whole)), 20)):
        hurt = bytearray(whole)
        hurt[at] ^= 1 << rng.randrange(8)
        file.write_bytes(hurt)
        with pytest.raises(CheckpointMismatch, match="is damaged"):
            other.restore(tmp_path)
    assert other.state() == before
    file.write_bytes(whole)
    other.restore(tmp_path)
    assert other.state() == actor.state()


def test_the_warm_start_runs_once_and_the_same_way(actor):
    before = actor.state()["digest"]
    ticks = actor.context.progress.read()[0]
    first = actor.warm_start()
    assert first["steps"] == 4
    assert actor.context.progress.read()[0] >= ticks + 4
    assert actor.warm_start() == first
    twin = bind(TorchActor())
    twin.warm_start()
    assert twin.state() == actor.state() != {"step": 0, "trained": [], "digest": before}


def test_two_ranks_train_as_one(groups, ranks):
    """Unequal and empty shares over two Gloo peers give one rank's weights; a disagreement is refused by both."""
    alone = bind(TorchActor())
    warm = alone.warm_start()
    expected = [one_step(alone, groups[:4]), one_step(alone, groups[4:])]
    shares = [
        [[groups[:1], groups[1:3]], [groups[4:5]]],
        [[[], groups[3:4]], [groups[5:]]],
    ]
    group_ids = [ids(groups[:4]), ids(groups[4:])]
    results = ranks.run(train_as_peer, 2, shares, group_ids)
    assert results[0]["state"] == results[1]["state"]
    assert results[0]["metrics"] == results[1]["metrics"]
    for result in results:
        assert result["warm"]["loss"] == warm["loss"]
        assert result["refusal"] == "actor.micro_batch_mismatch"
        for found, wanted in zip(result["metrics"], expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        for name, parameter in alone.backend.model.named_parameters():
            np.testing.assert_allclose(result["weights"][name], parameter.detach().numpy(), atol=1e-5)


def test_the_learning_rate_rises_falls_and_stays():
    optim = OptimSettings(lr=1.0, warmup_steps=2, decay_steps=10, final_lr_ratio=0.5)
    assert [learning_rate(optim, step) for step in (1, 2, 10, 50)] == pytest.approx([0.475, 0.9, 0.5, 0.5])
    assert learning_rate(OptimSettings(lr=1.0, warmup_steps=0, decay_steps=0), 1) == 1.0


def test_an_actor_that_is_ended_in_a_call_leaves_no_weights_in_memory(actor):
    """`teardown` is not run then; what it holds is removed beside the call."""
    unlinked = []

    class Holding:
        def __init__(self, what):
            self.unlink = lambda: unlinked.append(what)

    actor.abandoned()
    actor._source, actor._copy = Holding("source"), Holding("copy")
    actor.abandoned()
    assert unlinked == ["source", "copy"]
    TorchActor().abandoned()  # before it was set up


# -- the policy's own log-probs, for people to look at ------------------------------------------------


def own_logprobs(actor, step):
    found = actor.step_logprobs(step=step)
    ends = np.cumsum(found["lengths"])
    return {
        tuple(one): found["logprobs"][end - length : end]
        for one, length, end in zip(found["samples"].tolist(), found["lengths"], ends, strict=True)
    }


def test_the_policy_s_own_log_probs_of_a_step_are_those_before_it(actor, groups):
    expected = dict(zip(tags(groups), actor.own_logprobs(groups), strict=True))
    actor.accumulate(groups[:4], step=1, index=0)
    actor.accumulate(groups[4:], step=1, index=1)
    assert actor.step_logprobs(step=1) == {}, "the step is not made"
    actor.apply(step=1, indices=2, group_ids=ids(groups))
    found = own_logprobs(actor, 1)
    trained = {tag for tag, values in expected.items() if values.any()}
    assert set(found) == trained != set()
    for tag, values in found.items():
        assert values.dtype == np.float32
        assert values == pytest.approx(expected[tag], abs=1e-6)


def tags(groups):
    return [(group.id, index) for group in groups for index in range(len(group.samples))]


def test_log_probs_of_what_was_given_up_or_is_long_past_are_forgotten(actor, groups):
    actor.accumulate(groups[:2], step=1, index=0)
    actor.begin(1)
    one_step(actor, groups[2:3])
    assert {group for group, _ in own_logprobs(actor, 1)} <= {groups[2].id}
    for at in (3, 4):
        one_step(actor, groups[at : at + 1])
    assert actor.step_logprobs(step=1) == {}
    assert actor.step_logprobs(step=3) != {}


def test_of_several_updates_only_log_probs_before_the_first_are_told(groups):
    config = {**CONFIG, "optim": {**CONFIG["optim"], "epochs": 2}}
    actor = bind(TorchActor(), config=config)
    one_step(actor, groups)
    assert len(actor.step_logprobs(step=1)["samples"]) == 0, "the second update's are of other weights"
    loss = {**CONFIG.get("loss", {}), "tis_imp_ratio_cap": 2.0}
    actor = bind(TorchActor(), config={**config, "loss": loss})
    expected = dict(zip(tags(groups), actor.own_logprobs(groups), strict=True))
    one_step(actor, groups)
    found = own_logprobs(actor, 1)
    assert found
    for tag, values in found.items():
        assert values.tobytes() == expected[tag].tobytes()


def test_a_steps_operations_are_those_of_its_samples_however_it_is_cut(actor, groups):
    rows = actor.rows(groups)
    flops = flops_of(actor.trained_model.config)
    expected = sum(flops.training(np.arange(row.length), len(row.token_ids)) for row in rows)
    assert one_step(actor, groups)["model_flops"] == expected > 0
    cut = bind(TorchActor())
    for index, part in enumerate([groups[:1], [], groups[1:]]):
        cut.accumulate(part, step=1, index=index)
    assert cut.apply(step=1, indices=3, group_ids=ids(groups))["model_flops"] == expected
    twice = bind(TorchActor(), {**CONFIG, "optim": {**CONFIG["optim"], "epochs": 2}})
    metrics = one_step(twice, groups)
    before = sum(flops.forward(np.arange(row.length), len(row.token_ids)) for row in rows)
    assert metrics["model_flops"] in (2 * expected, 2 * expected + before)
    assert "peak_flops" not in metrics, "a CPU has no peak that is known"


@pytest.mark.parametrize("multiple", [1, 8])
def test_what_is_computed_once_is_counted_once_and_padding_is_not(multiple):
    prompt = np.arange(1, 8, dtype=np.int32)
    rows = [TrainingRow(prompt, np.full(length, 9, np.int32)) for length in (3, 5)]
    (apart,) = pack(rows, max_tokens=99, multiple=multiple)
    (once,) = pack(rows, max_tokens=99, multiple=multiple, prompts_once=True)
    assert apart.own_tokens == sum(row.length for row in rows)
    assert once.own_tokens == apart.own_tokens - (len(prompt) - 1)
    assert len(once.tokens) % multiple == 0
