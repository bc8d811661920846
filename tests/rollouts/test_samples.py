"""Groups on the wire: what comes out is what went in, bit by bit, and anything else is refused."""

from __future__ import annotations

import copy
import math
import pickle

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gyre.rollouts.sample_checks import problem_with_group, problem_with_sample
from gyre.rollouts.samples import (
    WIRE_FORMAT,
    Group,
    InstanceRun,
    Sample,
    VersionRun,
    pack_groups,
    unpack_groups,
    with_score,
)
from tests.examples import examples

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), TEXT, st.binary(max_size=8)
)
ARRAYS = hnp.arrays(
    dtype=st.sampled_from(["<i4", "<i8", "<f4", "<f8", "<f2", "|u1", "|b1"]),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
FACTS = st.dictionaries(TEXT, st.one_of(SCALARS, ARRAYS, st.lists(SCALARS, max_size=3)), max_size=4)


@st.composite
def samples(draw):
    cuts = sorted(draw(st.lists(st.integers(0, 12), max_size=3)))
    length = cuts[-1] if cuts else 0
    bounds = [0, *cuts]
    versions = draw(st.lists(st.integers(0, 2**40), min_size=len(cuts), max_size=len(cuts)))
    return Sample(
        token_ids=draw(hnp.arrays(np.int32, length)),
        logprobs=draw(hnp.arrays(np.float32, length)),
        versions=tuple(
            VersionRun(version, bounds[index], bounds[index + 1]) for index, version in enumerate(versions)
        ),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        reward=draw(st.none() | st.floats()),
        extras=draw(FACTS),
        instances=tuple(
            InstanceRun(draw(TEXT), bounds[index], bounds[index + 1])
            for index in range(draw(st.integers(0, len(cuts))))
        ),
        mask=draw(st.none() | hnp.arrays(np.bool_, length)),
        rollout=draw(st.none() | st.integers(0, 2**40)),
    )


GROUPS = st.builds(
    Group,
    id=st.integers(-100, 2**50),
    prompt_ids=hnp.arrays(np.int32, st.integers(0, 6)),
    meta=FACTS,
    samples=st.lists(samples(), max_size=3),
)


def same(one, other):
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, float):
        assert math.copysign(1, one) == math.copysign(1, other)
        assert one == other or (one != one and other != other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            same(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            same(mine, theirs)
    elif isinstance(one, Group):
        same(
            [one.id, one.prompt_ids, one.meta, one.samples],
            [other.id, other.prompt_ids, other.meta, other.samples],
        )
    elif isinstance(one, Sample):
        for name in ("token_ids", "logprobs", "finish_reason", "reward", "extras", "mask", "rollout"):
            same(getattr(one, name), getattr(other, name))
        assert one.versions == other.versions
        assert one.instances == other.instances
    else:
        assert one == other
        assert type(one) is type(other)


@settings(deadline=None, max_examples=examples(80))
@given(st.lists(GROUPS, max_size=3))
def test_what_is_unpacked_is_what_was_packed(groups):
    packed = pack_groups(groups)
    found = unpack_groups(packed)
    same(groups, found)
    assert pack_groups(found) == packed


@settings(deadline=None, max_examples=examples(80))
@given(st.lists(GROUPS, max_size=3))
def test_what_is_unpickled_is_what_was_pickled(groups):
    same(groups, pickle.loads(pickle.dumps(groups, protocol=5)))
    same(groups, copy.deepcopy(groups))


def test_groups_that_were_packed_before_it_was_known_who_generated_a_token_are_read():
    sample = [ARRAY, ARRAY | {"__nd__": "<f4"}, [[0, 0, 2]], "stop", None, {}]
    (group,) = unpack_groups(msgpack.packb([WIRE_FORMAT, [group_row(samples=[sample])]]))
    assert group.samples[0].instances == ()


@pytest.mark.parametrize(
    ("instances", "problem"),
    [
        ((), ""),
        ((InstanceRun("a", 0, 1), InstanceRun("b", 1, 2)), ""),
        ((InstanceRun("a", 1, 2),), ""),  # nobody knows who generated the first
        ([InstanceRun("a", 0, 2)], "expected a tuple"),
        ((("a", 0, 2),), "expected a tuple"),
        ((InstanceRun(7, 0, 2),), "expected a name"),
        ((InstanceRun("\ud800", 0, 2),), "expected a name"),
        ((InstanceRun("a", 0, 3),), "within 2 tokens"),
        ((InstanceRun("a", 0, 2), InstanceRun("b", 1, 2)), "one after another"),
        ((InstanceRun("a", -1, 2),), "one after another"),
        ((InstanceRun("a", 1, 0),), "one after another"),
        ((InstanceRun("a", 0, 1.5),), "one after another"),
    ],
)
def test_instances_that_cannot_be_are_a_problem_of_the_group(instances, problem):
    sample = Sample(
        np.zeros(2, np.int32), np.zeros(2, np.float32), (VersionRun(0, 0, 2),), instances=instances
    )
    found = problem_with_group(Group(1, np.zeros(1, np.int32), samples=[sample]), vocabulary=9)
    assert problem in found
    assert bool(found) == bool(problem)


def test_a_group_without_masks_has_the_bytes_that_it_always_had():
    """The store has groups of earlier versions, and a manager of one may speak to a trainer of another."""
    runs = [[3, 0, 2]]
    sample = [ARRAY, ARRAY | {"__nd__": "<f4"}, runs, "stop", 0.5, {}, [["sglang-0", 0, 2]]]
    before = msgpack.packb([WIRE_FORMAT, [group_row(samples=[sample])]], use_bin_type=True)
    (group,) = unpack_groups(before)
    assert (group.samples[0].mask, group.samples[0].rollout) == (None, None)
    assert pack_groups([group]) == before


def test_a_sample_with_a_mask_counts_what_was_drawn():
    sample = Sample(
        np.arange(5, dtype=np.int32),
        np.zeros(5, np.float32),
        (VersionRun(0, 0, 2), VersionRun(1, 2, 5)),
        mask=np.array([False, False, True, False, True]),
        rollout=1,
    )
    other = Sample(np.zeros(2, np.int32), np.zeros(2, np.float32), (VersionRun(2, 0, 2),), rollout=0)
    group = Group(0, np.zeros(1, np.int32), samples=[sample, other, with_score(sample, 1.0, {})])
    assert (sample.drawn, sample.drawn_versions) == (2, [1])
    assert (group.token_count, group.positions, group.versions) == (6, 12, (1, 2))
    assert group.rollouts == [[0, 2], [1]]
    assert group.samples[2].mask is sample.mask


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match="a sample of 2 tokens came with a mask of 3"):
        Sample(
            np.zeros(2, np.int32), np.zeros(2, np.float32), (VersionRun(0, 0, 2),), mask=np.ones(3, np.bool_)
        )


def test_what_samples_have_alike_is_pickled_together():
    group = Group(0, np.zeros(1, np.int32), samples=[copy.deepcopy(GROUP.samples[0]) for _ in range(8)])
    for number, sample in enumerate(group.samples):
        sample.extras = {"values": np.full(len(sample.token_ids), number, np.float32), "level": number}
    buffers = []
    data = pickle.dumps(group, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 4  # prompt, tokens, log-probs, values
    same(group, pickle.loads(data, buffers=buffers))


def test_arrays_that_are_views_are_packed_as_they_read():
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    group = Group(0, table[:, 1], {"transposed": table.T, "scalar": np.array(5.0)})
    (found,) = unpack_groups(pack_groups([group]))
    assert found.prompt_ids.tolist() == [1, 5, 9]
    assert found.meta["transposed"].tolist() == table.T.tolist()
    assert found.meta["scalar"].shape == ()
    found.prompt_ids[0] = 7  # what is unpacked is the reader's own


def test_numpys_numbers_are_taken_as_numbers():
    """A user's reward is often a numpy scalar."""
    sample = Sample(
        np.zeros(1, np.int32), np.zeros(1, np.float32), (VersionRun(0, 0, 1),), extras={"n": np.int64(3)}
    )
    sample.reward = np.float32(0.5)
    (found,) = unpack_groups(pack_groups([Group(0, np.zeros(1, np.int32), {"m": np.bool_(True)}, [sample])]))
    assert (found.samples[0].reward, found.samples[0].extras["n"], found.meta["m"]) == (0.5, 3, True)


def test_an_array_of_objects_is_refused_when_it_is_packed():
    with pytest.raises(TypeError, match="dtype object has no wire form"):
        pack_groups([Group(0, np.zeros(1, np.int32), {"bad": np.array([{}])})])


def group_row(**changes):
    (_, (row,)) = msgpack.unpackb(pack_groups([GROUP]), raw=False)
    names = ["id", "prompt", "meta", "samples"]
    return [changes.get(name, value) for name, value in zip(names, row, strict=True)]


GROUP = Group(
    4,
    np.arange(2, dtype=np.int32),
    {"answer": "7"},
    [Sample(np.zeros(2, np.int32), np.zeros(2, np.float32), (VersionRun(1, 0, 2),))],
)
ARRAY = {"__nd__": "<i4", "shape": [2], "data": bytes(8)}


def packed_row(row):
    """A sample with `row` where its mask and the number of its rollout are."""
    sample = [ARRAY, ARRAY | {"__nd__": "<f4"}, [[0, 0, 2]], "stop", None, {}, [], row]
    return msgpack.packb([WIRE_FORMAT, [group_row(samples=[sample])]])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"not msgpack at all",
        pack_groups([GROUP])[:-3],
        pack_groups([GROUP]) + b"x",
        msgpack.packb(5),
        msgpack.packb([WIRE_FORMAT]),
        msgpack.packb([WIRE_FORMAT + 1, []]),
        msgpack.packb([WIRE_FORMAT, 5]),
        msgpack.packb([WIRE_FORMAT, [[1, 2]]]),
        msgpack.packb([WIRE_FORMAT, [group_row(meta=[])]]),
        msgpack.packb([WIRE_FORMAT, [group_row(prompt={**ARRAY, "data": bytes(7)})]]),
        msgpack.packb([WIRE_FORMAT, [group_row(prompt={**ARRAY, "shape": [3]})]]),
        msgpack.packb([WIRE_FORMAT, [group_row(prompt={**ARRAY, "__nd__": "O"})]]),
        msgpack.packb([WIRE_FORMAT, [group_row(prompt={**ARRAY, "__nd__": "nonsense"})]]),
        msgpack.packb([WIRE_FORMAT, [group_row(prompt={"data": bytes(8)})]]),
        msgpack.packb([WIRE_FORMAT, [group_row(samples=[[ARRAY, ARRAY, [[0, 0, 1]], "stop", None, {}]])]]),
        msgpack.packb([WIRE_FORMAT, [group_row(samples=[[ARRAY, ARRAY, [[0, 0]], "stop", None, {}]])]]),
        msgpack.packb([WIRE_FORMAT, [group_row(samples=[[ARRAY]])]]),
        *(packed_row(row) for row in (5, [], [None], ["x", 0], [None, "0"], [{**ARRAY}, 0], [None, 0, 1])),
    ],
    ids=range(26),
)
def test_anything_else_is_refused_with_a_value_error(data):
    with pytest.raises(ValueError):  # noqa: PT011
        unpack_groups(data)


@settings(deadline=None, max_examples=examples(60))
@given(st.binary(max_size=60), st.integers(0, 200))
def test_damaged_bytes_give_groups_or_a_value_error_and_nothing_else(noise, at):
    packed = bytearray(pack_groups([GROUP]))
    at %= len(packed)
    packed[at : at + len(noise)] = noise
    try:
        unpack_groups(bytes(packed))
    except ValueError:
        return


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ((), "cover 0 of 3 tokens"),
        ((VersionRun(0, 0, 2),), "cover 2 of 3 tokens"),
        ((VersionRun(0, 0, 2), VersionRun(1, 1, 3)), "leave a gap"),
        ((VersionRun(0, 1, 3),), "leave a gap"),
        ((VersionRun(0, 0, 2), VersionRun(1, 2, 1)), "leave a gap"),
        ((VersionRun(0, 0, 4),), "cover 4 of 3 tokens"),
    ],
)
def test_every_token_knows_its_policy(runs, message):
    with pytest.raises(ValueError, match=message):
        Sample(np.zeros(3, np.int32), np.zeros(3, np.float32), runs)


def test_every_token_has_its_logprob():
    with pytest.raises(ValueError, match="3 tokens came with 2 log-probs"):
        Sample(np.zeros(3, np.int32), np.zeros(2, np.float32), (VersionRun(0, 0, 3),))


def test_a_group_knows_its_oldest_and_newest_version():
    two = (VersionRun(4, 0, 1), VersionRun(6, 1, 2))
    sample = Sample(np.zeros(2, np.int32), np.zeros(2, np.float32), two)
    other = Sample(np.zeros(1, np.int32), np.zeros(1, np.float32), (VersionRun(5, 0, 1),))
    group = Group(0, np.zeros(1, np.int32), samples=[sample, other])
    assert (group.versions, group.token_count) == ((4, 6), 3)
    assert Group(0, np.zeros(1, np.int32)).versions is None


@pytest.mark.parametrize("data", [2**60, 2**31, [1, 2, 3, 4], "abcd", None])
def test_an_array_is_made_of_bytes_alone(data):
    """Of a number as many zeros would be made."""
    array = {"__nd__": "<i4", "shape": [1], "data": data}
    with pytest.raises(ValueError, match="not packed groups"):
        unpack_groups(msgpack.packb([1, [[1, array, {}, []]]]))


def _floats(*values, dtype=np.float32):
    return np.array(values, dtype)


CHANGES = [
    *(("token_ids", np.array(ids, np.int32)) for ids in ([0, 8], [0, 9], [-1, 3], [], [1])),
    *(("token_ids", ids) for ids in (np.array([1, 2], np.int64), _floats(1.5, 2.0), [1, 2])),
    *(("logprobs", _floats(-0.5, last)) for last in (0.0, 1e-9, 0.1, math.nan, math.inf, -math.inf)),
    *(("logprobs", values) for values in (_floats(-1.0), _floats(-0.5, 0.1, dtype=np.float64), [-1.0, -1.0])),
    *(("versions", (VersionRun(*run),)) for run in ((3, 0, 2), (4, 0, 2), (-1, 0, 2), (3, 0, 1))),
    *(("versions", runs) for runs in ((), [])),
    *(("finish_reason", reason) for reason in ("stop", "length", "abort", None)),
    *(("reward", reward) for reward in (None, 1.0, True, math.inf, math.nan, "1", np.float32(0.5), 10**400)),
    *(("extras", extras) for extras in ({}, {"values": 1.0}, {"a": math.nan}, {"a": "x"}, None, [], {1: 2})),
    *(("instances", (InstanceRun(*run),)) for run in (("a", 0, 2), ("a", 0, 3), ("\ud800", 0, 1))),
    ("instances", []),
]


@pytest.mark.parametrize(("name", "value"), CHANGES, ids=[str(at) for at in range(len(CHANGES))])
@pytest.mark.parametrize(("vocabulary", "newest"), [(None, None), (9, 3)])
def test_samples_that_are_looked_at_together_have_the_problems_that_each_has(name, value, vocabulary, newest):
    right = Sample(np.array([1, 8], np.int32), np.array([-0.1, 0.0], np.float32), (VersionRun(3, 0, 2),))
    changed = copy.copy(right)
    setattr(changed, name, value)
    known = {"vocabulary": vocabulary, "newest": newest}
    assert problem_with_sample(right, **known) == ""
    problem = problem_with_sample(changed, **known)
    found = problem_with_group(Group(7, right.token_ids, samples=[right, changed]), **known)
    assert found == (f"sample 1 of group 7 has {problem}" if problem else "")


def test_rows_that_begin_differently_cannot_be_trained() -> None:
    sample = Sample(np.array([1], np.int32), np.array([-1.0], np.float32), (VersionRun(0, 0, 1),), reward=1.0)
    group = Group(7, np.array([5], np.int32), {}, [sample])
    assert problem_with_group(group, vocabulary=None) == ""
    group.prompt_ids = np.zeros(0, np.int32)
    assert (
        problem_with_group(group, vocabulary=None)
        == "group 7 has no token with which all of its samples begin"
    )
