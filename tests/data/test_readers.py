"""Files of rows of every kind give the same rows; what cannot be read is named with its file and line."""

from __future__ import annotations

import datetime
import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gyre.data.readers import rows_of
from gyre.errors import ConfigError

ROWS = [{"q": "a,b", "a": "1"}, {"q": 'say "é"\nagain', "a": ""}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'q,a\r\n"a,b",1\r\n"say ""é""\nagain",\r\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl", LINES.replace("\n", "\r\n") + "\r\n"),
        ("a.json", LINES),
        ("a.json", json.dumps(ROWS)),
        ("a.json", json.dumps(ROWS, indent=2)),
        ("a.json", json.dumps({"data": ROWS, "version": "1"})),
        ("a.json", json.dumps({"train": ROWS, "data": []})),
        (
            "a.json",
            json.dumps({"features": [], "rows": [{"row_idx": n, "row": row} for n, row in enumerate(ROWS)]}),
        ),
        ("a.csv", CSV),
        ("A.CSV", CSV),
        (
            "a.tsv",
            CSV.replace('"a,b"', "a,b")
            .replace("q,a", "q\ta")
            .replace("b,1", "b\t1")
            .replace('again",', 'again"\t'),
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_every_kind_gives_the_same_rows(tmp_path, name, text, packed, mark):
    data = mark + text.encode()
    file = tmp_path / (name + (".gz" if packed else ""))
    file.write_bytes(gzip.compress(data) if packed else data)
    assert list(rows_of(file)) == ROWS


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.json", '{"prompt": [{"role": "user"}]}', [{"prompt": [{"role": "user"}]}]),
        ("a.json", '{"prompt": "x",\n "answer": "1"}', [{"prompt": "x", "answer": "1"}]),
        ("a.json", "", []),
        ("a.csv", "", []),
        ("a.csv", "q,a\n\n", []),
        ("a.csv", "q,a\n" + "x" * 200_000 + ",1\n", [{"q": "x" * 200_000, "a": "1"}]),
        ("a.csv", "q\nx\n", [{"q": "x"}]),
        ("a.jsonl", '{"a": "\\u2028\u2028\u0085"}\n', [{"a": "\u2028\u2028\u0085"}]),
    ],
)
def test_files_at_the_edges(tmp_path, name, text, rows):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert list(rows_of(tmp_path / name)) == rows


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": 1, "a": 2}\n', r"line 2: the key 'a' stands twice"),
        (
            "a.jsonl",
            '{"a": ' + "[" * 200_000 + "\n",
            "line 1: (lists and mappings are nested too deeply|not JSON)",
        ),
        ("a.json", '[{"a": 1}, 2]', r"a\.json, row 2: a int, not a mapping"),
        ("a.json", '[{"a": 1}', r"a\.json: not JSON"),
        ("a.json", "3", r"a\.json: a int, neither rows nor an array"),
        ("a.csv", "q,a\nx\n", "line 2: 1 cells for 2 columns"),
        ("a.csv", "q,a\nx,1,2\n", "line 2: 3 cells for 2 columns"),
        ("a.csv", 'q,a\n"x,1\n', "line 2: unexpected end of data"),
        ("a.csv", "q;a\nx;1\n", "is one column.*commas"),
        ("a.tsv", "q,a\nx,1\n", "is one column.*tabs"),
        ("a.csv", "q,q\nx,1\n", "the column 'q' stands twice"),
        ("a.csv", ",q\n0,x\n", "has no name.*index=False"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){sentence}"):
        list(rows_of(tmp_path / name))


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.table([["x"], ["y"]], names=["q", "q"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: the column 'q' is there twice"):
        list(rows_of(tmp_path / "a.parquet"))


def test_parquet_and_arrow_keep_structure(tmp_path):
    table = pyarrow.table(
        {
            "q": ["x"],
            "info": pyarrow.array([{"index": 7, "tags": ["a"]}]),
            "map": pyarrow.array([[("k", 1)]], type=pyarrow.map_(pyarrow.string(), pyarrow.int64())),
            "when": pyarrow.array([datetime.datetime(2026, 1, 31, 12)]),
        }
    )
    rows = [
        {
            "q": "x",
            "info": {"index": 7, "tags": ["a"]},
            "map": {"k": 1},
            "when": datetime.datetime(2026, 1, 31, 12),
        }
    ]
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    with (
        pyarrow.OSFile(str(tmp_path / "c.arrow"), "wb") as file,
        pyarrow.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    with (
        pyarrow.OSFile(str(tmp_path / "d.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    for file in sorted(tmp_path.iterdir()):
        assert list(rows_of(file)) == rows, file.name


LEAST_COMPARED = {".parquet": 6, ".arrow": 9}
"""Of the types below; pyarrow does not write each of them into each file."""


def of_short_floats(short):
    """Arrow types with short floats somewhere, values of theirs, and what these stand for where that is no float."""
    number = 0.1
    yield short, number, number
    for kind in (pyarrow.list_, pyarrow.large_list, pyarrow.list_view, pyarrow.large_list_view):
        yield kind(short), [number, None], [number, None]
    yield pyarrow.list_(short, 2), [number, number], [number, number]
    yield pyarrow.map_(pyarrow.string(), short), [("k", number)], {"k": number}
    yield pyarrow.map_(pyarrow.string(), pyarrow.list_(short)), [("k", [number])], {"k": [number]}
    yield pyarrow.struct([("a", short), ("b", pyarrow.int8())]), {"a": number, "b": 1}, {"a": number, "b": 1}
    yield (
        pyarrow.list_(pyarrow.struct([("a", pyarrow.list_(short, 1))])),
        [{"a": [number]}],
        [{"a": [number]}],
    )


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("bits", [16, 32])
def test_a_short_float_is_the_number_that_was_written_wherever_it_stands(tmp_path, bits, suffix):
    short = pyarrow.float16() if bits == 16 else pyarrow.float32()
    compared = 0
    for number, (told, value, wanted) in enumerate(of_short_floats(short)):
        values = [np.float16(0.1), None] if bits == 16 and told == short else [value, None]
        try:
            column = pyarrow.array(_halves(values) if bits == 16 else values, told)
        except pyarrow.ArrowException:  # pyarrow makes none of such
            continue
        found = _read_again(tmp_path / f"{number}{suffix}", column)
        if found is not None:
            assert found == [wanted, None], told
            compared += 1
    assert compared >= LEAST_COMPARED[suffix]
    if bits == 32:
        words = pyarrow.array([0.1, 0.2, 0.1], short).dictionary_encode()
        assert _read_again(tmp_path / f"d{suffix}", words) == [0.1, 0.2, 0.1]


def _halves(value):
    if isinstance(value, float):
        return np.float16(value)
    if isinstance(value, list | tuple):
        return type(value)(_halves(one) for one in value)
    return {key: _halves(one) for key, one in value.items()} if isinstance(value, dict) else value


def _read_again(file, column):
    """The column as a reader of its file has it; None where pyarrow does not write it."""
    try:
        _write(pyarrow.table({"a": column}), file)
    except (pyarrow.ArrowException, NotImplementedError):
        return None
    return [row["a"] for row in rows_of(file)]


def _write(table, file):
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        with (
            pyarrow.OSFile(str(file), "wb") as opened,
            pyarrow.ipc.new_stream(opened, table.schema) as stream,
        ):
            stream.write_table(table)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_float_of_32_bits_is_the_number_that_was_written(tmp_path, suffix):
    short = pyarrow.float32()
    table = pyarrow.table(
        {
            "a": pyarrow.array([0.1, None, 1e30], short),
            "l": pyarrow.array([[0.1, None], None, []], pyarrow.list_(short)),
            "s": pyarrow.array([{"x": [{"y": 0.3}]}, None, {"x": None}],
                               pyarrow.struct([("x", pyarrow.large_list(pyarrow.struct([("y", short)])))])),
            "d": [0.1, 0.2, 0.3],
        }
    )  # fmt: skip
    file = tmp_path / f"a{suffix}"
    _write(table, file)
    assert list(rows_of(file)) == [
        {"a": 0.1, "l": [0.1, None], "s": {"x": [{"y": 0.3}]}, "d": 0.1},
        {"a": None, "l": None, "s": None, "d": 0.2},
        {"a": 1e30, "l": [], "s": {"x": None}, "d": 0.3},
    ]
