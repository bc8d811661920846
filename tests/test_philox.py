"""Random numbers by where they are used: the published known answers, elementwise, in range."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gyre.philox import philox4x32, uniforms, word, words


def test_philox_gives_the_published_known_answers():
    def run(counter, key):
        return [int(w[0]) for w in philox4x32(tuple(np.array([c], dtype=np.uint64) for c in counter), key)]

    assert run((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert run(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_uniforms_are_elementwise_and_in_range():
    many = uniforms(5, 16, np.arange(1000), 2, 3)
    assert many[17] == uniforms(5, 16, 17, 2, 3)
    assert ((many >= 0) & (many < 1)).all()
    assert abs(many.mean() - 0.5) < 0.05
    assert uniforms(5, 16, -1, 0, 0) != uniforms(5, 16, 1, 0, 0)


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**16),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)
def test_one_word_is_that_of_many(seed: int, stream: int, a: int, b: int, c: int):
    assert word(seed, stream, a, b, c) == int(words(seed, stream, a, b, c))
