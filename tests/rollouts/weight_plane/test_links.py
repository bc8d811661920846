"""A version on the engine's own machine is compared with its checksums once: by the engine's loader, if it has one.

What the loader finds wrong is fetched from elsewhere.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gyre.rollouts.protocol.frames import Loaded, LoadFailed, Weights, WeightsTrouble
from gyre.weights.version.arena import VersionFiles
from gyre.weights.version.manifest import Chunk, WeightMismatch
from tests.rollouts.weight_plane.far_instance import CONFIG, TOKEN, URL, Far, Make, policy


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that were compared with their checksums, in this process."""
    found: list[int] = []
    is_right = VersionFiles.is_right

    def noted(files: VersionFiles, chunk: Chunk) -> bool:
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


async def load_here(plane: Far, folder: Path, told: dict[str, str]) -> Loaded | LoadFailed:
    """Load version 1, of which there is a copy in `folder`."""
    weights = Weights(version=1, checksum=told["checksum"], sources=[told["source"]], local_path=str(folder))
    await plane.instance.load(weights, URL, TOKEN)
    return next(frame for frame in reversed(plane.frames) if isinstance(frame, Loaded | LoadFailed))


async def test_what_the_loader_finds_wrong_is_fetched_from_elsewhere(far: Make, tmp_path: Path) -> None:
    plane = far(has_engine=True)
    told = plane.source.publish(policy(1), CONFIG, version=1, step=1)
    damaged = tmp_path / "damaged"
    shutil.copytree(told["path"], damaged)
    file = damaged / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    plane.refuses = "the loader found other bytes"
    failed = await load_here(plane, damaged, told)
    assert isinstance(failed, LoadFailed)
    assert "the loader found other bytes" in failed.error
    with pytest.raises(WeightMismatch, match="other bytes than its manifest"):
        await plane.checks[-1]()
    plane.refuses = ""
    loaded = await load_here(plane, damaged, told)
    assert isinstance(loaded, Loaded)
    assert loaded.way == "tcp"
    good = (Path(told["path"]) / file.name).read_bytes()
    assert (plane.folders[-1] / file.name).read_bytes() == good
    assert [frame.what for frame in plane.frames if isinstance(frame, WeightsTrouble)] == ["chunk_damaged"]
    shutil.rmtree(damaged)
