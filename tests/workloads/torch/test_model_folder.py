"""Plain torch trains the model of a folder: from a prepared data set, to an export that others open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gyre.config import parse_job
from gyre.data.prepare import prepare
from gyre.data.tokenizer import TextTokenizer
from gyre.errors import ConfigError
from gyre.models.architecture import read_architecture
from gyre.models.modules import Decoder
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.models.tensor_names import from_names
from gyre.rollouts.samples import Group
from gyre.testing.in_process import InProcessJob
from gyre.workloads.base import BaseWorkload, WorkloadContext, operator
from gyre.workloads.learner.trained_model import own_parameters
from gyre.workloads.tasks.same_tokenizer import refuse_other_tokenizer
from gyre.workloads.torch import TorchActor, TorchCritic, TorchReference
from gyre.workloads.torch.saved_policy import export_policy
from tests.data.small import write_lines, write_tokenizer
from tests.engines.embedded.tiny import CONFIGS, write_checkpoint
from tests.export_memory import most_bytes
from tests.fsdp.export_work import opened
from tests.fsdp.work import passes_of
from tests.megatron.work import random_groups
from tests.workloads.torch_workloads import CONFIG, bind


def folder_of(path: Path, kind: str) -> Path:
    """A random model of this kind, with a tokenizer that has all its tokens."""
    write_tokenizer(path)
    vocab = TextTokenizer(path).vocab_size
    write_checkpoint(
        path, {**CONFIGS[kind], "vocab_size": vocab, "torch_dtype": "bfloat16", "eos_token_id": 1}
    )
    return path


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [{"problem": f"What is ${n}+{n}$?", "answer": str(2 * n)} for n in range(12)]
    prepare(write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "data", write_tokenizer(tmp_path / "tok"))
    return str(tmp_path / "data")


def spec_of(folder: Path, data: str) -> dict[str, Any]:
    return {
        "name": "folder",
        "recipe": "grpo",
        "backend": "torch",
        "config": {
            "model_path": str(folder),
            "data": {"path": data},
            "optim": {"lr": 1e-3},
            "sampling": {"n": 2, "max_new_tokens": 6},
            "loss": {"kl_loss_coef": 0.01},
        },
        "run": {
            "steps": 2,
            "prompts_per_step": 4,
            "groups_per_firing": 2,
            "groups_per_micro_batch": 2,
            "evaluate_every": 0,
            "checkpoint_every": 1,
        },
        "roles": {
            "actor": {},
            "rollout": {"entrypoint": "gyre.workloads.torch.rollout:TorchRollout"},
            "reward": {"entrypoint": "tests.workloads.torch.test_model_folder:PlaceReward"},
            "reference": {},
        },
    }


class PlaceReward(BaseWorkload):
    """A sample's place in its group: it differs within a group, whatever is generated."""

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            for place, sample in enumerate(group.samples):
                sample.reward = float(place % 2)
        return groups


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_two_steps_on_a_folders_model_end_in_an_export_that_others_open(
    tmp_path: Path, data: str, kind: str
) -> None:
    folder = folder_of(tmp_path / kind, kind)
    with InProcessJob(parse_job(spec_of(folder, data)), tmp_path / "job") as job:
        result = job.result(timeout_s=120)
        account = job.account()
    assert (result["steps"], account.trained, account.lost) == (2, 8, ())
    out = tmp_path / "out"
    told = export_policy(tmp_path / "job" / "checkpoints" / "step_00000002", out)
    assert (told["step"], told["dtype"]) == (2, "float32")
    config = json.loads((out / "config.json").read_text())
    assert (config["torch_dtype"], config["model_type"]) == ("float32", kind)
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    trained, before = SafetensorsFolder(out).tensors(), SafetensorsFolder(folder).tensors()
    assert trained.keys() == before.keys()
    assert any(not torch.equal(trained[name], before[name]) for name in trained)
    transformers = pytest.importorskip("transformers")
    architecture = read_architecture(out)
    own = Decoder(architecture)
    own.load_state_dict(from_names(trained, architecture), strict=False)
    ids = torch.arange(20)[None] % architecture.vocab
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out)(ids).logits
        assert torch.allclose(theirs, own(ids), atol=1e-4)


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen3", False), (None, True)])
def test_transformers_says_of_an_export_what_the_trained_model_says(
    tmp_path: Path, kind: str | None, tied: bool
) -> None:
    """Of a folder's model and of the small decoder; asked for nothing but the folder's path."""
    pytest.importorskip("transformers")
    config = {**CONFIG}
    if kind is not None:
        described = {**CONFIGS[kind], "tie_word_embeddings": tied}
        config["model_path"] = str(write_checkpoint(tmp_path / "model", described))
    actor = bind(TorchActor(), config)
    try:
        groups = random_groups(0, 4)
        actor.accumulate(groups, step=1, index=0)
        actor.apply(step=1, indices=1, group_ids=[group.id for group in groups])
        actor.checkpoint(tmp_path / "checkpoint")
        rows = [([3, 4], [5, 6, 7, 3, 9], [0.0] * 5), ([8], [4, 4, 11], [0.0] * 3)]
        said = [one.numpy() for one in actor.backend.forward([passes_of([row])[0] for row in rows])]
    finally:
        actor.teardown()
    export_policy(tmp_path / "checkpoint", tmp_path / "out")
    found = opened(0, 1, 0, tmp_path / "out", rows)
    assert np.allclose(found["said"], np.concatenate(said), atol=1e-4)
    assert (found["problems"], found["tied"], found["dtype"]) == ({}, tied, "torch.float32")
    assert found["generated"] == 7


@pytest.mark.many_cases(quick=1)
@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_an_export_has_the_weights_of_one_file_in_memory(tmp_path: Path, dtype: str) -> None:
    shape = {"layers": 6, "hidden": 512, "heads": 8, "kv_heads": 8, "mlp": 2048}
    actor = bind(TorchActor(), {**CONFIG, "model": {**CONFIG["model"], **shape}})
    try:
        actor.checkpoint(tmp_path / "checkpoint")
    finally:
        actor.teardown()
    size = (tmp_path / "checkpoint" / "rank_00000.pt").stat().st_size
    assert size > 96 << 20
    most = most_bytes("torch", tmp_path / "checkpoint", tmp_path / "out", file_bytes=8 << 20, dtype=dtype)
    assert most < 48 << 20
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 5


def bound(vertex: Any, role: str, config: dict[str, Any], directory: Path) -> Any:
    vertex.context = WorkloadContext("j", role, 0, 1, config=config, directory=directory)
    vertex.setup()
    return vertex


def test_actor_critic_and_reference_begin_with_the_folders_weights(tmp_path: Path, data: str) -> None:
    folder = folder_of(tmp_path / "m", "qwen3")
    config = spec_of(folder, data)["config"] | {"critic": {"optim": {"lr": 1e-3}}}
    architecture = read_architecture(folder)
    wanted = own_parameters(SafetensorsFolder(folder), architecture)
    actor = bound(TorchActor(), "actor", config, tmp_path)
    assert actor.warm_start()["steps"] == 0, "a folder's model has no supervised start"
    critic = bound(TorchCritic(), "critic", config, tmp_path)
    reference = bound(TorchReference(), "reference", config, tmp_path)
    assert reference.version == 0
    for held in (actor.backend.model, critic.backend.model.decoder, reference.backend.model):
        found = dict(held.named_parameters())
        assert all(torch.equal(found[name], wanted[name]) for name in found if name != "head.weight")
    actor.save_model(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["torch_dtype"] == "float32"


def renumbered(folder: Path) -> None:
    """The same tokens with other numbers."""
    content = json.loads((folder / "tokenizer.json").read_text())
    names = list(content["model"]["vocab"])
    content["model"]["vocab"] = dict(zip(names, reversed(content["model"]["vocab"].values()), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("role", "kind"), [("actor", TorchActor), ("critic", TorchCritic), ("reference", TorchReference)]
)
def test_a_model_with_another_tokenizer_than_its_data_is_refused_by_whoever_reads_it(
    tmp_path: Path, data: str, role: str, kind: type
) -> None:
    folder = folder_of(tmp_path / "m", "qwen3")
    config = spec_of(folder, data)["config"]
    refuse_other_tokenizer(config, folder, "config.model_path")
    renumbered(folder)
    with pytest.raises(ConfigError, match=r"config\.model_path: the tokenizer in .* \(config\.data\)"):
        bound(kind(), role, config, tmp_path)


def test_what_has_no_tokenizer_is_not_compared(tmp_path: Path, data: str) -> None:
    folder = folder_of(tmp_path / "m", "qwen3")
    renumbered(folder)
    config = spec_of(folder, data)["config"]
    (folder / "tokenizer.json").unlink()
    refuse_other_tokenizer(config, folder, "config.model_path")
    renamed = {**config, "data": {"path": str(tmp_path / "elsewhere")}}
    refuse_other_tokenizer(renamed, folder, "config.model_path")


def test_a_reward_model_is_compared_with_the_model_where_the_data_is_elsewhere(tmp_path: Path) -> None:
    policy, judge = folder_of(tmp_path / "policy", "qwen3"), folder_of(tmp_path / "judge", "qwen2")
    config = {"model_path": str(policy), "data": {"path": str(tmp_path / "elsewhere")}}
    refuse_other_tokenizer(config, judge, "config.reward_model.path")
    renumbered(judge)
    with pytest.raises(ConfigError, match=r"config\.reward_model\.path: .* \(config\.model_path\)"):
        refuse_other_tokenizer(config, judge, "config.reward_model.path")
