"""Gyre's weight loader, as SGLang runs it, against whatever a load can meet. What it is in the real one stands in
`tests/sglang/test_loading.py`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from gyre.engines.errors import EngineError, EngineRefused
from gyre.engines.http_client import EngineClient
from gyre.engines.process import EngineCommand, EngineProcess
from gyre.engines.weight_loading import LOADER_KEY, LOADER_PATH, EngineLoader, LoadableVersion
from gyre.weights.version.manifest import WeightMismatch
from gyre.weights.version.model_folder import list_model_folder
from tests.engines.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = Path(__file__).with_name("loader_engine.py")


@dataclass
class Bench:
    """An engine that serves `first`, called version "1"; `second` is another version of its model."""

    process: EngineProcess
    client: EngineClient
    loader: EngineLoader
    say: Path
    first: Path
    second: Path

    async def serves(self) -> tuple[str, dict[str, int]]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.process.url}/x") as response:
            body: dict[str, Any] = await response.json()
            return body["weight_version"], body["sums"]

    def tell(self, word: str, text: str = "") -> None:
        (self.say / word).write_text(text)

    def asked(self) -> list[str]:
        log = self.say / "log"
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sessions", "no sessions"])
async def process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[EngineProcess, Path]]:
    folder = tmp_path_factory.mktemp("loading")
    for name, seed in (("first", 1), ("second", 2)):
        list_model_folder(write_tiny_model(folder / name, seed=seed), version=seed)
    (folder / "say").mkdir()
    argv = [sys.executable, str(ENGINE), "--model-path", str(folder / "first")]
    argv += ["--host", "{host}", "--port", "{port}", "--say", str(folder / "say")]
    argv += ["--no-sessions"] if request.param == "no sessions" else []
    env = {LOADER_KEY: f"test-{os.getpid()}-{request.param}", "PYTHONPATH": str(LOADER_PATH)}
    command = EngineCommand(tuple(argv), env | {"OMP_NUM_THREADS": "1"}, loader_key=env[LOADER_KEY])
    async with EngineProcess(command, ready_within_s=60.0) as process:
        async with process.client() as client:
            loader = EngineLoader(client, folder / "first", key=process.loader_key)
            assert await loader.arm(), loader.why_not
        yield process, folder
        assert process.death is None, process.tail


@pytest_asyncio.fixture(loop_scope="module")
async def bench(process: tuple[EngineProcess, Path], tmp_path: Path) -> AsyncIterator[Bench]:
    engine, folder = process
    say = folder / "say"
    for file in say.iterdir():
        file.unlink()
    for name in ("first", "second"):
        shutil.copytree(folder / name, tmp_path / name)
    async with engine.client() as client:
        await client.update_weights_from_disk(tmp_path / "first", "1", flush_cache=False)
        loader = EngineLoader(client, tmp_path / "first", key=engine.loader_key)
        loader._ranks, loader._has_sessions = 1, await client.begin_weight_update()
        await client.end_weight_update() if loader._has_sessions else None
        bench = Bench(engine, client, loader, say, tmp_path / "first", tmp_path / "second")
        bench.asked()
        yield bench


async def disk(bench: Bench, folder: Path) -> dict[str, int]:
    """What the engine holds after it read `folder` from disk."""
    before, _ = await bench.serves()
    await bench.client.update_weights_from_disk(folder, before, flush_cache=False)
    return (await bench.serves())[1]


async def test_a_version_is_copied_in_the_pause_and_then_named(bench: Bench) -> None:
    report = await bench.loader.load("2", bench.second)
    asked = bench.asked()
    version, sums = await bench.serves()
    assert (report.how, report.why_disk, version) == ("loader", "", "2")
    assert sums == await disk(bench, bench.second) != await disk(bench, bench.first)
    copy = [line for line in asked if not line.startswith(("begin", "end"))]
    assert copy == [
        "pause_generation in_place",
        "update_weights_from_tensor",
        "update_weight_version",
        "continue_generation",
    ]
    assert report.size_bytes == (bench.second / "model.safetensors").stat().st_size
    assert 0 < report.load_s < report.pause_s
    assert report.prepare_s > 0
    assert sum(report.steps_s.values()) == pytest.approx(report.pause_s, abs=0.05)


@pytest.mark.parametrize("where", ["first byte of a tensor", "last byte"])
async def test_a_flipped_bit_is_refused_before_anything_stops(bench: Bench, where: str) -> None:
    _, held = await bench.serves()
    file = bench.second / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8 + int.from_bytes(content[:8], "little") if where.startswith("first") else -1] ^= 4
    file.write_bytes(content)
    with pytest.raises(WeightMismatch, match="holds other bytes"):
        await bench.loader.load("2", bench.second)
    assert bench.asked() == []
    assert await bench.serves() == ("1", held)


async def test_what_older_weights_made_is_counted_in_the_pause(bench: Bench) -> None:
    """A pass that is under way has made a token that its request does not have yet."""
    requests = {"running": {"a": 9, "b": 1}, "under_way": {"b": 1, "new": 0}, "waiting": {"c": 5, "d": 0}}
    bench.tell("requests", json.dumps(requests))
    told: list[Any] = []
    await bench.loader.load("2", bench.second, changed=lambda made: told.append((made, bench.asked()[-1])))
    made, last_asked = told.pop()
    assert made == {"a": 9, "b": 2, "new": 1, "c": 5, "d": 0}
    assert last_asked.startswith(("update_weights_from_tensor", "end_weight_update")), (
        "nothing is labelled yet"
    )
    assert bench.asked() == ["update_weight_version", "continue_generation"]
    bench.tell("tear")
    await bench.loader.load("1", bench.first, changed=told.append)
    assert told.pop() is None, "by the folder, whose labels must do"
    (bench.say / "requests").unlink()
    await bench.loader.load("2", bench.second, changed=told.append)
    assert told.pop() is None, "called by no scheduler that it knows"


async def test_a_load_that_tears_is_made_whole_from_the_folder(bench: Bench) -> None:
    """The model raises half-way: nothing of it leaves the loader, and the version comes all the same."""
    bench.tell("tear")
    report = await bench.loader.load("2", bench.second)
    version, sums = await bench.serves()
    assert (report.how, version) == ("disk", "2")
    assert "RuntimeError: half-way" in report.why_disk
    assert sums == await disk(bench, bench.second)


async def test_what_the_folder_cannot_make_whole_goes_back_to_the_version_of_before(bench: Bench) -> None:
    _, held = await bench.serves()
    bench.tell("tear")
    bench.tell("refuse", "second")
    with pytest.raises(EngineRefused, match="no good"):
        await bench.loader.load("2", bench.second)
    assert await bench.serves() == ("1", held)
    assert bench.asked()[-1] == "continue_generation", "it goes on"


async def test_an_engine_that_takes_neither_is_not_trusted(bench: Bench) -> None:
    bench.tell("refuse", "second first")
    bench.loader.why_not = "by disk alone"
    with pytest.raises(EngineError, match="took neither") as caught:
        await bench.loader.load("2", bench.second)
    assert not isinstance(caught.value, EngineRefused)


def rewrite(folder: Path, **changes: Any) -> None:
    """`changes` maps a tensor's name to another, or to None to leave it out."""
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    tensors |= {name: tensor for name, tensor in changes.items() if tensor is not None}
    save_file(
        {n: t for n, t in tensors.items() if changes.get(n, 0) is not None}, folder / "model.safetensors"
    )
    list_model_folder(folder, version=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": None}, "lacks 1 tensors"),
        ({"model.layers.9.weight": torch.ones(2)}, "has 1 tensors"),
        ({"model.norm.weight": torch.ones(3)}, r"has model.norm.weight as \[3\]"),
    ],
    ids=["lacks one", "has one more", "another shape"],
)
async def test_another_model_is_refused_before_anything_stops(
    bench: Bench, change: dict[str, Any], words: str
) -> None:
    rewrite(bench.second, **change)
    with pytest.raises(WeightMismatch, match=words):
        await bench.loader.load("2", bench.second)
    assert bench.asked() == []


async def test_an_output_layer_that_is_tied_may_be_left_out(bench: Bench) -> None:
    for folder in (bench.first, bench.second):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    bench.loader._loaded = LoadableVersion.read(bench.first)
    rewrite(bench.second, **{"lm_head.weight": None})
    assert (await bench.loader.load("2", bench.second)).how == "loader"


async def test_a_folder_that_is_not_there_is_refused(bench: Bench) -> None:
    with pytest.raises(WeightMismatch, match="no weights that can be loaded"):
        await bench.loader.load("2", bench.second / "nothing")
    assert bench.asked() == []


async def test_without_the_loader_versions_are_read_from_disk(bench: Bench) -> None:
    bench.loader._key = "another engine's"
    report = await bench.loader.load("2", bench.second)
    assert report.how == "disk"
    assert "has no weight loader" in report.why_disk
    assert (await bench.serves())[0] == "2"


async def test_what_the_loader_may_not_map_is_read_from_disk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = LoadableVersion.message
    elsewhere = str(bench.second / "moved.safetensors")
    monkeypatch.setattr(LoadableVersion, "message", lambda version: message(version) | {"files": [elsewhere]})
    report = await bench.loader.load("2", bench.second)
    assert report.how == "disk"
    assert "FileNotFoundError" in report.why_disk
    version, sums = await bench.serves()
    assert version == "2"
    assert sums == await disk(bench, bench.second)


async def test_what_the_loader_does_not_compare_is_checked_before_the_engine_reads_it(bench: Bench) -> None:
    checked: list[str] = []

    async def check() -> None:
        checked.append((await bench.serves())[0])
        if len(checked) == 2:
            raise WeightMismatch("other bytes")

    await bench.loader.load("2", bench.second, check=check)
    assert checked == [], "the loader has compared them"
    bench.loader.why_not = "by disk alone"
    await bench.loader.load("1", bench.first, check=check)
    with pytest.raises(WeightMismatch, match="other bytes"):
        await bench.loader.load("2", bench.second, check=check)
    assert checked == ["2", "1"]
    assert (await bench.serves())[0] == "1"
    assert "pause_generation" not in bench.asked()[-1:], "it was not paused for it"


async def test_each_pause_has_a_cache_of_its_own_also_when_the_load_fails(bench: Bench) -> None:
    """Requests that came in the pause run on what was served before, under the new key: the next load needs another."""
    keys = [bench.loader.cache_key]
    await bench.loader.load("2", bench.second)
    keys.append(bench.loader.cache_key)
    bench.tell("refuse", "first")
    bench.loader.why_not = "by disk alone"
    with pytest.raises(EngineRefused):
        await bench.loader.load("3", bench.first)
    keys.append(bench.loader.cache_key)
    assert len(set(keys)) == 3


async def test_what_cannot_flush_while_requests_wait_has_them_called_off_first(bench: Bench) -> None:
    """SGLang 0.5.17: prefixes of older weights would be served to what was put back."""
    bench.tell("no_flush")
    called: list[list[str]] = []

    async def call_off() -> None:
        called.append(bench.asked())

    await bench.loader.load("2", bench.second, keep=False, call_off=call_off)
    assert called == [["pause_generation retract", "flush_cache", "continue_generation"]]
    assert bench.asked()[:2] == ["pause_generation retract", "flush_cache"]
    bench.tell("no_flush")
    with pytest.raises(EngineRefused, match="pending requests"):
        await bench.loader.load("3", bench.first, keep=False)
    assert (await bench.serves())[0] == "2"


async def test_only_the_loaders_own_words_are_answered(bench: Bench) -> None:
    """Whatever comes over its socket, it answers, and what it served stands."""
    address = f"\0gyre-{bench.loader._key}-0"
    for line in (b"not json\n", b"[1]\n", b'{"op": "reset"}\n', b'{"op": "prepare"}\n', b"\xff\n"):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(10.0)
            peer.connect(address)
            peer.sendall(line)
            assert json.loads(peer.makefile().readline())["ok"] is False
    for slot in (
        {"files": ["/nowhere"], "tensors": [], "chunks": []},
        {
            "files": [str(bench.second / "model.safetensors")],
            "tensors": [["x", "float32", [1 << 40], 0, 0, 1 << 42]],
            "chunks": [],
        },
        {
            "files": [str(bench.second / "model.safetensors")],
            "tensors": [],
            "chunks": [[0, 0, 1 << 40, "0" * 16]],
        },
    ):
        asked = {"op": "prepare", "version": "2", "slot": slot, "stage": "auto"}
        (answer,) = await bench.loader._ask(asked, 10.0)
        assert answer["ok"] is False
    await bench.loader._copy() if not bench.loader._has_sessions else None
    (outcome,) = await bench.loader._ask({"op": "outcome"}, 10.0)
    assert outcome["ok"] is False
    assert (await bench.loader.load("2", bench.second)).how == "loader"
