"""A version on the engine's own machine is compared with its checksums once: by the engine's loader, if it has one.

What the loader finds wrong is fetched from elsewhere.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import xxhash

from gyre.engines.weight_loading import LoadableVersion, LoadReport
from gyre.rollouts.agent.owner import Check
from gyre.rollouts.protocol.frames import FetchFault, Loaded, LoadFailed, Weights
from gyre.weights.version.arena import VersionFiles
from gyre.weights.version.manifest import Chunk, WeightMismatch
from tests.rollouts.weight_plane.far_instance import CONFIG, TOKEN, URL, Far, Make, policy


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks of tensors that were compared with their checksums, in this process."""
    found: list[int] = []
    is_right = VersionFiles.is_right

    def noted(files: VersionFiles, chunk: Chunk) -> bool:
        if files.specs[chunk.file].name.endswith(".safetensors"):
            found.append(chunk.index)
        return is_right(files, chunk)

    monkeypatch.setattr(VersionFiles, "is_right", noted)
    return found


@pytest.mark.parametrize("has_engine", [False, True])
async def test_it_is_compared_where_no_loader_does(far: Make, compared: list[int], has_engine: bool) -> None:
    """An engine that reads the folder itself compares nothing; and so does one that is only started over it."""
    plane = far(has_engine=has_engine)
    loaded = await plane.load(1, here=True)
    assert isinstance(loaded, Loaded)
    assert loaded.way == "linked"
    assert bool(compared) != has_engine
    await plane.checks[-1]()  # by an engine whose loader cannot be used this time
    assert compared
    before = len(compared)
    await plane.checks[-1]()
    assert len(compared) == before


def compare(folder: Path) -> None:
    """Compare the chunks that hold tensors, as the loader in SGLang does."""
    found = LoadableVersion.read(folder)
    for file, offset, size, checksum in found.chunks:
        content = Path(found.files[file]).read_bytes()[offset : offset + size]
        if xxhash.xxh3_64_hexdigest(content) != checksum:
            raise WeightMismatch(f"{found.files[file]} holds other bytes.")


def loads_as_the_ranks_do(plane: Far) -> None:
    """Have the instance's engine compare what it loads."""
    given = plane.serve

    async def serve(folder: Path, weights: Weights, check: Check) -> LoadReport | None:
        compare(folder)
        return await given(folder, weights, check)

    plane.serve = serve


async def load_here(plane: Far, folder: Path, told: dict[str, Any]) -> Loaded | LoadFailed:
    """Load a version, of which there is something in `folder`."""
    weights = Weights(
        version=told["version"],
        checksum=told["checksum"],
        sources=[told["source"]],
        local_path=str(folder),
    )
    await plane.instance.load(weights, URL, TOKEN)
    return next(frame for frame in reversed(plane.frames) if isinstance(frame, Loaded | LoadFailed))


def flip(file: Path) -> None:
    """Change the last byte in place, under whoever has it mapped."""
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)[0]
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last ^ 1]))


@pytest.mark.parametrize("wrong", ["model.safetensors", "config.json", "another version"])
async def test_what_is_wrong_here_is_fetched_from_elsewhere_at_once(
    far: Make, tmp_path: Path, wrong: str
) -> None:
    plane = far(has_engine=True)
    loads_as_the_ranks_do(plane)
    beside = tmp_path / "beside"
    told = plane.source.publish(policy(1), CONFIG, version=1, step=1)
    shutil.copytree(told["path"], beside)
    if wrong == "another version":
        told = plane.source.publish(policy(2), CONFIG, version=2, step=2)
    else:
        flip(beside / wrong)
    loaded = await load_here(plane, beside, told)
    assert isinstance(loaded, Loaded)
    assert loaded.way == "tcp"
    for name in ("model.safetensors", "config.json"):
        assert (plane.folders[-1] / name).read_bytes() == (Path(told["path"]) / name).read_bytes()
    assert [frame.what for frame in plane.frames if isinstance(frame, FetchFault)] == ["chunk_damaged"]
    shutil.rmtree(beside)


async def test_so_is_what_is_found_wrong_while_an_engine_starts(far: Make, tmp_path: Path) -> None:
    plane = far()
    beside = tmp_path / "beside"
    told = plane.source.publish(policy(1), CONFIG, version=1, step=1)
    shutil.copytree(told["path"], beside)
    flip(beside / "model.safetensors")
    loaded = await load_here(plane, beside, told)
    assert isinstance(loaded, Loaded)
    assert loaded.way == "tcp"
    compare(plane.folders[-1])
    shutil.rmtree(beside)


async def test_so_is_what_was_damaged_after_it_came(far: Make) -> None:
    plane = far(has_engine=True)
    loads_as_the_ranks_do(plane)
    told = plane.source.publish(policy(1), CONFIG, version=1, step=1)
    assert isinstance(await load_here(plane, Path("/nowhere"), told), Loaded)
    plane.instance.lost()
    flip(plane.folders[-1] / "model.safetensors")
    loaded = await load_here(plane, Path("/nowhere"), told)
    assert isinstance(loaded, Loaded)
    assert loaded.way == "tcp"


async def test_what_everybody_has_wrong_is_told(far: Make) -> None:
    plane = far(has_engine=True)
    plane.refuses = "the loader found other bytes"
    failed = await plane.load(1, here=True)
    assert isinstance(failed, LoadFailed)
    assert "the loader found other bytes" in failed.error
    assert len(plane.folders) == 2, "it was tried again, once"


async def test_trouble_is_told_of_the_version_that_has_it(far: Make, tmp_path: Path) -> None:
    plane = far(has_engine=True)
    loads_as_the_ranks_do(plane)
    assert isinstance(await plane.load(1, here=True), Loaded)
    told = plane.source.publish(policy(2), CONFIG, version=2, step=2)
    beside = tmp_path / "beside"
    shutil.copytree(told["path"], beside)
    flip(beside / "model.safetensors")
    assert isinstance(await load_here(plane, beside, told), Loaded)
    assert [frame.version for frame in plane.frames if isinstance(frame, FetchFault)] == [2]
    shutil.rmtree(beside)
