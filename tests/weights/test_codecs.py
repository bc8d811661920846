"""Whatever the bytes, decoding gives them back; whatever came, decoding writes a chunk or refuses."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.weights.codecs.encoding import CODECS, chain, decode, encode
from gyre.weights.codecs.fp8 import is_rounded, round_fp8
from gyre.weights.version.manifest import WeightMismatch
from tests.examples import examples

unhurried = settings(deadline=None)
"""The machine may be busy with others."""

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
@unhurried
def test_any_bytes_survive(raw, word, codec):
    assert there_and_back(codec, raw, word=word)[0] == raw


@given(base=blobs, word=words, data=st.data())
@unhurried
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
@settings(max_examples=examples(200), deadline=None)
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


def changes(base, *, seed, part):
    """`base` with a part of its words changed."""
    generator = np.random.default_rng(seed)
    words = np.frombuffer(base[: len(base) // 2 * 2], np.uint16).copy()
    words[generator.random(len(words)) < part] += 1
    return words.tobytes() + bytes(base[len(base) // 2 * 2 :])


@given(base=blobs, parts=st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=5), word=words)
@unhurried
def test_deltas_that_follow_on_each_other_are_one(base, parts, word):
    versions = [base]
    for seed, part in enumerate(parts):
        versions.append(changes(versions[-1], seed=seed, part=part))
    steps = [encode("delta", new, word=word, base=old) for old, new in itertools.pairwise(versions)]
    into = bytearray(len(base))
    decode("delta", chain([chain(steps[:2]), *steps[2:]]), memoryview(into), word=word, base=base)
    assert bytes(into) == versions[-1]
    assert chain(steps[:1]) == steps[0]


@pytest.mark.parametrize(("steps", "is_one"), [(255, True), (256, False)])
def test_more_steps_than_a_frame_has_parts_are_no_delta(steps, is_one):
    """They may have gone from relay to relay, each of which added one."""
    old, new = b"\1\2" * 100, b"\1\3" * 100
    one = encode("delta", new, word=2, base=old)
    first = chain([one] * 200)
    found = chain([first, *[one] * (steps - 200)])
    assert (found is not None) == is_one
    if found is not None:
        into = bytearray(len(old))
        decode("delta", found, memoryview(into), word=2, base=old)
        assert bytes(into) == new


def test_a_chain_over_another_base_is_not_what_it_should_be():
    """Which is why what comes out is compared with its checksum."""
    old, new = update(2000)
    other = changes(old, seed=3, part=0.5)
    into = bytearray(len(old))
    decode("delta", encode("delta", new, word=2, base=old), memoryview(into), word=2, base=other)
    assert bytes(into) != new


# -- fp8 ---------------------------------------------------------------------------------------------------


def e4m3():
    """Every value of the format, from its definition."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=400), st.integers(-60, 30))
@unhurried
def test_rounding_to_fp8_gives_the_nearest_there_is_and_a_second_time_changes_nothing(values, power):
    values = np.ldexp(np.array(values, np.float32), power)
    once = round_fp8(torch.from_numpy(values)).numpy()
    assert np.array_equal(round_fp8(torch.from_numpy(once)).numpy(), once)
    assert np.array_equal(once.view(np.uint32) & 0xFFFF, np.zeros(len(once)))  # bfloat16 holds it
    for at in range(0, len(values), 128):
        block, rounded = values[at : at + 128].astype(np.float64), once[at : at + 128]
        largest = np.abs(block).max()
        if largest < 2.0**-90:
            continue
        scale = 2.0 ** np.ceil(np.log2(largest / 448))
        grid = np.concatenate([-e4m3()[::-1], e4m3()]) * scale
        best = np.abs(grid[None, :] - block[:, None]).min(axis=1)
        assert np.array_equal(np.abs(rounded - block), best)
        assert np.all(np.abs(block - rounded) <= np.maximum(np.abs(block) / 16, largest / 2**17))


def test_torch_rounds_the_same():
    blocks = torch.randn(500, 128, generator=torch.Generator().manual_seed(0))
    scale = torch.pow(2.0, torch.ceil(torch.log2(blocks.abs().amax(dim=1, keepdim=True) / 448)))
    theirs = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(round_fp8(blocks), theirs)


def test_a_block_that_is_not_finite_stays_as_it_is():
    values = torch.randn(3 * 128)
    values[130] = float("inf")
    values[300] = float("nan")
    rounded = round_fp8(values)
    assert torch.equal(rounded[128:256], values[128:256])
    assert torch.equal(torch.isnan(rounded), torch.isnan(values))
    assert not torch.equal(rounded[:128], values[:128])


def test_rounded_weights_are_half_as_large_and_not_changed_again():
    generator = np.random.default_rng(2)
    values = torch.from_numpy(generator.normal(0, 0.02, 128 * 500).astype(np.float32))
    values[1000:2000] *= 2.0**-20  # much smaller than the rest of their blocks, and than the smallest code
    values[5000:5128] = 0
    rounded = bf16(round_fp8(values).numpy())
    restored, data = there_and_back("fp8", rounded, word=2)
    assert restored == rounded
    assert len(data) < 0.55 * len(rounded)


@pytest.mark.parametrize(
    ("name", "shape", "rounded"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.gate_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (8, 64, 64), True),
        ("model.layers.0.mlp.gate.weight", (8, 64), False),
        ("model.embed_tokens.weight", (100, 64), False),
        ("lm_head.weight", (100, 64), False),
        ("model.norm.weight", (64,), False),
    ],
)
def test_which_tensors_are_rounded(name, shape, rounded):
    assert is_rounded(name, shape) is rounded


def test_every_codec_is_tested_here():
    assert set(CODECS) == {"none", "planes", "delta", "fp8"}
