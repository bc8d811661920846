"""A job begins with another one's weights across layouts, and between plain torch and Megatron."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.api.first_weights import first_weights
from gyre.api.home import Home
from gyre.config import parse_job
from gyre.errors import ConfigError
from gyre.graph import compile_job
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.store import Store, open_store
from gyre.workloads.base import WorkloadContext
from gyre.workloads.gang.state_files import sealed
from gyre.workloads.learner.errors import CheckpointMismatch
from gyre.workloads.megatron.backend import MegatronBackend
from gyre.workloads.megatron.checkpoints.formats import refuse_strangers_pickle
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.critic import TorchCritic
from tests.megatron import learner_work, work
from tests.megatron.checkpoints import checkpoint_work
from tests.megatron.test_hugging_face import FAMILIES
from tests.megatron.work import LAYOUTS, config_of, random_groups
from tests.rank_pool import RankPool
from tests.workloads.torch_workloads import bind

pytestmark = pytest.mark.slow

STEPS = [[random_groups(0, 4)]]
MEGATRON = {"entrypoint": {"module": "gyre.workloads.megatron", "name": "MegatronActor"}}

Weights = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(Home(tmp_path).database_url()) as opened:
        yield opened


def begun(
    store: Store, tmp_path: Path, config: dict[str, Any], source: Path, *, megatron: bool = True
) -> dict[str, Any]:
    """The `config` of a job that begins with the weights of a folder, which is then gone."""
    actor = {"total": 4, **(MEGATRON if megatron else {})}
    roles = {"trainer": {}, "actor": actor, "rollout": {}, "reward": {}}
    job = {"name": "second", "recipe": "grpo", "device_type": "CPU", "device_per_node": 8, "roles": roles}
    spec = compile_job(parse_job({**job, "config": config})).spec
    with first_weights(store, Home(tmp_path), spec, "second-1", source, trust=False) as (taken, _):
        shutil.rmtree(source)
    return taken.config


def with_model(layout: str, model: Path) -> dict[str, Any]:
    config = config_of(layout)
    config["megatron"]["model_path"] = str(model)
    return config


def checkpoint(pool: RankPool, folder: Path, layout: str, config: dict[str, Any]) -> Weights:
    """A checkpoint after a step: the weights in it."""
    folder.mkdir()
    written = partial(checkpoint_work.train_and_checkpoint, background=False)
    weights: Weights = pool.run(written, LAYOUTS[layout][0], config, STEPS, folder)[0]["after"]["weights"]
    return weights


def first_of(pool: RankPool, layout: str, config: dict[str, Any]) -> Weights:
    """What a gang of this layout begins with."""
    weights: Weights = pool.run(work.train, LAYOUTS[layout][0], config, [])[0]["weights"]
    return weights


def same(found: Weights, expected: Weights) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.slow
def test_a_folder_s_model_in_another_layout(pool: RankPool, store: Store, tmp_path: Path) -> None:
    """Whoever is killed before the first step begins with them again, by way of a checkpoint that has no weights."""
    model = work.write_folder(tmp_path / "model", FAMILIES["qwen3-tied"])
    trained = checkpoint(pool, tmp_path / "trained", "tp2-pp2", with_model("tp2-pp2", model))
    config = begun(store, tmp_path, with_model("dp2", model), tmp_path / "trained")
    assert same(first_of(pool, "dp2", config), trained)
    assert not same(first_of(pool, "dp2", with_model("dp2", model)), trained), "it was trained"
    folder = tmp_path / "first"
    folder.mkdir()
    was = pool.run(checkpoint_work.checkpoint_first_model, 2, config, STEPS, folder)[0]
    assert json.loads((folder / "actor.json").read_text())["first_model"]
    assert pool.run(checkpoint_work.restore_first_model, 2, config, STEPS, folder)[0] == was
    pool.run(checkpoint_work.exported, 1, [str(folder), str(tmp_path / "out")])
    out = SafetensorsFolder(tmp_path / "out")
    assert same({name: tensor.numpy() for name, tensor in out.tensors().items()}, trained)


def test_from_plain_torch_to_megatron(pool: RankPool, store: Store, tmp_path: Path) -> None:
    actor = bind(TorchActor(), {**config_of("tp2"), "seed": 4})
    actor.checkpoint(tmp_path / "trained")
    named, _ = actor.servable()
    trained = {name: tensor.detach().numpy().copy() for name, tensor in named.items()}
    actor.teardown()
    config = begun(store, tmp_path, config_of("tp2"), tmp_path / "trained")
    assert same(first_of(pool, "tp2", config), trained)


def test_from_megatron_to_plain_torch(pool: RankPool, store: Store, tmp_path: Path) -> None:
    trained = checkpoint(pool, tmp_path / "trained", "tp2-dp2", config_of("tp2-dp2"))
    config = begun(store, tmp_path, config_of("alone"), tmp_path / "trained", megatron=False)
    actor = bind(TorchActor(), config)
    actor.warm_start()
    named, _ = actor.servable()
    assert same({name: tensor.detach().numpy() for name, tensor in named.items()}, trained)
    actor.teardown()


def test_critic_and_reference_begin_with_them_too(pool: RankPool, store: Store, tmp_path: Path) -> None:
    model = work.write_folder(tmp_path / "model", FAMILIES["qwen3-tied"])
    other = work.write_folder(tmp_path / "other", FAMILIES["qwen3-tied"], seed=5)
    expected = {name: tensor.numpy().copy() for name, tensor in SafetensorsFolder(other).tensors().items()}
    config = begun(store, tmp_path, with_model("alone", model), other)
    (critic,) = pool.run(learner_work.train_critic, 1, config, [])
    trunk = {name: tensor for name, tensor in critic["weights"].items() if name in expected}
    assert same(trunk, expected)
    plain = bind(TorchCritic(), config)
    assert np.array_equal(
        plain.backend.model.decoder.embed.weight.detach(), expected["model.embed_tokens.weight"]
    )
    plain.teardown()
    sequences = [[1, 5, 9, 2, 4], [3, 8, 8]]
    (found,) = pool.run(work.reference_logprobs, 1, config, sequences)
    for folder, is_same in ((Path(config["first_weights"]["path"]), True), (model, False)):
        (named,) = pool.run(work.reference_logprobs, 1, with_model("alone", folder), sequences)
        assert np.array_equal(found, named) == is_same


def test_a_gang_unpickles_nothing_outside_of_the_job_s_folder(tmp_path: Path) -> None:
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    for folder in (theirs, own / "checkpoints" / "step_00000001"):
        folder.mkdir(parents=True)
        (folder / "actor.json").write_text(json.dumps(sealed({"format": 1})))
    refuse_strangers_pickle(own / "checkpoints" / "step_00000001", own=own)
    with pytest.raises(CheckpointMismatch, match="lies outside of the job's folder"):
        refuse_strangers_pickle(theirs, own=own)
    (own / "checkpoints" / "step_00000002").symlink_to(theirs)
    backend = MegatronBackend.__new__(MegatronBackend)  # it refuses before it needs a model
    backend.context = WorkloadContext("j", "actor", 0, 1, directory=own)
    with pytest.raises(CheckpointMismatch, match="lies outside of the job's folder"):
        backend.restore(own / "checkpoints" / "step_00000002")


def test_another_shape_is_refused_before_anything_is_read(
    pool: RankPool, store: Store, tmp_path: Path
) -> None:
    checkpoint(pool, tmp_path / "trained", "dp2", config_of("dp2"))
    for file in (tmp_path / "trained").glob("rank_*"):
        file.unlink()
    config = config_of("dp2")
    config["model"] = {**config["model"], "layers": 4}
    with pytest.raises(ConfigError, match="layers is 2 instead of 4"):
        begun(store, tmp_path, config, tmp_path / "trained")
