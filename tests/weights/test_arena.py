"""*The trainer does not wait*: pages of the next version are there before it is staged, and nobody's are taken."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gyre.weights.version.arena import Arena, VersionGone
from tests.weights.plane import WeightPeer


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each file whose space was taken."""
    found: list[int] = []

    def take(descriptor: int, size_bytes: int) -> None:
        found.append(size_bytes)
        os.ftruncate(descriptor, size_bytes)

    monkeypatch.setattr("gyre.weights.version.arena._take_space", take)
    return found


def test_pages_of_the_next_version_are_there_before_it_is_staged(tmp_path: Path, taken: list[int]) -> None:
    origin = WeightPeer(tmp_path / "origin")
    origin.publish(1)
    for version in range(2, 5):
        origin.arena.make_ready()
        before = len(taken)
        origin.publish(version)
        assert len(taken) == before, f"version {version} waits for none"
    origin.arena.make_ready()
    before = len(taken)
    origin.publish(5)
    origin.arena.make_ready()
    assert len(taken) == before, "it gets those of the oldest, which nobody else has"
    origin.close()


def test_who_has_a_link_to_an_old_version_keeps_its_bytes_and_the_next_one_waits_for_no_pages(
    tmp_path: Path, taken: list[int]
) -> None:
    origin, agent = WeightPeer(tmp_path / "origin"), Arena(tmp_path / "agent")
    manifests = [origin.publish(version) for version in (1, 2)]
    linked = agent.adopt(origin.arena.versions[1].path, manifests[0], keep=None)
    assert linked is not None
    was = [bytes(linked.view_of(at)) for at in range(len(linked.specs))]
    origin.arena.make_ready()
    before = len(taken)
    origin.publish(3)
    assert len(taken) == before
    assert [bytes(linked.view_of(at)) for at in range(len(linked.specs))] == was
    agent.close(remove=True)
    origin.close()


def test_a_linked_version_is_mapped_by_who_reads_it_and_is_gone_with_its_folder(tmp_path: Path) -> None:
    origin, agent = WeightPeer(tmp_path / "origin"), Arena(tmp_path / "agent")
    manifest = origin.publish(1)
    published = origin.arena.versions[1]
    linked = agent.adopt(published.path, manifest, keep=None, verify=False)
    assert linked is not None
    tensors = {at for at, file in enumerate(linked.specs) if file.name.endswith(".safetensors")}
    assert tensors
    assert not tensors & {number for number, _ in linked.mapped()}
    assert all(linked.is_right(chunk) for chunk in manifest.chunks())
    assert {number for number, _ in linked.mapped()} == set(range(len(linked.specs)))
    again = Arena(tmp_path / "other")
    unread = again.adopt(published.path, manifest, keep=None, verify=False)
    assert unread is not None
    shutil.rmtree(unread.path)
    with pytest.raises(VersionGone, match="is gone"):
        unread.view_of(min(tensors))
    unread.close()
    with pytest.raises(VersionGone, match="was closed"):
        unread.view_of(min(tensors))
    agent.close(remove=True)
    origin.close()


def test_a_file_that_was_cut_off_is_not_linked(tmp_path: Path) -> None:
    origin, agent = WeightPeer(tmp_path / "origin"), Arena(tmp_path / "agent")
    manifest = origin.publish(1)
    folder = tmp_path / "cut"
    shutil.copytree(origin.arena.versions[1].path, folder)
    largest = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 1)
    assert agent.adopt(folder, manifest, keep=None, verify=False) is None
    origin.close()
