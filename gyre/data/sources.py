"""Reader of a data set's rows on disk, as mappings, in the order in which they are stored.

It reads `.jsonl` and `.json` with one row per line, also as `.gz`; `.parquet`; a folder that Hugging Face's
`save_to_disk` wrote; and a folder of such files from the Hub, whose card lists the files of each subset and split, or
whose file names contain the split.

This module must not know what a row means.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gyre.data.extras import needed
from gyre.data.subsets import has_split, listed_files, one_of_several
from gyre.errors import ConfigError

Row = dict[str, Any]

_LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_ABOUT = ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")
"""Files of a data set's folder that hold no rows."""


def read_rows(path: Path, split: str = "train", subset: str = "") -> Iterator[Row]:
    """The rows of a split. Raises ConfigError if the files or the split are missing, or a row cannot be read."""
    for file in files_of(path, split, subset):
        if file.name.endswith(_LINES):
            yield from _lines(file)
        elif file.suffix == ".parquet":
            yield from _parquet(file)
        else:
            yield from _arrow(file)


def files_of(path: Path, split: str = "train", subset: str = "") -> list[Path]:
    """The files that hold the split, in order. `subset` is a name from the folder's card, or, without a card, a folder
    in it. Raises ConfigError if there are none, or if several subsets have the split and none is named."""
    if path.is_file():
        _refuse_unknown(path)
        if subset:
            raise ConfigError(f"{path} is a file, and has no subset {subset!r}.", hint="Leave --subset out.")
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist.")
    listed = listed_files(path, split, subset)
    if listed is not None:
        for file in listed:
            _refuse_unknown(file)
        return listed
    if subset:
        path = path / subset
        if not path.is_dir():
            raise ConfigError(f"{path} does not exist.", hint="--subset names a folder in the data set's.")
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if split not in splits:
            raise _no_split(path, split, splits)
        path = path / split
    if (path / "state.json").exists():
        named = json.loads((path / "state.json").read_text())["_data_files"]
        return [path / one["filename"] for one in named]
    found = sorted(file for file in path.rglob("*") if file.name not in _ABOUT and _holds_rows(file))
    if not found:
        raise ConfigError(f"{path} holds no JSONL, Parquet or Arrow file.")
    of_split = [file for file in found if has_split(file.relative_to(path), split)]
    if not of_split and len(found) > 1:
        raise _no_split(path, split, [file.relative_to(path).as_posix() for file in found[:8]])
    return one_of_several(path, of_split, split) if of_split else found


def _refuse_unknown(file: Path) -> None:
    if not _holds_rows(file):
        raise ConfigError(f"{file}: unknown kind of file.", hint="Give JSONL, Parquet or Arrow.")


def _holds_rows(file: Path) -> bool:
    return file.name.endswith(_LINES) or file.suffix in (".parquet", ".arrow")


def _no_split(path: Path, split: str, there: list[str]) -> ConfigError:
    return ConfigError(f"{path} has no split {split!r}; there are {', '.join(there)}.", hint="Give --split.")


def _unreadable(file: Path, error: Exception) -> ConfigError:
    told = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConfigError(
        f"{file} cannot be read: {told}.",
        hint="The file may be incomplete; a clone without Git LFS has small text files in place of the data.",
    )


def _lines(file: Path) -> Iterator[Row]:
    unpacked = gzip.open if file.suffix == ".gz" else open
    try:
        with unpacked(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(file, number, line)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise _unreadable(file, error) from error


def _row(file: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{file}, line {number}: not JSON: {error}.", hint="The file must have one row per line."
        ) from error
    if not isinstance(row, dict):
        raise ConfigError(f"{file}, line {number}: a {type(row).__name__}, not a mapping.")
    return row


def _parquet(file: Path) -> Iterator[Row]:
    parquet = needed("pyarrow.parquet", "Parquet")
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (OSError, needed("pyarrow", "Parquet").ArrowException) as error:
        raise _unreadable(file, error) from error


def _arrow(file: Path) -> Iterator[Row]:
    arrow = needed("pyarrow", "an Arrow data set")
    try:
        with arrow.memory_map(str(file)) as source, arrow.ipc.open_stream(source) as stream:
            for batch in stream:
                yield from batch.to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise _unreadable(file, error) from error
