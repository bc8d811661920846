"""What an actor publishes is where the rollout manager is told that it is, and a successor takes it over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.config import WeightsSpec
from gyre.errors import Unreachable
from gyre.models.errors import ModelFolderError
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.rollouts.protocol.credentials import weights_key
from gyre.weights import publisher
from gyre.weights.transfer.chunk_transports import Source
from gyre.weights.transfer.receiver import Receiver
from gyre.weights.version.arena import Arena
from gyre.weights.version.manifest import WeightMismatch
from gyre.weights.version.model_folder import ModelFolder
from gyre.workloads.gang import weight_source
from gyre.workloads.gang.weight_source import WeightSource

CONFIG = {"model_type": "qwen3", "hidden_size": 4}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "rollouts.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "token": "t"}))
    return tmp_path


def named(version: int) -> dict[str, torch.Tensor]:
    return {"model.norm.weight": torch.full((300,), float(version))}


def test_what_is_told_is_a_model_folder_and_can_be_fetched_from_the_address(
    job: Path, tmp_path: Path
) -> None:
    source = WeightSource(job, root=tmp_path / "shm")
    told = source.publish(named(1), CONFIG, version=1, step=1)
    folder = ModelFolder.read(Path(told["path"]))
    folder.verify()
    assert (folder.checksum, folder.fingerprint()) == (told["checksum"], told["model"])
    receiver = Receiver(Arena(tmp_path / "elsewhere"), weights_key("t"))
    fetched = receiver.fetch(folder.manifest, lambda: [Source(told["source"])])
    assert ModelFolder(fetched.files.path, folder.manifest).fingerprint() == told["model"]
    source.close()
    assert list((tmp_path / "shm").iterdir()) == []


def test_three_versions_are_held_for_pinned_requests(job: Path, tmp_path: Path) -> None:
    source = WeightSource(job, root=tmp_path / "shm")
    for version in range(6):
        source.publish(named(version), CONFIG, version=version, step=version)
    assert set(source.arena.versions) == {3, 4, 5}
    source.close()


def test_a_successor_publishes_the_same_version_under_the_same_checksum(job: Path, tmp_path: Path) -> None:
    first = WeightSource(job, root=tmp_path / "shm")
    before = first.publish(named(7), CONFIG, version=7, step=7)
    first.peer.close(keep=True)  # as its death would
    second = WeightSource(job, root=tmp_path / "shm")
    after = second.publish(named(7), CONFIG, version=7, step=7)
    assert (after["checksum"], after["path"]) == (before["checksum"], before["path"])
    second.close()


def test_what_is_begun_is_published_as_it_was_and_one_version_after_another(
    job: Path, tmp_path: Path
) -> None:
    """Lasting tensors are copied later, others before `begin` returns; a version that fails is none of the next."""
    source = WeightSource(job, root=tmp_path / "shm")
    changing = named(2)
    futures = [
        source.begin(named(1), CONFIG, version=1, step=1, lasting=True),
        source.begin(changing, CONFIG, version=2, step=2),
    ]
    changing["model.norm.weight"].zero_()
    broken = source.begin(
        {"odd": torch.zeros(4, dtype=torch.complex64)}, CONFIG, version=3, step=3, lasting=True
    )
    futures.append(source.begin(named(4), CONFIG, version=4, step=4, lasting=True))
    for version, future in zip((1, 2, 4), futures, strict=True):
        tensors = SafetensorsFolder(Path(future.result()["path"])).tensors()
        assert torch.equal(tensors["model.norm.weight"], named(version)["model.norm.weight"])
    with pytest.raises(WeightMismatch):
        broken.result()
    source.close()


def test_a_large_tensor_is_copied_in_pieces_on_several_threads(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "PIECE_ELEMENTS", 1000)
    monkeypatch.setattr(publisher, "hashing_threads", lambda: 3)
    source = WeightSource(job, root=tmp_path / "shm", settings=WeightsSpec(dtype="bfloat16"))
    whole = {
        "a": torch.randn(333, 71),
        "b": torch.randn(71, 90).t(),  # in no order: in one piece
        "c": torch.randint(9, (12_345,)),
        "d": torch.tensor(7.0),
    }
    folder = ModelFolder.read(Path(source.publish(whole, CONFIG, version=1, step=1)["path"]))
    folder.verify()
    for name, tensor in SafetensorsFolder(folder.path).tensors().items():
        given = whole[name]
        assert torch.equal(tensor, given.bfloat16() if given.is_floating_point() else given), name
    source.close()


@pytest.mark.parametrize("settings", [{"codec": "fp8"}, {"dtype": "bfloat16"}])
def test_an_adapter_is_published_as_it_is(job: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Rounding would cost more than its few bytes."""
    source = WeightSource(job, root=tmp_path / "shm", settings=WeightsSpec.model_validate(settings))
    given = {"m.lora_A.weight": torch.randn(4, 256), "m.lora_B.weight": torch.randn(256, 4)}
    begun = source.begin(given, CONFIG, version=1, step=1, files={"adapter_config.json": b"{}"})
    folder = ModelFolder.read(Path(begun.result()["path"]))
    folder.verify()
    for name, tensor in SafetensorsFolder(folder.path, adapter=True).tensors().items():
        assert torch.equal(tensor, given[name])
    with pytest.raises(ModelFolderError, match="not a whole model"):
        SafetensorsFolder(folder.path)
    assert (folder.path / "adapter_config.json").read_bytes() == b"{}"
    source.close()


def test_a_manager_that_never_says_where_it_is_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_source, "ENDPOINT_WITHIN_S", 0.1)
    with pytest.raises(Unreachable, match="rollout manager"):
        WeightSource(tmp_path, root=tmp_path / "shm")
