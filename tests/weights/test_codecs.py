"""Whatever the bytes, decoding gives them back; whatever came, decoding writes a chunk or refuses."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.weights.codecs import CODECS, decode, encode, round_fp8
from gyre.weights.manifest import WeightMismatch

words = st.sampled_from([2, 4])
blobs = st.binary(max_size=4000)


def there_and_back(codec, raw, *, word, base=None):
    into = bytearray(b"\xee" * len(raw))
    data = encode(codec, raw, word=word, base=base)
    decode(codec, data, memoryview(into), word=word, base=base)
    return bytes(into), data


def bf16(values):
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


@given(raw=blobs, word=words, codec=st.sampled_from(["none", "planes", "fp8"]))
def test_any_bytes_survive(raw, word, codec):
    assert there_and_back(codec, raw, word=word)[0] == raw


@given(base=blobs, word=words, data=st.data())
def test_any_two_versions_survive_a_delta(base, word, data):
    new = bytearray(base)
    for at in data.draw(st.lists(st.integers(0, max(0, len(base) - 1)), max_size=40)):
        if new:
            new[at] = data.draw(st.integers(0, 255))
    assert there_and_back("delta", bytes(new), word=word, base=base)[0] == bytes(new)


@pytest.mark.parametrize("gap", [0, 1, 65533, 65534, 65535, 65536, 131069, 131070, 131071, 300_000])
def test_gaps_of_any_width(gap):
    base = np.zeros(400_000, np.uint16)
    new = base.copy()
    new[3] = 7
    new[min(len(new) - 1, 4 + gap)] = 9
    assert there_and_back("delta", new.tobytes(), word=2, base=base.tobytes())[0] == new.tobytes()


@given(damage=st.data(), codec=st.sampled_from(["planes", "delta", "fp8"]))
@settings(max_examples=200)
def test_what_came_damaged_is_refused_or_harmless(damage, codec):
    generator = np.random.default_rng(0)
    base = generator.integers(0, 2**16, 700, np.uint16)
    new = base.copy()
    new[::50] += 1
    data = bytearray(encode(codec, new.tobytes(), word=2, base=base.tobytes()))
    for _ in range(damage.draw(st.integers(1, 5))):
        data[damage.draw(st.integers(0, len(data) - 1))] = damage.draw(st.integers(0, 255))
    del data[damage.draw(st.integers(0, len(data))) :]
    guarded = bytearray(1400 + 64)
    into = memoryview(guarded)[:1400]
    with contextlib.suppress(WeightMismatch):
        decode(codec, data, into, word=2, base=base.tobytes())
    assert guarded[1400:] == bytes(64)


def test_a_claim_of_terabytes_is_refused():
    import struct

    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    data = struct.pack("<B3Q", 3, len(bomb), len(bomb), 0) + bomb + bomb
    with pytest.raises(WeightMismatch):
        decode("planes", data, memoryview(bytearray(64)), word=2)


@pytest.mark.parametrize("codec", ["unknown", "", "delta"])
def test_what_cannot_be_decoded_is_named(codec):
    with pytest.raises(WeightMismatch):
        decode(codec, b"", memoryview(bytearray(4)), word=2)


def update(size=200_000, changed=0.01):
    generator = np.random.default_rng(1)
    old = generator.normal(0, 0.02, size).astype(np.float32)
    new = old + np.where(generator.random(size) < changed, 2.0**-12, 0).astype(np.float32)
    return bf16(old), bf16(new)


def test_a_delta_of_one_percent_is_small():
    old, new = update()
    restored, data = there_and_back("delta", new, word=2, base=old)
    assert restored == new
    assert len(data) < 0.025 * len(new)


def test_byte_planes_of_weights_save_a_quarter():
    _, new = update()
    assert len(encode("planes", new, word=2)) < 0.75 * len(new)


def test_a_delta_applied_to_what_is_there_already_gives_the_same():
    old, new = update(2000)
    data = encode("delta", new, word=2, base=old)
    into = bytearray(len(new))
    decode("delta", data, memoryview(into), word=2, base=new)
    assert bytes(into) == new


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=400))
def test_rounding_to_fp8_is_within_its_precision_and_a_second_time_changes_nothing(values):
    values = np.array(values, np.float32)
    once = round_fp8(values)
    assert np.array_equal(round_fp8(once), once)
    for at in range(0, len(values), 128):
        block, rounded = values[at : at + 128], once[at : at + 128]
        assert np.all(
            np.abs(block - rounded) <= np.maximum(np.abs(block) / 16, np.abs(block).max() / 2**14) + 2.0**-105
        )


def test_rounded_weights_are_half_as_large_and_not_changed_again():
    generator = np.random.default_rng(2)
    rounded = bf16(round_fp8(generator.normal(0, 0.02, 128 * 500).astype(np.float32)))
    restored, data = there_and_back("fp8", rounded, word=2)
    assert restored == rounded
    assert len(data) < 0.55 * len(rounded)


def test_every_codec_is_tested_here():
    assert set(CODECS) == {"none", "planes", "delta", "fp8"}
