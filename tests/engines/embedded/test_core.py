"""The core as a state machine: admission, prefixes, endings, pauses and swaps, stepped one step at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre.engines.dialect import FinishKind, PauseMode, VersionSpan
from gyre.engines.embedded.core import Swap
from gyre.engines.embedded.errors import BadRequest
from tests.engines.embedded.tiny import Model, ask, go_on, run, write_checkpoint

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [Model(write_checkpoint(folder / str(seed), seed=seed)) for seed in (0, 1)]


@pytest.fixture
def core(models):
    return models[0].core()


def swap_to(model, version, *, flush=True, done=lambda paused: None):
    return Swap(model.weights, version, flush, done)


def ends(asked):
    return [update.ending for update in asked.updates if update.ending is not None]


def lone(model, *args, **kwargs):
    asked = ask(*args, **kwargs)
    run(model.core(), asked)
    return asked


# Steps


def test_every_step_gives_every_running_request_one_token(core):
    asked = [ask([1 + i, 2, 3], 6, rid=f"r{i}") for i in range(3)]
    run(core, *asked, steps=4)
    assert [len(each.tokens) for each in asked] == [4, 4, 4]
    go_on(core)
    assert [len(each.tokens) for each in asked] == [6, 6, 6]
    assert [ends(each) for each in asked] == [[each.request.ending] for each in asked]
    assert not core.can_step


def test_more_requests_than_slots_are_served_in_turn_and_each_as_if_alone(models):
    core = models[0].core(max_running=3)
    asked = [ask([1 + i] * (1 + 3 * i), 3 + i, seed=i, rid=f"r{i}") for i in range(9)]
    run(core, *asked)
    for i, each in enumerate(asked):
        assert each.bits == lone(models[0], [1 + i] * (1 + 3 * i), 3 + i, seed=i).bits


def test_who_ends_leaves_at_once_and_its_slot_is_used(models):
    core = models[0].core(max_running=2)
    asked = [ask(PROMPT, new, rid=f"r{new}") for new in (2, 9, 3)]
    run(core, *asked, steps=3)
    assert core.load().running == 2
    assert core.load().waiting == 0
    assert len(asked[0].tokens) == 2


def test_a_long_prompt_does_not_starve_who_is_running(models):
    core = models[0].core(prefill_tokens=16)
    short, long = ask(PROMPT, 40, rid="short"), ask([7] * 200, 4, rid="long")
    run(core, short, steps=2)
    run(core, long, steps=8)
    assert len(short.tokens) == 10
    assert not long.tokens
    go_on(core)
    assert len(long.tokens) == 4
    assert long.bits == lone(models[0], [7] * 200, 4).bits


def test_a_request_waits_until_all_its_tokens_fit(models):
    core = models[0].core(max_tokens=64)
    first, second = ask([1] * 20, 20, rid="a"), ask([2] * 20, 20, rid="b")
    run(core, first, second, steps=10)
    assert (core.load().running, core.load().waiting) == (1, 1)
    go_on(core)
    assert len(second.tokens) == 20


def test_the_cache_grows_while_requests_run(models):
    core = models[0].core()
    left = ask([9] * 100, 3, rid="left")
    short, long = ask(PROMPT, 270, rid="short"), ask([5] * 500, 30, seed=1, rid="long")
    run(core, short, left, steps=20)
    run(core, long)
    assert short.bits == lone(models[0], PROMPT, 270).bits
    assert long.bits == lone(models[0], [5] * 500, 30, seed=1).bits
    rest = ask([9] * 100 + left.tokens[:2], 1)
    run(core, rest)
    assert rest.bits == left.bits[2:]


def test_deltas_hold_one_token_first_and_then_as_many_as_asked(core):
    asked = ask(PROMPT, 20, interval=8)
    run(core, asked)
    assert [len(update.tokens) for update in asked.updates] == [1, 8, 8, 3]
    assert [update.total for update in asked.updates] == [1, 9, 17, 20]
    whole = ask(PROMPT, 20, interval=0, rid="whole")
    run(core, whole)
    assert [len(update.tokens) for update in whole.updates] == [20]
    assert whole.tokens == asked.tokens


# Prefixes


def test_a_group_prefills_its_prompt_once(core):
    prompt = [1 + i % 90 for i in range(100)]
    group = [ask(prompt, 5, seed=i, rid=f"r{i}") for i in range(8)]
    run(core, *group)
    assert [each.request.cached for each in group] == [0] + [99] * 7
    assert len({tuple(each.tokens) for each in group}) == 8


def test_a_sample_that_goes_on_finds_what_it_left(core):
    first = ask(PROMPT, 8)
    run(core, first)
    rest = ask(PROMPT + first.tokens[:6], 2)
    run(core, rest)
    assert rest.request.cached == len(PROMPT) + 5
    assert rest.bits == first.bits[6:]


def test_nothing_of_older_weights_is_reused(core, models):
    run(core, ask(PROMPT, 4))
    core.swap(swap_to(models[1], "2"))
    again = ask(PROMPT, 4)
    run(core, again)
    assert again.request.cached == 0
    assert again.bits == lone(models[1], PROMPT, 4).bits


def test_nothing_is_taken_from_a_running_request_that_began_with_older_weights(core, models):
    old = ask(PROMPT, 20, rid="old")
    run(core, old, steps=3)
    core.pause(PauseMode.IN_PLACE)
    core.swap(swap_to(models[1], "2", flush=False))
    core.resume()
    new = ask(PROMPT, 6, rid="new")
    run(core, new)
    assert new.request.cached == 0
    assert new.bits == lone(models[1], PROMPT, 6).bits


def test_a_flushed_cache_is_not_reused(core):
    run(core, ask(PROMPT, 4))
    core.flush()
    again = ask(PROMPT, 4)
    run(core, again)
    assert again.request.cached == 0


# Endings


def test_a_stop_token_ends_a_request_and_belongs_to_it(core):
    free = ask(PROMPT, 20, seed=1)
    run(core, free)
    stop = free.tokens[9]
    cut = ask(PROMPT, 20, seed=1, ignore_eos=False, stop_token_ids=frozenset({stop}))
    run(core, cut)
    assert cut.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert (ends(cut)[0].kind, ends(cut)[0].matched) == (FinishKind.STOP, stop)
    ignored = ask(PROMPT, 20, seed=1, stop_token_ids=frozenset({stop}))
    run(core, ignored)
    assert ignored.tokens == free.tokens


def test_the_models_own_end_token_ends_a_request(models):
    core = models[0].core()
    free = ask(PROMPT, 20, seed=1)
    run(core, free)
    models_with_eos = Model(models[0].path)
    models_with_eos.architecture = replace(
        models_with_eos.architecture, eos_token_ids=frozenset({free.tokens[4]})
    )
    cut = ask(PROMPT, 20, seed=1, ignore_eos=False)
    run(models_with_eos.core(), cut)
    assert cut.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]


def test_no_stop_before_min_new_tokens(core):
    stops = frozenset(range(48))
    asked = [
        ask(PROMPT, 12, seed=i, rid=f"r{i}", ignore_eos=False, stop_token_ids=stops, min_new_tokens=6)
        for i in range(6)
    ]
    run(core, *asked)
    for each in asked:
        assert len(each.tokens) >= 6
        assert not stops & set(each.tokens[:6])
    assert any(ends(each)[0].kind is FinishKind.STOP for each in asked)


def test_abort_ends_the_chosen_ones_with_what_they_have(models):
    core = models[0].core(max_running=2)
    asked = [ask(PROMPT, 30, seed=i, rid=rid) for i, rid in enumerate(("a1", "a2", "b1", "a3"))]
    run(core, *asked, steps=5)
    core.abort(lambda request: request.rid.startswith("a"))
    go_on(core)
    assert [ends(each)[0].kind.value for each in asked] == ["abort", "abort", "length", "abort"]
    assert [len(each.tokens) for each in asked] == [5, 4, 30, 0]  # the second waited for the first's prompt
    assert asked[2].bits == lone(models[0], PROMPT, 30, seed=2).bits
    assert all(len(ends(each)) == 1 for each in asked)


def test_broken_weights_fail_requests_and_leave_nothing_behind(models):
    core = models[0].core(max_running=2)
    broken = Model(models[0].path)
    broken.weights.layers[1].qkv.fill_(float("nan"))
    core.swap(swap_to(broken, "broken"))
    failed = [ask(PROMPT, 4, rid=f"r{i}") for i in range(3)]
    run(core, *failed)
    for each in failed:
        assert each.tokens == []
        assert "not finite: the weights of version broken" in ends(each)[0].message
        assert ends(each)[0].status_code == 500
    core.swap(swap_to(models[0], "1"))
    healthy = [ask(PROMPT[: 4 + i], 6, rid=f"h{i}") for i in range(3)]
    run(core, *healthy)
    assert healthy[0].bits == lone(models[0], PROMPT[:4], 6).bits
    assert healthy[2].bits == lone(models[0], PROMPT[:6], 6).bits


# Pauses


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_after_a_pause_requests_go_on_as_if_there_had_been_none(core, models, mode):
    asked = [ask(PROMPT[i:], 20, seed=i, rid=f"r{i}") for i in range(3)]
    run(core, *asked, steps=7)
    core.pause(mode)
    late = ask([9], 3, rid="late")
    run(core, late)
    assert not core.can_step
    assert [len(each.tokens) for each in asked] == [7, 7, 7]
    assert not late.updates
    assert core.load().running == (3 if mode is PauseMode.IN_PLACE else 0)
    core.resume()
    go_on(core)
    assert len(late.tokens) == 3
    for i, each in enumerate(asked):
        assert each.bits == lone(models[0], PROMPT[i:], 20, seed=i).bits
        assert each.request.retractions == (mode is PauseMode.RETRACT)


def test_what_was_retracted_is_computed_again_from_a_flushed_cache(core, models):
    asked = ask(PROMPT, 20)
    run(core, asked, steps=7)
    core.pause(PauseMode.RETRACT)
    core.flush()
    core.resume()
    go_on(core)
    assert asked.bits == lone(models[0], PROMPT, 20).bits


def test_a_pause_by_abort_ends_everything_and_holds_what_comes(core):
    asked = [ask(PROMPT, 20, rid=f"r{i}") for i in range(3)]
    run(core, *asked, steps=5)
    core.pause(PauseMode.ABORT)
    late = ask([9], 3, rid="late")
    run(core, late)
    assert [ends(each)[0].kind for each in asked] == [FinishKind.ABORT] * 3
    assert not late.updates
    core.resume()
    go_on(core)
    assert len(late.tokens) == 3


def test_an_abort_during_a_pause_is_at_once(core):
    asked = ask(PROMPT, 20)
    run(core, asked, steps=5)
    core.pause(PauseMode.IN_PLACE)
    core.abort_all()
    go_on(core)
    assert [len(asked.tokens), ends(asked)[0].kind] == [5, FinishKind.ABORT]


# Swaps


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_a_swap_while_paused_is_at_once_and_each_token_knows_its_version(core, models, mode):
    asked = ask(PROMPT, 20, seed=4)
    run(core, asked, steps=7)
    core.pause(mode)
    paused = []
    core.swap(swap_to(models[1], "2", flush=False, done=paused.append))
    assert paused == [1]
    assert core.weight_version == "2"
    core.resume()
    go_on(core)
    assert asked.request.spans() == [VersionSpan("1", 0, 7), VersionSpan("2", 7, 20)]
    assert asked.bits[:7] == lone(models[0], PROMPT, 20, seed=4).bits[:7]
    if mode is PauseMode.RETRACT:  # then all of the cache is the new weights'
        rest = lone(models[1], PROMPT + asked.tokens[:7], 13, seed=4)
        assert asked.bits[7:] == rest.bits


def test_a_swap_that_is_not_paused_waits_for_what_came_before_and_goes_before_what_comes_after(core, models):
    before = [ask(PROMPT, 6 + i, rid=f"b{i}") for i in range(2)]
    run(core, *before, steps=2)
    told = []
    core.swap(swap_to(models[1], "2", done=told.append))
    after = ask(PROMPT, 5, rid="after")
    run(core, after, steps=3)
    assert core.weight_version == "1"
    assert not told
    assert core.load().waiting == 1
    go_on(core)
    assert told == [0]
    assert [each.request.spans() for each in before] == [[VersionSpan("1", 0, 6)], [VersionSpan("1", 0, 7)]]
    assert after.request.spans() == [VersionSpan("2", 0, 5)]
    assert after.bits == lone(models[1], PROMPT, 5).bits


def test_a_waiting_swap_is_due_when_the_engine_is_paused(core, models):
    asked = ask(PROMPT, 12)
    run(core, asked, steps=3)
    core.swap(swap_to(models[1], "2", flush=False))
    core.pause(PauseMode.IN_PLACE)
    assert core.weight_version == "2"


def test_aborting_everything_lets_a_waiting_swap_go(core, models):
    run(core, ask(PROMPT, 12), steps=3)
    core.swap(swap_to(models[1], "2"))
    core.abort_all()
    assert core.weight_version == "2"


def test_the_cache_is_not_flushed_under_requests_that_need_it(core, models):
    asked = ask(PROMPT, 12)
    run(core, asked, steps=3)
    with pytest.raises(BadRequest, match="while 1 requests need it"):
        core.flush()
    core.pause(PauseMode.IN_PLACE)
    with pytest.raises(BadRequest, match="flush_cache must be false while 1 requests are paused in place"):
        core.swap(swap_to(models[1], "2", flush=True))
    assert core.weight_version == "1"
    core.pause(PauseMode.RETRACT)
    core.flush()
    core.swap(swap_to(models[1], "2", flush=True))
    assert core.weight_version == "2"
