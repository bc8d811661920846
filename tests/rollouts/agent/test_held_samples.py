"""Which version made which tokens of what an agent has: counted where the engine counts, else by labels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.engines.dialect import StreamChunk
from gyre.rollouts.agent.held_samples import HeldSample, engine_request
from gyre.rollouts.protocol.fields import FrameError


def held(serves: int = 3, counted: bool = True) -> HeldSample:
    empty = np.empty(0, np.int32)
    sample = HeldSample(1, 0, 1, empty, empty, {}, 1, seen=serves, rid="mine")
    sample.asked(serves if counted else -1)
    return sample


def take(sample: HeldSample, count: int, label: int) -> None:
    sample.take(StreamChunk(np.zeros(count, np.int32), np.zeros(count, np.float32), str(label)), served=label)


def made(sample: HeldSample) -> list[int]:
    """The version of each token."""
    return [version for version, count in sample.runs for _ in range(count)]


def test_the_engine_is_asked_to_go_on_after_the_last_token_that_is_there() -> None:
    """Those that came with the sample, and those that this agent's engine made before its request broke."""
    sample = HeldSample(
        key=1,
        row=0,
        lease=1,
        prompt=np.array([1, 2, 3], np.int32),
        prior=np.array([7, 8], np.int32),
        sampling={"max_new_tokens": 10},
        seed=5,
    )
    sample.take(StreamChunk(np.array([9], np.int32), np.zeros(1, np.float32), "3"), served=3)
    request = engine_request(sample)
    assert request.input_ids.tolist() == [1, 2, 3, 7, 8, 9]
    assert request.sampling.max_new_tokens == 7
    assert request.sampling.sampling_seed == 5


def test_no_key_of_its_sampling_vanishes_on_the_way_to_the_engine() -> None:
    sample = held()
    sample.sampling = {"max_new_tokens": 10, "top_p": 0.5, "min_p": 0.25, "top_k": 3, "ignore_eos": True}
    said = engine_request(sample).sampling
    assert (said.top_p, said.min_p, said.top_k, said.ignore_eos) == (0.5, 0.25, 3, True)
    sample.sampling["repetition_penalty"] = 1.1
    with pytest.raises(FrameError, match=r"sampling\.repetition_penalty: no engine"):
        engine_request(sample)


def test_tokens_that_waited_to_be_sent_are_the_older_versions_whatever_their_label() -> None:
    """The engine's HTTP side lags: three chunks of before the pause are labelled as of after it."""
    sample = held()
    take(sample, 8, 3)
    sample.changed(4, {"mine": 30})
    for _ in range(4):
        take(sample, 8, 4)
    assert made(sample) == [3] * 30 + [4] * 10


def test_without_counts_only_the_first_chunk_of_a_label_is_called_older() -> None:
    sample = held(counted=False)
    sample.changed(4, {"mine": 30})
    take(sample, 8, 3)
    take(sample, 8, 4)
    take(sample, 8, 4)
    assert made(sample) == [3] * 16 + [4] * 8


@pytest.mark.parametrize(
    ("counts", "label", "wanted"),
    [
        ({"mine": 0}, 4, 4),  # it waits in the engine's queue
        ({"other": 5}, 4, 3),  # it is not there yet, or no more: by label, the first chunk is the older's
        (None, 4, 3),  # the engine does not count
    ],
)
def test_a_sample_without_tokens_at_the_change(
    counts: Mapping[str, int] | None, label: int, wanted: int
) -> None:
    sample = held()
    sample.changed(4, counts)
    take(sample, 2, label)
    take(sample, 2, label)
    assert made(sample) == [wanted, wanted, 4, 4]


def test_what_the_engine_had_ended_was_made_before() -> None:
    sample = held()
    take(sample, 8, 3)
    sample.changed(4, {"other": 5})
    for _ in range(3):
        take(sample, 8, 4)
    assert set(made(sample)) == {3}


def test_what_is_asked_for_anew_is_made_by_what_is_served_then() -> None:
    sample = held()
    take(sample, 5, 3)
    sample.changed(4, {"mine": 7})
    sample.asked(4)  # its request broke
    sample.changed(5, {"mine": 2})
    take(sample, 6, 5)
    assert made(sample) == [3] * 5 + [4] * 2 + [5] * 4


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    changes=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 9)), max_size=4),
)
def test_no_token_is_called_newer_than_it_is(lengths: list[int], changes: list[tuple[int, int]]) -> None:
    """Chunks that come later than they were made, by up to what a change says was made and did not come."""
    sample, version, truth = held(0), 0, []
    bounds: list[int] = []
    ahead = dict(changes)
    for turn, length in enumerate(lengths):
        if turn in ahead:
            version += 1
            bounds.append(sample.made + ahead[turn])
            sample.changed(version, {"mine": bounds[-1]})
        take(sample, length, version)
    for token in range(sample.made):
        truth.append(sum(1 for at, bound in enumerate(bounds) if max(bounds[: at + 1]) <= token))
    assert made(sample) == truth
    assert sum(count for _, count in sample.runs) == sample.made == sum(lengths)
