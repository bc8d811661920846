"""A job of each back end begins with the weights of each back end's checkpoint, and with nothing else of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
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
from gyre.workloads.gang.state_files import sealed
from gyre.workloads.torch.actor import TorchActor
from gyre.workloads.torch.critic import TorchCritic
from tests.fsdp.export_work import begins_with, exported, save_trained
from tests.fsdp.work import CONFIG as FSDP_CONFIG
from tests.fsdp.work import random_rows
from tests.megatron import work
from tests.megatron.checkpoints import checkpoint_work
from tests.megatron.test_hugging_face import FAMILIES
from tests.megatron.work import LAYOUTS, config_of, random_groups
from tests.rank_pool import RankPool
from tests.workloads.torch_workloads import bind

pytestmark = pytest.mark.slow

Weights = dict[str, np.ndarray[Any, Any]]
BACK_ENDS = ("torch", "megatron", "fsdp")
TOKENIZER = {"tokenizer.json": "{}", "generation_config.json": '{"eos_token_id": 3}'}
SENTENCES = {"torch": "plain torch", "megatron": "Megatron's ranks", "fsdp": "FSDP2's ranks"}


@pytest.fixture(scope="module")
def megatrons() -> Iterator[RankPool]:
    made = RankPool(2, preload="tests.fsdp.preload")
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(Home(tmp_path).database_url()) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = work.write_folder(tmp_path_factory.mktemp("model") / "tied", FAMILIES["qwen3-tied"])
    for name, content in TOKENIZER.items():
        (folder / name).write_text(content)
    return folder


def job_on(model: Path, layout: str = "tp2") -> dict[str, Any]:
    return {**config_of(layout), "model_path": str(model)}


def begun(
    store: Store, home: Path, config: dict[str, Any], source: Path, **changes: Any
) -> tuple[dict[str, Any], list[str]]:
    """The `config` of a job that begins with a source, which is then gone, and what it says of that."""
    roles = {"trainer": {}, "actor": {}, "rollout": {}, "reward": {}}
    job = {
        "name": "second",
        "recipe": "grpo",
        "device_type": "CPU",
        "device_per_node": 8,
        "roles": roles,
    } | changes
    spec = compile_job(parse_job({**job, "config": config})).spec
    with first_weights(store, Home(home), spec, "second-1", source, trust=False) as (taken, notes):
        shutil.rmtree(source)
    return taken.config, notes


def torchs_checkpoint(model: Path, folder: Path) -> Weights:
    actor = bind(TorchActor(), {**job_on(model), "seed": 4})
    try:
        groups = random_groups(0, 4)
        actor.accumulate(groups, step=1, index=0)
        actor.apply(step=1, indices=1, group_ids=[group.id for group in groups])
        actor.checkpoint(folder)
        return {name: tensor.detach().numpy().copy() for name, tensor in actor.weights().items()}
    finally:
        actor.teardown()


def checkpoint_by(back_end: str, model: Path, folder: Path, pool: RankPool, megatrons: RankPool) -> Weights:
    """A checkpoint after a step, by ranks of the back end; the weights in it."""
    if back_end == "torch":
        return torchs_checkpoint(model, folder)
    if back_end == "megatron":
        folder.mkdir()
        write = partial(checkpoint_work.train_and_checkpoint, background=False)
        found = megatrons.run(write, 2, job_on(model), [[random_groups(0, 4)]], folder)
        weights: Weights = found[0]["after"]["weights"]
        return weights
    pool.run(save_trained, 2, model, FSDP_CONFIG, folder, random_rows(6, seed=3))
    pool.run(exported, 1, [str(folder), str(folder.with_name("seen"))])
    return {
        name: one.numpy().copy()
        for name, one in SafetensorsFolder(folder.with_name("seen")).tensors().items()
    }


def weights_of_torchs(config: dict[str, Any]) -> Weights:
    actor = bind(TorchActor(), config)
    try:
        actor.warm_start()
        return {name: tensor.detach().numpy().copy() for name, tensor in actor.weights().items()}
    finally:
        actor.teardown()


def same(found: Weights, wanted: Weights) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("source", BACK_ENDS)
def test_every_back_end_begins_with_a_checkpoint_of_every_other(
    pool: RankPool, megatrons: RankPool, store: Store, model: Path, tmp_path: Path, source: str
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns(*TOKENIZER))
    trained = checkpoint_by(source, bare, tmp_path / "trained", pool, megatrons)
    config, notes = begun(store, tmp_path, job_on(model), tmp_path / "trained")
    assert notes == [
        f"begins with the weights of {tmp_path / 'trained'}, which {SENTENCES[source]} wrote; "
        "its optimizer begins anew"
    ]
    first = Path(config["first_weights"]["path"])
    assert {name: (first / name).read_text() for name in TOKENIZER} == TOKENIZER
    untrained = {name: one.numpy() for name, one in SafetensorsFolder(model).tensors().items()}
    assert not same(untrained, trained), "it was trained"
    assert same(weights_of_torchs(config), trained)
    assert same(megatrons.run(work.train, LAYOUTS["tp2"][0], config, [])[0]["weights"], trained)
    assert same(pool.run(begins_with, 2, config)[0], trained)


def test_what_does_not_fit_is_refused_before_anything_is_read(
    pool: RankPool, megatrons: RankPool, store: Store, model: Path, tmp_path: Path
) -> None:
    """Another shape, another family, a tied model for an untied one, whoever wrote it, and a critic for an actor."""
    others = {
        name: work.write_folder(tmp_path / name, {**FAMILIES["qwen3-tied"], **changes})
        for name, changes in (
            ("deeper", {"num_hidden_layers": FAMILIES["qwen3-tied"]["num_hidden_layers"] + 1}),
            ("untied", {"tie_word_embeddings": False}),
        )
    } | {"llama": work.write_folder(tmp_path / "llama", FAMILIES["llama"])}
    sentences = {
        "deeper": "num_hidden_layers is",
        "untied": "tie_word_embeddings is true instead of false",
        "llama": "model_type is qwen3 instead of llama",
    }
    for back_end in BACK_ENDS:
        folder = tmp_path / f"by-{back_end}"
        checkpoint_by(back_end, model, folder, pool, megatrons)
        shutil.rmtree(tmp_path / "seen", ignore_errors=True)
        for name, other in others.items():
            with pytest.raises(ConfigError, match=f"{folder} is not this job's: .*{sentences[name]}"):
                begun(store, tmp_path, job_on(other), folder)
            assert folder.is_dir()
            assert not (tmp_path / "jobs" / "second-1").exists()
        critics(back_end, model, folder)
        with pytest.raises(ConfigError, match="is not of a policy"):
            begun(store, tmp_path, job_on(model), folder)


@pytest.mark.slow
def test_a_model_that_only_transformers_knows(
    pool: RankPool, store: Store, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """From its checkpoint and from its folder; a model of another number of experts, of another type, and another
    folder's tensors are refused, and so is every such model by a job of another back end."""
    model, out, fewer = folder_of("mixtral"), tmp_path / "out", tmp_path / "fewer"
    pool.run(save_trained, 2, model, FSDP_CONFIG, tmp_path / "trained", random_rows(6, seed=3))
    pool.run(save_trained, 1, folder_of("qwen3_moe"), FSDP_CONFIG, tmp_path / "other", random_rows(3))
    pool.run(exported, 1, [str(tmp_path / "trained"), str(out)])
    trained = {name: one.numpy().copy() for name, one in SafetensorsFolder(out).tensors().items()}
    shutil.copytree(model, fewer)
    described = json.loads((model / "config.json").read_text())
    (fewer / "config.json").write_text(json.dumps({**described, "num_local_experts": 2}))
    engine = {"backend": "fsdp", "rollouts": {"engine": "sglang"}}
    for config, source, changes, sentence in (
        (job_on(fewer), tmp_path / "trained", engine, "num_local_experts is 4 instead of 2"),
        (job_on(model), tmp_path / "other", engine, "model_type is qwen3_moe instead of mixtral"),
        (job_on(fewer), fewer, engine, r"tensor model\.layers\.0\..* is \(4, 32\), the model's is \(2, 32\)"),
        (job_on(model), tmp_path / "trained", {}, "is not supported"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            begun(store, tmp_path, config, source, **changes)
        assert source.is_dir()
    for source in (out, tmp_path / "trained"):
        config, _ = begun(store, tmp_path, job_on(model), source, **engine)
        assert same(pool.run(begins_with, 2, config)[0], trained)
        shutil.rmtree(tmp_path / "jobs")


def critics(back_end: str, model: Path, folder: Path) -> None:
    """Make it a critic's checkpoint."""
    if back_end == "torch":
        shutil.rmtree(folder)
        critic = bind(TorchCritic(), job_on(model))
        critic.checkpoint(folder)
        critic.teardown()
        return
    book = json.loads((folder / "actor.json").read_text())
    held = book if back_end == "megatron" else book["metadata"]
    held["model"] = None
    (folder / "actor.json").write_text(json.dumps(sealed(book)))
