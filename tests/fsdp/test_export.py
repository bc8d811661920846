"""A checkpoint of FSDP2's ranks as a folder that transformers opens: the trained model, or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.workloads.gang.state_files import sealed
from tests.fsdp.export_work import exported, largest_in_memory, opened, save_trained
from tests.fsdp.test_backend import relative
from tests.fsdp.test_checkpoints import altered, flip
from tests.fsdp.work import CONFIG, MODELS, fsdp, random_rows
from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow

ROWS = random_rows(6, seed=3)
BESIDE = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}", "README.md": "theirs"}


def trained(
    pool: RankPool, model: Path, path: Path, *, ranks: int = 2, config: dict[str, Any] = CONFIG
) -> Any:
    """What the model said whose checkpoint is at `path`."""
    return pool.run(save_trained, ranks, model, config, path, ROWS)[0]


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_opens_what_was_trained(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    model, path, out = tmp_path / "model", tmp_path / "checkpoint", tmp_path / "out"
    shutil.copytree(folder_of(kind), model)
    for name, content in BESIDE.items():
        (model / name).write_text(content)
    generation = json.loads((model / "generation_config.json").read_text()) | {"eos_token_id": [2, 46]}
    (model / "generation_config.json").write_text(json.dumps(generation))
    said = trained(pool, model, path)
    (told,) = pool.run(exported, 1, [str(path), str(out), "--json"])
    assert told[0] == 0, told[2]
    (found,) = pool.run(opened, 1, out, ROWS)
    assert relative(found["said"], said) < 1e-5
    (before,) = pool.run(opened, 1, model, ROWS)
    assert relative(before["said"], said) > 1e-3, "it was trained"
    assert found["problems"] == {}
    assert found["dtype"] == "torch.float32"
    assert found["tied"] == before["tied"]
    assert (found["generated"], found["ends"]) == (7, [2, 46])
    weights, theirs = SafetensorsFolder(out).tensors(), SafetensorsFolder(model).tensors()
    assert {name: one.shape for name, one in weights.items()} == {
        name: one.shape for name, one in theirs.items()
    }, "as transformers writes it"
    assert json.loads(told[1]) == {
        "step": 7,
        "tensors": len(weights),
        "size_bytes": sum(one.nbytes for one in weights.values()),
        "dtype": "float32",
    }
    held = {file.name for file in out.iterdir()}
    assert held == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja",
    }  # fmt: skip


def test_what_was_trained_with_an_attention_of_transformers_own_is_exported(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    path, out = tmp_path / "checkpoint", tmp_path / "out"
    said = trained(pool, folder_of("gpt_neo"), path, config=fsdp(attention="eager"))
    (told,) = pool.run(exported, 1, [str(path), str(out)])
    assert told[0] == 0, told[2]
    (found,) = pool.run(opened, 1, out, ROWS)
    assert relative(found["said"], said) < 1e-5


def test_the_dtype_is_that_in_which_it_was_served_or_the_one_that_is_asked_for(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    trained(pool, folder_of("qwen3_moe"), path, config=fsdp(dtype="bfloat16"))
    pool.run(exported, 1, [str(path), str(tmp_path / "served")])
    pool.run(exported, 1, [str(path), str(tmp_path / "masters"), "--dtype", "float32"])
    served = SafetensorsFolder(tmp_path / "served").tensors()
    masters = SafetensorsFolder(tmp_path / "masters").tensors()
    for name, one in masters.items():
        assert (one.dtype, served[name].dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(one.bfloat16(), served[name])
    assert any(not torch.equal(one, served[name].float()) for name, one in masters.items())
    for folder, dtype in (("served", "bfloat16"), ("masters", "float32")):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["dtype"] == dtype
        (found,) = pool.run(opened, 1, tmp_path / folder, ROWS)
        assert found["dtype"] == f"torch.{dtype}"


def test_no_more_is_in_memory_than_a_file_holds(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    path, out, most = tmp_path / "checkpoint", tmp_path / "out", 20_000
    said = trained(pool, folder_of("llama"), path, ranks=4)
    (held,) = pool.run(largest_in_memory, 1, path, out, most)
    largest = max(one.nbytes for one in SafetensorsFolder(out).tensors().values())
    assert held <= most + 2 * largest
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    assert relative(pool.run(opened, 1, out, ROWS)[0]["said"], said) < 1e-5


def of_a_critic(path: Path) -> None:
    book = json.loads((path / "actor.json").read_text())
    (path / "actor.json").write_text(json.dumps(sealed({**book, "metadata": {"step": 1, "model": None}})))


def of_another_model(path: Path) -> None:
    book = json.loads((path / "actor.json").read_text())
    book["metadata"]["model"]["config"]["intermediate_size"] = 64
    (path / "actor.json").write_text(json.dumps(sealed(book)))


def with_another_digest(path: Path) -> None:
    book = json.loads((path / "actor.json").read_text())
    book["metadata"]["digest"] = "0" * 32
    (path / "actor.json").write_text(json.dumps(sealed(book)))


HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "critic": (of_a_critic, "is not of a policy"),
    "model": (of_another_model, "the model's is"),
    "digest": (with_another_digest, "are not those that were written"),
    "bit": (lambda path: flip(path / "rank_00001.state"), "is not what was written"),
    "lost": (lambda path: (path / "rank_00001.state").unlink(), "cannot be read"),
    "book": (lambda path: altered(path / "actor.json", lambda one: one.update(ranks=1)), "are not those"),
}


def test_what_is_no_policys_whole_checkpoint_is_refused_and_leaves_nothing(
    pool: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    trained(pool, folder_of("qwen3"), tmp_path / "whole")
    for name, (harm, sentence) in HARMS.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        harm(tmp_path / name)
        (told,) = pool.run(exported, 1, [str(tmp_path / name), str(tmp_path / "out")])
        assert told[0] == 1, name
        assert sentence in told[2], (name, told[2])
    assert {path.name for path in tmp_path.iterdir()} == {"whole", *HARMS}
