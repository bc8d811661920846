"""A new gang takes the weights that an instance has: bfloat16 by Hugging Face's names, into any layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gyre.rollouts.protocol.credentials import weights_key
from gyre.weights.publisher import Publisher
from gyre.weights.transfer.server import ChunkServer
from gyre.weights.version.arena import Arena
from gyre.weights.version.manifest import layout_of
from tests.megatron import work
from tests.megatron.test_hugging_face import FAMILIES, SEQUENCES
from tests.megatron.work import LAYOUTS, config_of
from tests.rank_pool import RankPool

TOKEN = "only for this test"


class Instance:
    """What an agent has of a policy: an arena with version 7, and its chunk server."""

    def __init__(self, root: Path) -> None:
        self.job = root / "job"
        self.job.mkdir()
        (self.job / "rollouts.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "token": TOKEN}))
        self.served = work.write_folder(root / "served", FAMILIES["qwen3-tied"], seed=5)
        named = {}
        for file in sorted(self.served.glob("*.safetensors")):
            rounded = {name: tensor.bfloat16().float() for name, tensor in load_file(file).items()}
            save_file(rounded, file)
            named |= rounded
        self.begun_with = work.write_folder(root / "begun", FAMILIES["qwen3-tied"], seed=6)
        self.arena = Arena(root / "arena")
        self.server = ChunkServer(self.arena, weights_key(TOKEN), host="127.0.0.1")
        layout, own = layout_of(named, floats="bfloat16")
        publisher = Publisher(self.arena, self.server, chunk_bytes=4096)
        manifest = publisher.publish(7, 7, layout, own.items(), files={"config.json": b"{}"})
        self.told = {"version": 7, "checksum": manifest.checksum}
        self.sources = [(self.server.address, "")]

    def config(self, layout: str, folder: Path) -> dict[str, Any]:
        config = config_of(layout)
        config["megatron"] |= {"model_path": str(folder), "pass_tokens": 200}
        return config


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    made = Instance(tmp_path_factory.mktemp("copy"))
    yield made
    made.server.close()
    made.arena.close(remove=True)


@pytest.fixture(scope="module")
def plain(pool: RankPool, instance: Instance) -> dict[str, Any]:
    """What a gang makes of the same weights that begins with them from a folder, and has seen nothing else."""
    config = instance.config("alone", instance.served)
    return pool.run(work.forward_and_back, 1, config, SEQUENCES)[0]


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("layout", ["alone", "tp2-pp2"])
def test_logits_are_those_of_the_instance(
    pool: RankPool, instance: Instance, plain: dict[str, Any], layout: str
) -> None:
    results = pool.run(
        work.take_a_copy,
        LAYOUTS[layout][0],
        instance.config(layout, instance.begun_with),
        instance.job,
        instance.told,
        instance.sources,
        SEQUENCES,
    )
    for name, expected in plain["weights"].items():
        np.testing.assert_array_equal(results[0]["weights"][name], expected, err_msg=name)
    tolerance = 0.0 if layout == "alone" else 1e-5
    np.testing.assert_allclose(results[-1]["logprobs"], plain["logprobs"], atol=tolerance, rtol=0)
    for found in results:
        assert found["state"] == results[0]["state"]
        assert (found["state"]["step"], found["state"]["trained"]) == (7, [[0, 4]])
        assert found["metrics"]["step"] == 8
    assert list((instance.job / "memory").iterdir()) == [], "every rank has let go of its copy"


def test_the_optimizer_begins_anew(pool: RankPool, instance: Instance) -> None:
    """A gang that had trained before takes the same step from the copy as one that had not."""
    found = []
    for begun_with in (instance.begun_with, instance.served):
        config = instance.config("tp2", begun_with)
        args = (instance.job, instance.told, instance.sources, SEQUENCES[:1])
        found.append(pool.run(work.take_a_copy, 2, config, *args)[0])
    assert found[0]["metrics"] == found[1]["metrics"]
    for name, expected in found[1]["after"].items():
        np.testing.assert_array_equal(found[0]["after"][name], expected, err_msg=name)
    moved = [
        float(np.abs(found[0]["after"][name] - found[0]["weights"][name]).max()) for name in found[0]["after"]
    ]
    assert max(moved) > 0


def test_other_bytes_than_were_acknowledged_are_refused(pool: RankPool, instance: Instance) -> None:
    """The checksum is the manager's word; an instance that has something else under that number has nothing."""
    told = {**instance.told, "checksum": "0" * 16}
    config = instance.config("alone", instance.begun_with)
    refusal = pool.run(work.refused_copy, 1, config, instance.job, told, instance.sources)[0]
    assert "nobody has the manifest of version 7" in refusal


def test_plain_torch_takes_it_too(torch_copy: dict[str, Any]) -> None:
    assert torch_copy["equal"]
    assert torch_copy["state"] == (3, [(0, 2)])
    assert torch_copy["optimizer"] == {}


@pytest.fixture
def torch_copy(tmp_path: Path) -> dict[str, Any]:
    from gyre.workloads.base import WorkloadContext
    from gyre.workloads.torch.actor import TorchActor

    (tmp_path / "rollouts.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "token": TOKEN}))

    def actor(seed: int) -> TorchActor:
        made = TorchActor()
        made.copies_root = tmp_path / "memory"  # type: ignore[misc]
        config = {**work.CONFIG, "seed": seed}
        made.context = WorkloadContext("j", "actor", 0, 1, config=config, directory=tmp_path)
        made.setup()
        return made

    origin, taker = actor(1), actor(2)
    named, config = origin.servable()
    arena = Arena(tmp_path / "arena")
    server = ChunkServer(arena, weights_key(TOKEN), host="127.0.0.1")
    layout, own = layout_of(named)
    manifest = Publisher(arena, server).publish(
        3, 3, layout, own.items(), files={"config.json": json.dumps(config).encode()}
    )
    work.take_step(taker, [work.random_groups(0, 2)])
    taker.restore_weights(
        version=3, checksum=manifest.checksum, sources=[(server.address, "")], trained=[[0, 2]]
    )
    found = {
        "equal": all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(
                taker.backend.model.parameters(), origin.backend.model.parameters(), strict=True
            )
        ),
        "state": (taker.step, taker.trained),
        "optimizer": dict(taker.backend.optimizer.state),
    }
    server.close()
    arena.close(remove=True)
    for one in (origin, taker):
        one.teardown()
    return found
