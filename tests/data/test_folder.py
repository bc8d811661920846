"""The prepared folder on disk: every bit is covered, and a folder that is replaced is not read half and half."""

from __future__ import annotations

import gc
import json
import os
import shutil

import numpy as np
import pytest

from gyre.data.folder import PreparedFolder
from gyre.data.prepare import PromptRecipe, prepare
from gyre.data.prepared import PreparedData
from gyre.errors import ConfigError
from gyre.rollouts.samples import OWN_LIMIT
from tests.data.small import write_lines, write_tokenizer

ROWS = 40
SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "mlp": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def made(folder, model, *, plus=0):
    rows = [{"prompt": f"What is {n} plus {plus}?", "answer": str(n + plus)} for n in range(ROWS)]
    source = write_lines(folder.with_suffix(".jsonl"), rows)
    prepare(source, folder, model, PromptRecipe())
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    return made(tmp_path_factory.mktemp("prepared") / "data", model)


FILES = (
    "tokens.npy",
    "offsets.npy",
    "hashes.npy",
    "meta.jsonl",
    "meta.npy",
    "checks.npy",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
)


def data_of(folder, **section):
    return PreparedData({"data": {"path": str(folder), **section}})


def everything(data):
    return [(data.prompt(n).prompt_ids.tolist(), data.prompt(n).meta) for n in range(ROWS)]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("at", [0.0, 0.6, 1.0])
def test_a_bit_that_flips_is_refused(tmp_path, folder, name, at):
    copy = shutil.copytree(folder, tmp_path / "copy")
    digest = PreparedFolder(folder).manifest["digest"]
    assert everything(data_of(copy, digest=digest)) == everything(data_of(folder))
    content = bytearray((copy / name).read_bytes())
    content[round(at * (len(content) - 1))] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(ConfigError, match="changed since it was written"):
        data_of(copy, digest=digest)
    assert PreparedFolder(folder).verify() == []
    if name.endswith(".npy") and at == 0.0:
        return  # the head of tokens.npy is not read
    if not name.startswith("tokenizer"):
        with pytest.raises(ConfigError, match="has changed since it was written"):
            everything(data_of(copy))


@pytest.mark.parametrize(
    "key", ["rows", "stop_token_ids", "vocab_size", "tokenizer", "largest_token", "files"]
)
def test_a_manifest_that_was_edited_is_refused(tmp_path, folder, key):
    copy = shutil.copytree(folder, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {key: []}))
    with pytest.raises(ConfigError, match="has changed since it was written"):
        data_of(copy)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["cut", "gone"])
def test_a_file_that_is_cut_or_gone_is_refused(tmp_path, folder, name, change):
    copy = shutil.copytree(folder, tmp_path / "copy")
    if change == "cut":
        os.truncate(copy / name, (copy / name).stat().st_size - 1)
    else:
        (copy / name).unlink()
    with pytest.raises(ConfigError, match="is missing or has changed"):
        data_of(copy)


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        ("{}", "is no prepared data set"),
        ("[]", "has changed since it was written"),
        ("{", "has changed since it was written"),
        ('{"format": 1, "rows": 1, "files": {}}', "has format 1, this Gyre reads 2.*Prepare it again"),
        (None, "is no prepared data set.*gyre data prepare"),
    ],
)
def test_what_is_no_prepared_data_set(tmp_path, manifest, sentence):
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(ConfigError, match=sentence):
        data_of(tmp_path)


def test_a_folder_that_is_replaced_is_read_as_it_was(tmp_path, model):
    path = made(tmp_path / "data", model)
    data, same = data_of(path), data_of(path)
    before, identity = everything(data), data.identity
    shutil.rmtree(path)
    made(path, model, plus=5)
    assert everything(same) == before
    assert same.identity == identity
    assert data_of(path).identity != identity
    assert everything(data_of(path)) != before


def test_a_folder_that_is_written_over_in_place_is_noticed(tmp_path, model):
    path, other = made(tmp_path / "data", model), made(tmp_path / "other", model, plus=5)
    data = data_of(path)
    before = data.prompt(0)
    for name in ("tokens.npy", "meta.jsonl"):
        (path / name).write_bytes((other / name).read_bytes())
    with pytest.raises(ConfigError, match="has changed since it was written: row"):
        everything(data)
    os.truncate(path / "tokens.npy", 0)
    with pytest.raises(ConfigError, match="has changed since it was written: row"):
        data.prompt(0)
    assert before.meta["answer"]


def test_the_files_of_a_folder_that_is_no_longer_used_are_closed(folder):
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = open_files()
    data = data_of(folder)
    data.prompt(0)
    assert open_files() > before
    del data
    gc.collect()
    assert open_files() == before


def test_a_held_out_set_of_another_tokenizer_is_refused(tmp_path, model, folder):
    other = write_tokenizer(tmp_path / "other")
    saved = json.loads((other / "tokenizer.json").read_text())
    vocab = saved["model"]["vocab"]
    saved["model"]["vocab"] = dict(zip(vocab, reversed(vocab.values()), strict=True))
    (other / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="was prepared with another tokenizer"):
        data_of(folder, held_out=str(made(tmp_path / "aside", other)))


def test_a_held_out_answer_has_the_room_that_the_model_leaves_by_its_own_limit(folder, tmp_path, model):
    aside = made(tmp_path / "aside", model, plus=1)
    longest = int(max(PreparedFolder(one).lengths.max() for one in (folder, aside)))
    data = PreparedData(
        {
            "data": {"path": str(folder), "held_out": {"one": str(aside)}},
            "model": SHAPE | {"max_positions": longest + 8},
            "sampling": {"max_new_tokens": 8},
            "evaluation": {"max_new_tokens": 1000},
        }
    )
    for prompt in data.held_out_sets(ROWS)["one"]:
        assert prompt.token_limit(1000) == longest + 8 - len(prompt.prompt_ids)


def test_a_prompt_s_answer_has_the_room_that_the_model_leaves(folder):
    longest = int(PreparedFolder(folder).lengths.max())

    def data(positions):
        return PreparedData(
            {
                "data": {"path": str(folder), "shuffle": False},
                "model": SHAPE | {"max_positions": positions},
                "sampling": {"max_new_tokens": 8},
            }
        )

    roomy, narrow = data(longest + 8), data(longest + 3)
    assert all(OWN_LIMIT not in roomy.prompt(n).meta for n in range(ROWS))
    limits = [narrow.prompt(n).token_limit(8) for n in range(ROWS)]
    assert limits == [min(8, longest + 3 - len(narrow.prompt(n).prompt_ids)) for n in range(ROWS)]
    assert min(limits) == 3
    full = int(np.argmax(PreparedFolder(folder).lengths))
    with pytest.raises(
        ConfigError, match=rf"row {full} .* no room for an answer in config\.model\.max_positions"
    ):
        data(longest).prompt(full)
