"""How Gyre's weight loader brings a slot to a device: verified in the pass that copies it. Here the device is the CPU;
what a GPU adds is measured by `bench/job_gpu.py --part colocated`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import xxhash

from gyre.engines.weight_loading import LOADER_PATH

PIECE = 4096

Map = Callable[[str, int], tuple[object, bytes]]


@pytest.fixture(scope="module")
def loader() -> ModuleType:
    """As SGLang's Python would import it, which knows no Gyre."""
    spec = importlib.util.spec_from_file_location("a_weight_loader", LOADER_PATH / "gyre_weight_loader.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def mapped(loader: ModuleType, tmp_path: Path) -> Map:
    def make(name: str, size: int) -> tuple[object, bytes]:
        content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
        path = tmp_path / name
        path.write_bytes(content)
        with open(path, "r+b") as file:
            return loader._Mapping(str(path), file.fileno(), path.stat()), content

    return make


def chunk(file: int, content: bytes, offset: int, size: int, digest: str = "xxh3_64") -> list[object]:
    return [file, offset, size, getattr(xxhash, f"{digest}_hexdigest")(content[offset : offset + size])]


@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_arrives_whatever_the_chunks_cover(loader: ModuleType, mapped: Map, threads: int) -> None:
    first, a = mapped("first", 10 * PIECE + 7)
    second, b = mapped("second", 3 * PIECE)
    third, c = mapped("third", PIECE - 1)
    way = loader._Way(torch.device("cpu"), threads=threads, piece_bytes=PIECE)
    chunks = [
        chunk(0, a, 0, 5 * PIECE),
        chunk(0, a, 6 * PIECE + 3, 2 * PIECE, "xxh3_128"),  # a gap before it, and what is left after it
        chunk(1, b, 0, 3 * PIECE),
    ]
    for turn in range(2):  # its memory is used again
        copies = way.bring([first, second, third], chunks[turn:])
        assert [copy.numpy().tobytes() for copy in copies] == [a, b, c]


@pytest.mark.parametrize("at", [0, PIECE, 4 * PIECE + 5, 5 * PIECE - 1])
def test_a_flipped_bit_is_found_in_whichever_piece(loader: ModuleType, mapped: Map, at: int) -> None:
    mapping, content = mapped("one", 8 * PIECE)
    chunks = [chunk(0, content, 0, 5 * PIECE), chunk(0, content, 5 * PIECE, 3 * PIECE)]
    mapping.buffer[at] ^= 4  # type: ignore[attr-defined]
    way = loader._Way(torch.device("cpu"), threads=2, piece_bytes=PIECE)
    with pytest.raises(loader.OtherBytes, match="holds other bytes"):
        way.bring([mapping], chunks)
    with pytest.raises(loader.OtherBytes, match="holds other bytes"):
        loader._verify([mapping], chunks)
    mapping.buffer[at] ^= 4  # type: ignore[attr-defined]
    assert way.bring([mapping], chunks)[0].numpy().tobytes() == content
    loader._verify([mapping], chunks)


def test_a_chunk_beyond_the_end_is_refused(loader: ModuleType, mapped: Map) -> None:
    mapping, content = mapped("short", 2 * PIECE)
    beyond = [0, PIECE, 2 * PIECE, chunk(0, content, 0, PIECE)[3]]
    way = loader._Way(torch.device("cpu"), threads=1, piece_bytes=PIECE)
    with pytest.raises(loader.OtherBytes, match="ends at"):
        way.bring([mapping], [beyond])
    with pytest.raises(loader.OtherBytes, match="ends at"):
        loader._verify([mapping], [beyond])


def test_of_pinned_pages_every_byte_is_read_in_place_and_a_flipped_bit_is_found(
    loader: ModuleType, mapped: Map
) -> None:
    first, a = mapped("pinned", 9 * PIECE + 3)
    second, b = mapped("plain", 2 * PIECE)
    first.is_pinned = True  # type: ignore[attr-defined]  # as after `pin`, which wants a GPU
    way = loader._Way(torch.device("cpu"), threads=2, piece_bytes=PIECE)
    chunks = [chunk(0, a, 0, 4 * PIECE), chunk(0, a, 5 * PIECE, 2 * PIECE), chunk(1, b, 0, 2 * PIECE)]
    assert [copy.numpy().tobytes() for copy in way.bring([first, second], chunks)] == [a, b]
    first.buffer[5 * PIECE] ^= 1  # type: ignore[attr-defined]
    with pytest.raises(loader.OtherBytes, match="holds other bytes"):
        way.bring([first, second], chunks)


def test_files_that_nobody_has_a_link_to_are_not_kept_pinned(loader: ModuleType, mapped: Map) -> None:
    rank = object.__new__(loader.Rank)
    rank._pinned = {}
    turns = [mapped(f"turn {at}", PIECE)[0] for at in range(loader._SLOTS)]  # all have room
    for one in turns[:2]:
        rank._keep([one])
    Path(turns[0].path).unlink()  # type: ignore[attr-defined]
    for one in turns[2:]:
        rank._keep([one])
    assert list(rank._pinned.values()) == turns[1:]
