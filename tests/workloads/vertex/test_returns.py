"""What is said of a method's result: it is accepted as the protocols' types, or refused with what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyre.errors import UserCodeError
from gyre.rollouts.samples import Group, Sample, VersionRun, pack_groups, unpack_groups
from gyre.workloads.vertex.returns import EVALUATE, Expected, Given, checked

SCORE = Expected("score", vocabulary=10, rewards=True)
GENERATE = Expected("generate", vocabulary=10, newest=4, samples=2)


def sample(count: int = 3, **changes: Any) -> Sample:
    made = Sample(
        np.arange(count, dtype=np.int32),
        np.full(count, -0.5, np.float32),
        (VersionRun(4, 0, count),),
    )
    for name, value in changes.items():
        setattr(made, name, value)  # as a user's code does, past the constructor's checks
    return made


def prompts(samples: int = 0) -> list[Group]:
    return [Group(at, np.array([1, at], np.int32), {}, [sample() for _ in range(samples)]) for at in (3, 4)]


class Mine:
    def method(self) -> None:
        """Stands for a method of a user's class."""


def result_of(expected: Expected, before: list[Group], change: Callable[[list[Group]], Any]) -> Any:
    seen = Given.of(before)
    return checked(expected, seen, change(before), Mine().method)


def scored(reward: Any) -> Callable[[list[Group]], list[Group]]:
    def change(groups: list[Group]) -> list[Group]:
        for group in groups:
            for one in group.samples:
                one.reward = reward
        return groups

    return change


def generated(*samples: Any) -> Callable[[list[Group]], list[Group]]:
    def change(groups: list[Group]) -> list[Group]:
        return [Group(one.id, one.prompt_ids, one.meta, list(samples)) for one in groups]

    return change


@pytest.mark.parametrize(
    ("reward", "becomes"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (np.array([0.5]), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([[2]]), 2.0),
        (Fraction(1, 2), 0.5),
    ],
)
def test_a_reward_that_is_a_number_becomes_a_float(reward: Any, becomes: float) -> None:
    for group in result_of(SCORE, prompts(2), scored(reward)):
        assert [(one.reward, type(one.reward)) for one in group.samples] == [(becomes, float)] * 2


@pytest.mark.parametrize(
    "reward",
    [
        None,
        "1.0",
        b"1",
        math.nan,
        math.inf,
        -math.inf,
        1j,
        [1.0],
        {"score": 1.0},
        Decimal("NaN"),
        np.array([1.0, 2.0]),
        np.array([]),
        np.float32("nan"),
        np.complex64(1),
        np.datetime64("2020-01-01"),
        torch.tensor([1.0, 2.0]),
        torch.tensor(math.nan),
        10**400,
        1e300,
    ],
    ids=repr,
)
def test_a_reward_that_is_no_finite_real_number_is_refused_by_the_methods_name(reward: Any) -> None:
    with pytest.raises(UserCodeError) as refused:
        result_of(SCORE, prompts(2), scored(reward))
    said = refused.value.message
    assert said.startswith("tests.workloads.vertex.test_returns:Mine.method (test_returns.py:")
    assert "(sample 0 of group 3)" in said
    assert "finite real number" in said
    assert refused.value.details["place"].startswith("test_returns.py:")


def another_prompt(groups: list[Group]) -> list[Group]:
    groups[0].prompt_ids = np.array([9], np.int32)
    return groups


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda groups: None, "returned None, expected the list of groups"),
        (lambda groups: {"groups": groups}, "expected the list of groups"),
        (lambda groups: groups[:1], "expected those that it was given"),
        (lambda groups: groups[::-1], "expected those that it was given"),
        (lambda groups: [*groups, groups[0]], "expected those that it was given"),
        (lambda groups: [group.samples for group in groups], "expected the list of groups"),
        (another_prompt, "another prompt"),
    ],
)
def test_other_groups_than_were_given_are_refused(change: Any, said: str) -> None:
    before = prompts(2)
    scored(1.0)(before)
    with pytest.raises(UserCodeError, match=said):
        result_of(SCORE, before, change)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"token_ids": np.array([0, 10, 1], np.int32)},
            "token id 10, expected ids of the vocabulary, 0 to 9",
        ),
        ({"token_ids": np.array([0, -1, 1], np.int32)}, "token id -1"),
        ({"token_ids": np.array([0, 2**31 - 1, 1], np.int32)}, "token id 2147483647"),
        ({"token_ids": np.array([0, 2**40, 1])}, f"token id {2**40}"),
        ({"token_ids": np.array([0.0, 1.0, 2.0])}, "expected an int32 array"),
        ({"token_ids": "abc"}, "expected an int32 array"),
        ({"token_ids": None}, "expected an int32 array"),
        ({"token_ids": np.zeros((1, 3), np.int32)}, "expected an int32 array"),
        ({"token_ids": np.zeros(0, np.int32)}, "3 log-probs for 0 tokens"),
        ({"logprobs": np.full(2, -0.5, np.float32)}, "2 log-probs for 3 tokens"),
        ({"logprobs": np.array([0.0, math.nan, 0.0], np.float32)}, "log-prob of nan"),
        ({"logprobs": np.array([0.0, -math.inf, 0.0], np.float32)}, "log-prob of -inf"),
        ({"logprobs": np.array([0.0, 0.7, 0.0], np.float32)}, "log-prob of 0.7"),
        ({"logprobs": None}, "expected a float32 array"),
        ({"versions": (VersionRun(4, 0, 2),)}, "cover 2 of 3 tokens"),
        ({"versions": (VersionRun(4, 1, 3),)}, "gap at token 0"),
        ({"versions": (VersionRun(5, 0, 3),)}, "policy version 5, expected a version that exists: 0 to 4"),
        ({"versions": (VersionRun(-1, 0, 3),)}, "policy version -1"),
        ({"versions": ((4, 0, 3),)}, "expected a tuple of VersionRun"),
        ({"versions": None}, "expected a tuple of VersionRun"),
        ({"versions": (VersionRun("4", 0, 3),)}, "expected three integers"),  # type: ignore[arg-type]
        ({"mask": [False, False, False]}, "no token was drawn"),
        ({"mask": np.array([True, True, False])}, "which by the mask was not drawn, expected 0"),
        ({"mask": [1.0, 0.0, 1.0]}, "expected a bool array of 3 elements"),
        ({"finish_reason": "eos"}, "finish_reason 'eos', expected one of stop, length"),
        ({"finish_reason": None}, "finish_reason None"),
        ({"reward": math.nan}, "finite real number"),
        ({"extras": None}, "extras that are None"),
        ({"extras": {1: 2}}, "names as keys"),
        ({"extras": {"x": math.nan}}, "finite number"),
        ({"extras": {"x": object()}}, "expected a number, a text or a numpy array"),
        ({"extras": {"x": np.array([math.inf])}}, "finite numbers"),
        ({"extras": {"x": np.array([object()])}}, "array of numbers or texts"),
        ({"extras": {"values": np.zeros(2, np.float32)}}, "a float32 array of 3 elements"),
        ({"extras": {"ref_logprobs": np.array([0, 1.0, 0], np.float32)}}, "at most 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_generated_sample_that_cannot_be_trained_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserCodeError) as refused:
        result_of(GENERATE, prompts(), generated(sample(), sample(**changes)))
    assert said in refused.value.message
    assert "sample 1 of group 3" in refused.value.message


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([], "0 samples of group 3, expected 2 (config.sampling.n)"),
        ([sample()], "1 samples of group 3, expected 2 (config.sampling.n)"),
        ([sample(), "text"], "expected a Sample"),
        ([sample(), sample(0)], "no tokens, expected at least one"),
        ([sample(), None], "expected a Sample"),
    ],
)
def test_as_many_samples_as_were_asked_for(made: list[Any], said: str) -> None:
    with pytest.raises(UserCodeError) as refused:
        result_of(GENERATE, prompts(), generated(*made))
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((0, 1, 1), ""),
        ((0, 0), "1 rollouts of group 3, expected 2 (config.sampling.n)"),
        ((0, 1, 2, 0), "3 rollouts of group 3, expected 2 (config.sampling.n)"),
        ((0, None), "sample 1 that is a row of rollout None"),
    ],
)
def test_a_group_may_have_more_rows_than_rollouts(rows: tuple[int | None, ...], said: str) -> None:
    mask = torch.tensor([False, True, True])
    made = [sample(rollout=at, mask=mask, logprobs=[0.0, -0.5, -0.5]) for at in rows]
    if not said:
        (group, _) = result_of(GENERATE, prompts(), generated(*made))
        assert all(one.mask.tolist() == [False, True, True] for one in group.samples)
        return
    with pytest.raises(UserCodeError) as refused:
        result_of(GENERATE, prompts(), generated(*made))
    assert said in refused.value.message


def test_lists_tensors_and_other_widths_become_the_protocols_arrays() -> None:
    given_as = [
        sample(token_ids=[0, 1, 2], logprobs=[-0.5, 0.0, -1.0]),
        sample(
            token_ids=torch.tensor([0, 1, 2]), logprobs=torch.tensor([-0.5, 0.0, -1.0], dtype=torch.bfloat16)
        ),
    ]
    (group, _) = result_of(GENERATE, prompts(), generated(*given_as))
    for one in group.samples:
        assert (one.token_ids.dtype, one.token_ids.tolist()) == (np.int32, [0, 1, 2])
        assert (one.logprobs.dtype, one.logprobs.tolist()) == (np.float32, [-0.5, 0.0, -1.0])


@pytest.mark.parametrize(
    ("extras", "said"),
    [
        ({}, "no extras['ref_logprobs']"),
        ({"ref_logprobs": np.zeros(2, np.float32)}, "a float32 array of 3 elements"),
        ({"ref_logprobs": np.array([0, math.nan, 0], np.float32)}, "finite numbers"),
        ({"ref_logprobs": "no"}, "a float32 array of 3 elements"),
        ({"ref_logprobs": None}, "a float32 array of 3 elements"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_operator_adds_has_the_samples_length(extras: dict[str, Any], said: str) -> None:
    def add(groups: list[Group]) -> list[Group]:
        for group in groups:
            for one in group.samples:
                one.extras = extras
        return groups

    with pytest.raises(UserCodeError) as refused:
        result_of(Expected("logprobs", extras=("ref_logprobs",)), prompts(2), add)
    assert said in refused.value.message


MANIFEST = {"version": 1, "step": 1, "checksum": "c", "size_bytes": 2}


@pytest.mark.parametrize(
    ("method", "value"),
    [
        (EVALUATE, None),
        (EVALUATE, 0.5),
        (EVALUATE, {"version": 1, "count": 2, "accuracy": "good"}),
        (EVALUATE, {"version": 1, "count": 2, "accuracy": math.nan}),
        (EVALUATE, {"version": None, "count": 2, "accuracy": 0.5}),
        (EVALUATE, {"version": 1, "accuracy": 0.5}),
        ("apply", None),
        ("apply", [("loss", 1.0)]),
        ("apply", 0.5),
        ("begin", 4),
        ("accumulate", "done"),
        ("warm_start", 3),
        ("state", None),
        ("state", {"step": "1", "digest": "d"}),
        ("state", {"step": 1}),
        ("export_weights", None),
        ("export_weights", MANIFEST),
        ("export_weights", (MANIFEST, "text")),
        ("export_weights", ({**MANIFEST, "checksum": 5}, b"")),
        ("export_weights", ({**MANIFEST, "version": "1"}, b"")),
        ("export_weights", ({**MANIFEST, "of": object()}, b"")),
        ("publish_model", "v1"),
        ("publish_model", {"version": 1}),
        ("model_published", None),
    ],
)
def test_what_a_learner_returns_is_what_its_protocol_says(method: str, value: Any) -> None:
    with pytest.raises(UserCodeError, match="expected"):
        checked(Expected(method), None, value, Mine().method)


@pytest.mark.parametrize(
    ("method", "value"),
    [
        (EVALUATE, {"version": np.int64(1), "count": 2, "accuracy": np.float32(0.5)}),
        (EVALUATE, {"version": 1, "count": 2, "accuracy": None, "reward_mean": 0.25}),
        ("apply", {"loss": math.nan, "note": "of the user's"}),
        ("begin", None),
        ("warm_start", {}),
        ("state", {"step": -1, "digest": ""}),
        ("export_weights", (MANIFEST, b"12")),
        ("publish_model", None),
        ("publish_model", {**MANIFEST, "source": "h:1", "path": "/p", "model": "m"}),
        ("of_the_users", object()),
    ],
)
def test_what_a_protocol_permits_comes_back_as_it_is(method: str, value: Any) -> None:
    assert checked(Expected(method), None, value, Mine().method) is value


@pytest.mark.parametrize(
    ("method", "value"), [("export_weights", (MANIFEST, b"12")), ("publish_model", MANIFEST)]
)
def test_a_policy_has_the_version_that_was_asked_for(method: str, value: Any) -> None:
    assert checked(Expected(method), None, value, Mine().method, version=1) is value
    with pytest.raises(UserCodeError, match="returned policy version 1, expected 2"):
        checked(Expected(method), None, value, Mine().method, version=2)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.complex_numbers()
    | st.floats(width=32).map(np.float32)
    | st.lists(st.floats(), max_size=3).map(np.array),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(reward=ANYTHING, extra=ANYTHING, logprobs=ANYTHING)
def test_whatever_is_returned_it_is_refused_in_words_or_goes_into_the_ledger(
    reward: Any, extra: Any, logprobs: Any
) -> None:
    made = sample(reward=reward, extras={"x": extra}, logprobs=logprobs)
    try:
        groups = result_of(
            Expected("generate", vocabulary=10, newest=4, samples=1, rewards=True), prompts(), generated(made)
        )
    except UserCodeError:
        return
    for group in unpack_groups(pack_groups(groups)):
        (back,) = group.samples
        assert back.reward is not None
        assert math.isfinite(back.reward)
        assert np.isfinite(back.logprobs).all()
