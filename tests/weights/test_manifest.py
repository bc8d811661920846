"""Weights are packed to exact bytes, and nothing is read from a buffer that is not its manifest's."""

from __future__ import annotations

import dataclasses
import json
import pickle
import tracemalloc

import pytest
import safetensors.torch
import torch

from gyre.errors import GyreError
from gyre.weights import TensorSpec, WeightManifest, WeightMismatch, pack_weights, unpack_weights, verify
from gyre.weights.version.arena import is_folder, read_manifest
from gyre.weights.version.manifest import CHUNK_BYTES, checksum_of_read, checksum_of_weights
from gyre.weights.version.model_folder import fingerprint, same_config


def state():
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(4, 3, generator=generator)
    return {
        "b.weight": shared,
        "a.bias": torch.randn(5, generator=generator).to(torch.bfloat16),
        "head": shared,
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 2),
        "strided": torch.randn(6, 4, generator=generator).T,
    }


def test_unpacking_gives_back_the_same_bits():
    original = state()
    manifest, buffer = pack_weights(original, version=7, step=5, base=6)
    found = unpack_weights(manifest, buffer)
    assert list(found) == sorted(original)
    for name, tensor in original.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert (manifest.version, manifest.step, manifest.base) == (7, 5, 6)
    assert manifest.size_bytes == len(buffer)


def test_tied_tensors_take_their_bytes_once():
    manifest, _ = pack_weights(state(), version=0, step=0)
    offsets = {spec.name: spec.offset for spec in manifest.tensors}
    assert offsets["head"] == offsets["b.weight"]


def test_equal_weights_have_equal_checksums_whatever_their_order():
    forward, backward = state(), dict(reversed(list(state().items())))
    assert pack_weights(forward, version=0, step=0)[0] == pack_weights(backward, version=0, step=0)[0]


def test_a_manifest_survives_json():
    manifest, _ = pack_weights(state(), version=1, step=1)
    assert WeightManifest.from_dict(json.loads(json.dumps(manifest.to_dict()))) == manifest


@pytest.mark.parametrize("damage", [{"step": 1}, {"tensors": [{"name": "x"}]}, {"surplus": 1}])
def test_what_is_not_a_manifest_is_refused(damage):
    plain = pack_weights(state(), version=1, step=1)[0].to_dict()
    plain = {**plain, **damage} if damage.keys() != {"step"} else damage
    with pytest.raises(WeightMismatch, match="not a weight manifest"):
        WeightManifest.from_dict(plain)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float13"},
        {"dtype": ["float32"]},
        {"shape": [-1, 3]},
        {"shape": [4, 4]},
        {"nbytes": 1 << 62},
        {"offset": 1 << 40},
        {"offset": "0"},
        {"offset": -8},
    ],
    ids=str,
)
def test_a_tensor_that_cannot_be_is_no_manifest(change):
    manifest, _ = pack_weights({"w": torch.zeros(4, 3)}, version=1, step=1)
    plain = manifest.to_dict()
    plain["tensors"][0].update(change)
    with pytest.raises(WeightMismatch, match="not a weight manifest"):
        WeightManifest.from_dict(plain)


@pytest.mark.parametrize("what", ["digests", "sizes", "chunk_bytes"])
def test_a_manifest_proves_itself_by_its_checksum(what):
    """Whoever asks a stranger for the manifest of a checksum believes nobody: bytes, sizes and cuts are in it."""
    plain = pack_weights(state(), version=3, step=4)[0].to_dict()
    assert WeightManifest.from_dict(plain).checksum == plain["checksum"]
    if what == "digests":
        plain["digests"] = ["0" * 16, *plain["digests"][1:]]
    elif what == "sizes":
        plain["files"] = [{**file, "size_bytes": file["size_bytes"] + 8} for file in plain["files"]]
    else:
        plain["chunk_bytes"] *= 2
    with pytest.raises(WeightMismatch, match="the manifest of version 3 does not have its own checksum"):
        WeightManifest.from_dict(plain)


def test_every_flipped_bit_is_noticed():
    manifest, buffer = pack_weights(state(), version=1, step=1)
    for position in range(0, len(buffer), 7):
        damaged = bytearray(buffer)
        damaged[position] ^= 1
        with pytest.raises(WeightMismatch, match="damaged"):
            verify(manifest, damaged)


@pytest.mark.parametrize("cut", [slice(0, -1), slice(0, 0)])
def test_a_short_buffer_is_noticed(cut):
    manifest, buffer = pack_weights(state(), version=1, step=1)
    with pytest.raises(WeightMismatch, match="bytes"):
        unpack_weights(manifest, buffer[cut])


@pytest.mark.parametrize(
    "change", [{"offset": 10**6}, {"offset": -16}, {"dtype": "float"}, {"dtype": "load"}, {"shape": (99,)}]
)
def test_a_manifest_that_lies_about_a_tensor_is_noticed(change):
    manifest, buffer = pack_weights({"x": torch.ones(4, dtype=torch.float64)}, version=1, step=1)
    spec = dataclasses.replace(manifest.tensors[0], **change)
    with pytest.raises(WeightMismatch):
        unpack_weights(dataclasses.replace(manifest, tensors=(spec,)), buffer)


def test_the_error_is_gyres_and_pickles():
    error = pickle.loads(pickle.dumps(WeightMismatch("no.", hint="Again.")))
    assert isinstance(error, GyreError)
    assert (error.code, str(error)) == ("weights.mismatch", "no. Again.")


def test_a_spec_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TensorSpec("x", (1,), "float32", 0, 4).offset = 1  # type: ignore[misc]


def test_the_bytes_are_a_safetensors_file_and_tensors_are_aligned():
    import safetensors.torch

    large = {f"layer.{i}": torch.randn(64, 32).to(torch.bfloat16) for i in range(3)}
    manifest, buffer = pack_weights({**state(), **large}, version=1, step=1)
    found = safetensors.torch.load(buffer)
    assert set(found) == set(state()) - {"head"} | set(large)
    assert all(torch.equal(found[name], tensor) for name, tensor in large.items())
    for spec in manifest.tensors:
        assert spec.offset % min(256, spec.nbytes & -spec.nbytes or 256) == 0


def test_two_versions_of_a_model_have_their_tensors_at_the_same_places():
    first, _ = pack_weights(state(), version=1, step=1)
    moved = {name: tensor + 1 for name, tensor in state().items() if name != "head"}
    second, _ = pack_weights({**moved, "head": moved["b.weight"]}, version=2, step=2)
    assert first.tensors == second.tensors


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1"},
        {"version": True},
        {"version": 10**400},
        {"base": []},
        {"step": None},
        {"chunk_bytes": 1.5},
        {"chunk_bytes": float("inf")},
        {"tensors": [{"name": [], "shape": [1], "dtype": "uint8", "offset": 0, "nbytes": 1}]},
        {"tensors": [{"name": "w", "shape": [1e999], "dtype": "uint8", "offset": 0, "nbytes": 1}]},
        {"tensors": [{"name": "w", "shape": [1] * 65, "dtype": "uint8", "offset": 0, "nbytes": 1}]},
        {"tensors": [{"name": "w", "shape": [2**64, 0], "dtype": "uint8", "offset": 0, "nbytes": 0}]},
        {"files": [{"name": "model.safetensors", "size_bytes": 1e999}]},
        {
            "files": [{"name": "model.safetensors", "size_bytes": 2**70}],
            "chunk_bytes": 2**70,
            "digests": ["0"],
        },
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_no_manifest(change):
    plain = {**pack_weights(state(), version=1, step=1)[0].to_dict(), **change}
    with pytest.raises(WeightMismatch, match="not a weight manifest"):
        WeightManifest.from_dict(plain)


@pytest.mark.parametrize("name", ["../x", "/etc/x", ".gyre", "", "a/b", "gyre.json", "\ud800", "é" * 150])
def test_a_manifest_names_plain_files_alone(name):
    plain = pack_weights(state(), version=1, step=1)[0].to_dict()
    plain["files"][0]["name"] = name
    with pytest.raises(WeightMismatch):
        WeightManifest.from_dict(plain)


def test_what_was_packed_is_not_changed_with_the_tensors():
    state = {"w": torch.zeros(4, 3), "turned": torch.arange(6.0).view(2, 3).t(), "none": torch.empty(0)}
    _, buffer = pack_weights(state, version=1, step=1)
    before = bytearray(buffer)
    for tensor in state.values():
        tensor.fill_(7)
    assert buffer == before
    assert torch.equal(safetensors.torch.load(buffer)["turned"], torch.arange(6.0).view(2, 3).t())


def test_the_checksum_can_be_had_without_packing():
    large = {"large": torch.arange((CHUNK_BYTES >> 2) + 5, dtype=torch.int32), **state()}
    for named in (state(), large, {}):
        assert checksum_of_weights(named) == pack_weights(named, version=3, step=4)[0].checksum


def test_so_it_can_of_tensors_that_are_read_one_after_another():
    named = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "none": torch.empty(0),
    }
    shapes = {name: (str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in named.items()}
    assert checksum_of_read(shapes, named.__getitem__) == checksum_of_weights(named)
    turned = {**named, "a": named["a"] + 1}
    assert checksum_of_read(shapes, turned.__getitem__) != checksum_of_weights(named)


def test_packing_copies_once():
    state = {f"w{at}": torch.zeros(1 << 18) for at in range(8)}
    tracemalloc.start()
    try:
        _, buffer = pack_weights(state, version=1, step=1)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * len(buffer)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["[]", "7", "null", "[" * 100_000, '{"a":' * 100_000, "\xff"])
def test_a_folder_whose_files_are_damaged_is_none(tmp_path, text):
    for name in ("gyre.json", "config.json"):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(WeightMismatch):
        read_manifest(tmp_path)
    assert fingerprint(tmp_path) == "unset"
    assert same_config(tmp_path, tmp_path) == (text in ("[]", "7", "null"))


def test_what_can_be_no_path_is_no_folder(tmp_path):
    assert is_folder(str(tmp_path))
    for path in ("x" * 5000, "a\0b", "\ud800", str(tmp_path / "nothing")):
        assert not is_folder(path)
