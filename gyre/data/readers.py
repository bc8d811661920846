"""Readers of files of rows: JSON lines, JSON, CSV, TSV, Parquet and Arrow, each also packed with gzip.

| kind | rows |
| --- | --- |
| `.jsonl` | one mapping a line |
| `.json` | the same; or an array of mappings, by itself or as `data`, `rows`, `examples` or the split's name |
| `.csv`, `.tsv` | cells are texts, the first line names the columns |
| `.parquet` | structs are mappings, lists are lists |
| `.arrow` | a stream, as `save_to_disk` writes it, or a file |

Text is UTF-8; a byte-order mark is skipped.

This module must not know what a row means, or which files belong together.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from gyre.errors import ConfigError
from gyre.extras import needed

Row = dict[str, Any]

_PLACES = ("data", "rows", "examples")
"""Where a mapping has its array of rows; Hugging Face writes the first two."""


def rows_of(file: Path, split: str = "train") -> Iterator[Row]:
    """The rows of one file. Raises ConfigError with the file, and the line or the row, for what cannot be read."""
    yield from _READERS[kind_of(file)](file, split)


def kind_of(file: Path) -> str:
    """The file's kind, such as `.csv`; "" for one that is not read."""
    name = file.name.lower().removesuffix(".gz")
    return next((kind for kind in _READERS if name.endswith(kind)), "")


def _lines(file: Path, split: str) -> Iterator[Row]:
    with _text(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(file, f"line {number}", _parsed(file, f"line {number}", line))


def _json(file: Path, split: str) -> Iterator[Row]:
    with _text(file) as lines:
        first = next((line for line in lines if line.strip()), "")
        is_first_of_lines = first.lstrip().startswith("{") and _is_whole(first) and any(map(str.strip, lines))
    if is_first_of_lines or not first:
        yield from _lines(file, split)
        return
    with _text(file) as whole:
        content = whole.read()
    found = _parsed(file, "", content)
    if isinstance(found, dict):
        places = [key for key in (split, *_PLACES) if isinstance(found.get(key), list)]
        if not places:
            yield _row(file, "row 1", found)
            return
        found = found[places[0]]
    if not isinstance(found, list):
        raise ConfigError(f"{file}: a {type(found).__name__}, neither rows nor an array of rows.")
    for number, one in enumerate(found, start=1):
        row = _row(file, f"row {number}", one)
        # The Hub's data-set viewer wraps each row.
        yield _row(file, f"row {number}", row["row"]) if {"row_idx", "row"} <= row.keys() else row


def _parsed(file: Path, where: str, text: str) -> Any:
    place = f"{file}, {where}" if where else str(file)
    try:
        return json.loads(text, object_pairs_hook=_no_key_twice)
    except _KeyTwice as error:
        raise ConfigError(f"{place}: the key {error.args[0]!a} stands twice in one mapping.") from None
    except ValueError as error:
        one_a_line = (
            "The file must have one row per line." if where else "The file must be rows or an array of rows."
        )
        raise ConfigError(f"{place}: not JSON: {error}.", hint=one_a_line) from error
    except RecursionError:
        raise ConfigError(f"{place}: lists and mappings are nested too deeply.") from None


class _KeyTwice(Exception):
    pass


def _no_key_twice(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _KeyTwice(next(key for key in keys if keys.count(key) > 1))
    return found


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _row(file: Path, where: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"{file}, {where}: a {type(row).__name__}, not a mapping.")
    return row


def _csv(file: Path, split: str) -> Iterator[Row]:
    separator = "\t" if kind_of(file) == ".tsv" else ","
    csv.field_size_limit(
        sys.maxsize
    )  # a worked solution may be longer than the 128 KiB of the library's default
    with _text(file, newline="") as lines:
        reader = csv.reader(lines, delimiter=separator, strict=True)
        try:
            columns = next(reader, [])
            _check_header(file, columns)
            for cells in reader:
                if cells and len(cells) != len(columns):
                    raise ConfigError(
                        f"{file}, line {reader.line_num}: {len(cells)} cells for {len(columns)} columns.",
                        hint="A cell with the separator, a quote or a line's end in it stands in double quotes.",
                    )
                if cells:
                    yield dict(zip(columns, cells, strict=True))
        except csv.Error as error:
            raise ConfigError(f"{file}, line {reader.line_num}: {error}.") from error


def _check_header(file: Path, columns: list[str]) -> None:
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t|,"):
        raise ConfigError(
            f"{file}: the first line, {columns[0]!r:.100}, is one column.",
            hint="Cells are separated by commas in .csv, and by tabs in .tsv.",
        )
    for column in columns:
        if not column.strip() or columns.count(column) > 1:
            raise ConfigError(
                f"{file}: in the first line the column {column!r} "
                f"{'stands twice' if column.strip() else 'has no name'}.",
                hint="Give each column a name of its own; an index that pandas wrote is left out by index=False.",
            )


def _parquet(file: Path, split: str) -> Iterator[Row]:
    parquet = needed("pyarrow.parquet", "Parquet")
    with _arrow_errors(file), parquet.ParquetFile(_bytes(file)) as opened:
        _check_names(file, opened.schema_arrow.names)
        for batch in opened.iter_batches(batch_size=1024):
            yield from _rows(batch)


def _arrow(file: Path, split: str) -> Iterator[Row]:
    arrow = needed("pyarrow", "an Arrow data set")
    with _arrow_errors(file):
        source = _bytes(file)
        with (
            arrow.BufferReader(source.read())
            if isinstance(source, io.BytesIO)
            else arrow.memory_map(source) as opened
        ):
            is_file = opened.read(6) == b"ARROW1"
            opened.seek(0)
            stored = arrow.ipc.open_file(opened) if is_file else arrow.ipc.open_stream(opened)
            _check_names(file, stored.schema.names)
            batches = map(stored.get_batch, range(stored.num_record_batches)) if is_file else stored
            for batch in batches:
                yield from _rows(batch)


def _rows(batch: Any) -> Iterator[Row]:
    """Its rows, with each float of 16 or 32 bits as the shortest number that it stands for: 0.1, which 64 bits would
    read as 0.10000000149011612."""
    columns = []
    for column, told in zip(batch.columns, batch.schema.types, strict=True):
        values = column.to_pylist(maps_as_pydicts="strict")
        short = _shortener(told)
        columns.append(values if short is None else map(short, values))
    names = batch.schema.names
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))


def _shortener(told: Any) -> Callable[[Any], Any] | None:
    """What makes the short floats in a value of this type of Arrow's the numbers that they stand for; None where it has
    no short floats."""
    arrow = needed("pyarrow", "Arrow")
    types = arrow.types
    if types.is_float16(told) or types.is_float32(told):
        own = np.float16 if types.is_float16(told) else np.float32
        return lambda value: None if value is None else float(str(own(value)))
    if isinstance(told, arrow.BaseExtensionType):
        return _shortener(told.storage_type)
    if types.is_dictionary(told) or types.is_run_end_encoded(told):
        return _shortener(told.value_type)
    if types.is_struct(told):
        parts = {one.name: short for one in told if (short := _shortener(one.type)) is not None}
        return _in_mapping(lambda key: parts.get(key)) if parts else None
    if types.is_map(told):
        key, item = _shortener(told.key_type), _shortener(told.item_type)
        return _in_mapping(lambda _: item, key) if key or item else None
    if any(is_list(told) for is_list in _lists(types)):
        short = _shortener(told.value_type)
        return (
            None if short is None else lambda value: None if value is None else [short(one) for one in value]
        )
    return None


def _lists(types: Any) -> list[Callable[[Any], bool]]:
    return [
        types.is_list,
        types.is_large_list,
        types.is_fixed_size_list,
        types.is_list_view,
        types.is_large_list_view,
    ]


def _in_mapping(
    of_value: Callable[[str], Callable[[Any], Any] | None], of_key: Callable[[Any], Any] | None = None
) -> Callable[[Any], Any]:
    def shortened(value: Any) -> Any:
        if value is None:
            return None
        found = {}
        for key, one in value.items():
            short = of_value(key)
            found[of_key(key) if of_key else key] = short(one) if short else one
        return found

    return shortened


def _check_names(file: Path, columns: list[str]) -> None:
    for column in columns:
        if columns.count(column) > 1:
            raise ConfigError(
                f"{file}: the column {column!r} is there twice.", hint="Give each column its own name."
            )


@contextmanager
def _arrow_errors(file: Path) -> Iterator[None]:
    """Turns what Arrow raises of a file into ConfigError."""
    raised = (OSError, EOFError, zlib.error, needed("pyarrow", "Arrow").ArrowException)
    try:
        yield
    except (*raised, ValueError, KeyError) as error:  # times finer than a microsecond, a key twice in a map
        raise unreadable(file, error) from error


def _bytes(file: Path) -> Any:
    """The file's path, or its content if it is packed."""
    if file.suffix != ".gz":
        return str(file)
    with gzip.open(file) as packed:
        return io.BytesIO(packed.read())


@contextmanager
def _text(file: Path, newline: str = "\n") -> Iterator[IO[str]]:
    """The lines of a file, unpacked, without a byte-order mark. Raises ConfigError for what is no text."""
    try:
        opened: IO[str]
        if file.suffix == ".gz":
            opened = gzip.open(file, "rt", encoding="utf-8-sig", newline=newline)  # noqa: SIM115 (closed below)
        else:
            opened = open(file, encoding="utf-8-sig", newline=newline)  # noqa: SIM115 (closed below)
        with opened:
            yield opened
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: BaseException) -> ConfigError:
    lines = str(error).splitlines()
    hint = "The file may be incomplete; a clone without Git LFS has small text files in place of the data."
    if isinstance(error, UnicodeDecodeError):
        hint = "Text must be UTF-8."
    return ConfigError(f"{file} cannot be read: {lines[0] if lines else type(error).__name__}.", hint=hint)


_READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ADDRESS = re.compile(r"(?:https?:/+huggingface\.co/|hf:/+)(?:datasets/)?")


def download_hint(path: Path | str, kind: Literal["dataset", "model"]) -> str:
    """The command that downloads what looks like a name on the Hugging Face Hub; "" for any other path. Gyre downloads
    nothing: a job reads what is on its machines' disks."""
    name = _ADDRESS.sub("", str(path))
    if not _NAME.fullmatch(name) or kind_of(Path(name)) or Path(name).parent.exists():
        return ""
    folder = name.partition("/")[2]
    repo_type = "--repo-type dataset " if kind == "dataset" else ""
    return f"If it is a name on the Hub, download it: hf download {repo_type}{name} --local-dir {folder}"
