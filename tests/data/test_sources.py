"""Data sets on disk, as they come: lines, Parquet, what `save_to_disk` wrote, and a folder from the Hub."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from gyre.data.sources import files_of, read_rows
from gyre.errors import ConfigError
from tests.data.small import gsm8k_rows, openr1_rows, write_lines


def arrow(path, rows):
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


def saved_to_disk(folder, rows):
    """As Hugging Face's `Dataset.save_to_disk` lays it out."""
    folder.mkdir(parents=True)
    half = len(rows) // 2
    names = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, (rows[:half], rows[half:]), strict=True):
        arrow(folder / name, part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize("rows", [gsm8k_rows(), openr1_rows()], ids=["gsm8k", "openr1"])
def test_every_form_gives_the_same_rows(tmp_path, rows):
    write_lines(tmp_path / "lines.jsonl", rows)
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n\n" for row in rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "one.parquet")
    saved_to_disk(tmp_path / "saved", rows)
    saved_to_disk(tmp_path / "both" / "train", rows)
    saved_to_disk(tmp_path / "both" / "test", rows[:2])
    (tmp_path / "both" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    hub = tmp_path / "hub" / "main"
    hub.mkdir(parents=True)
    for name, part in (
        ("train-00000-of-00002", rows[:2]),
        ("train-00001-of-00002", rows[2:]),
        ("test", rows[:1]),
    ):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), hub / f"{name}.parquet")
    for name in ("lines.jsonl", "lines.jsonl.gz", "one.parquet", "saved", "both", "hub"):
        assert list(read_rows(tmp_path / name)) == rows, name
    assert list(read_rows(tmp_path / "both", "test")) == rows[:2]
    assert list(read_rows(tmp_path / "hub", "test")) == rows[:1]
    for name in ("both", "hub"):
        with pytest.raises(ConfigError, match="no split 'validation'"):
            files_of(tmp_path / name, "validation")


CARD = """\
---
license: mit
configs:
- config_name: all
  data_files:
  - split: train
    path: all/train-*
- config_name: {default}
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: [data/test.jsonl]
- config_name: broken
  data_files:
  - split: train
    path: [nowhere/*, "", /absolute/*]
---
# A data set
"""


def cloned(folder, card=""):
    """As OpenR1-Math-220k comes from the Hub: the same questions in several folders."""
    for name, rows in (("all", openr1_rows()), ("data", openr1_rows()[:2])):
        (folder / name).mkdir(parents=True)
        write_lines(folder / name / "train-00000-of-00001.jsonl", rows)
    write_lines(folder / "data" / "test.jsonl", openr1_rows()[:1])
    if card:
        (folder / "README.md").write_text(card)
    return folder


def test_a_card_names_no_file_outside_its_folder(tmp_path):
    cloned(tmp_path / "other")
    card = CARD.format(default="default").replace("data/train-*", "../other/data/train-*")
    with pytest.raises(ConfigError, match="which is outside of the folder"):
        files_of(cloned(tmp_path / "carded", card), "train", "")


def test_of_several_subsets_one_is_read(tmp_path):
    carded = cloned(tmp_path / "carded", CARD.format(default="default"))
    assert list(read_rows(carded)) == openr1_rows()[:2]
    assert list(read_rows(carded, subset="all")) == openr1_rows()
    assert list(read_rows(carded, "test")) == openr1_rows()[:1]
    plain = cloned(tmp_path / "plain", "---\nno: [yaml\n---\n")
    assert list(read_rows(plain, subset="data")) == openr1_rows()[:2]
    assert list(read_rows(plain, "test")) == openr1_rows()[:1], "no other folder has it"
    undecided = cloned(tmp_path / "undecided", CARD.format(default="extended"))
    for path, split, subset, sentence in (
        (undecided, "train", "", "several subsets: all, extended, broken"),
        (undecided, "train", "main", "no subset 'main'; there are all, extended, broken"),
        (undecided, "test", "all", "'all' of .* has no split 'test'; there are train"),
        (undecided, "train", "broken", "names nowhere/\\* for 'broken'.*git lfs pull"),
        (plain, "train", "", "holds 'train' more than once, in all, data.*--subset"),
        (plain, "train", "main", "does not exist"),
        (plain / "data" / "test.jsonl", "train", "main", "has no subset 'main'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            files_of(path, split, subset)


def test_shards_below_their_split_s_folder_are_one_data_set(tmp_path):
    for part in ("a", "b"):
        (tmp_path / "train" / part).mkdir(parents=True)
        write_lines(tmp_path / "train" / part / "rows.jsonl", [{"part": part}])
    (tmp_path / "test").mkdir()
    write_lines(tmp_path / "test" / "rows.jsonl", [{"part": "c"}])
    assert list(read_rows(tmp_path)) == [{"part": "a"}, {"part": "b"}]


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"a": 1}\nnonsense\n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", "[1]\n", r"line 1: a list"),
        ("a.xlsx", "a,b\n", "unknown kind"),
        ("a.jsonl", b'{"a": "\xff"}\n', r"a\.jsonl cannot be read: .*utf-8"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9], r"cannot be read.*incomplete"),
        ("a.jsonl.gz", b'{"a": 1}\n', r"cannot be read: Not a gzipped file"),
        ("a.parquet", LFS_POINTER, r"a\.parquet cannot be read: .*Git LFS"),
        ("a.arrow", LFS_POINTER, r"a\.arrow cannot be read: .*Git LFS"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=sentence):
        list(read_rows(tmp_path / name))


def test_nothing_there_is_told(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        files_of(tmp_path / "absent")
    with pytest.raises(ConfigError, match="holds no JSONL"):
        files_of(tmp_path)


@pytest.mark.parametrize(
    ("file", "split", "sentence"),
    [
        ("test.jsonl", "train", "has no split 'train'; there are test"),
        ("data/val.csv", "train", "has no split 'train'"),
        ("rows.jsonl", "test", "has no split 'test'"),
        ("rows.jsonl", "train", None),
        ("test.jsonl", "test", None),
    ],
)
def test_a_folder_s_only_file_is_not_taken_for_another_split(tmp_path, file, split, sentence):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    write_lines(tmp_path / file, [{"a": 1}])
    if sentence is None:
        assert files_of(tmp_path, split) == [tmp_path / file] == files_of(tmp_path / file, split)
        return
    with pytest.raises(ConfigError, match=sentence):
        files_of(tmp_path, split)
    if split != "train":
        with pytest.raises(ConfigError, match="is a file, and has no split 'test'"):
            files_of(tmp_path / file, split)


def test_one_split_in_two_kinds_is_not_read_twice(tmp_path):
    write_lines(tmp_path / "train.jsonl", [{"a": "1"}])
    (tmp_path / "train.csv").write_text("a\n1\n")
    with pytest.raises(ConfigError, match=r"holds 'train' as \.csv and as \.jsonl"):
        files_of(tmp_path)


def test_what_the_hub_s_client_leaves_in_a_folder_is_no_data(tmp_path):
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    write_lines(tmp_path / ".cache" / "huggingface" / "train.json", [{"a": 2}])
    write_lines(tmp_path / "train.jsonl", [{"a": 1}])
    assert list(read_rows(tmp_path)) == [{"a": 1}]


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("openai/gsm8k", "hf download --repo-type dataset openai/gsm8k --local-dir gsm8k"),
        ("https://huggingface.co/datasets/openai/gsm8k", "hf download --repo-type dataset openai/gsm8k "),
        ("data/train.jsonl", None),
        ("gsm8k", None),
        ("/openai/gsm8k", None),
        ("here/gsm8k", None),
    ],
)
def test_a_name_on_the_hub_comes_with_the_command_that_downloads_it(tmp_path, monkeypatch, path, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(ConfigError, match="does not exist") as raised:
        files_of(Path(path))
    assert (command or "") in raised.value.hint
    assert bool(command) == ("hf download" in raised.value.hint)
