"""Rows of a data set on disk, as mappings, in the order in which they are stored.

What is read: `.jsonl` and `.json` with a row a line, also as `.gz`; `.parquet`; a folder that Hugging Face's
`save_to_disk` wrote; and a folder of such files, as it comes from the Hub, where the split is part of the files' names.

This module must not know what a row means.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gyre.data.extras import needed
from gyre.errors import ConfigError

Row = dict[str, Any]

_LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_ABOUT = ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")
"""Files of a data set's folder that hold no rows."""


def read_rows(path: Path, split: str = "train") -> Iterator[Row]:
    """Raises ConfigError where nothing is there, the split is not, or a row cannot be read."""
    for file in files_of(path, split):
        if file.name.endswith(_LINES):
            yield from _lines(file)
        elif file.suffix == ".parquet":
            yield from _parquet(file)
        else:
            yield from _arrow(file)


def files_of(path: Path, split: str = "train") -> list[Path]:
    """The files that hold the split, in order. Raises ConfigError where there are none."""
    if path.is_file():
        if not (path.name.endswith(_LINES) or path.suffix in (".parquet", ".arrow")):
            raise ConfigError(f"{path}: cannot tell what this file is.", hint="Give JSONL, Parquet or Arrow.")
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist.")
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if split not in splits:
            raise _no_split(path, split, splits)
        path = path / split
    if (path / "state.json").exists():
        named = json.loads((path / "state.json").read_text())["_data_files"]
        return [path / one["filename"] for one in named]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.name not in _ABOUT and (file.name.endswith(_LINES) or file.suffix in (".parquet", ".arrow"))
    )
    if not found:
        raise ConfigError(f"{path} holds no JSONL, Parquet or Arrow file.")
    of_split = [
        file for file in found if split in re.split(r"[^A-Za-z0-9]+", file.relative_to(path).as_posix())
    ]
    if not of_split and len(found) > 1:
        raise _no_split(path, split, [file.relative_to(path).as_posix() for file in found[:8]])
    return of_split or found


def _no_split(path: Path, split: str, there: list[str]) -> ConfigError:
    return ConfigError(f"{path} has no split {split!r}; there are {', '.join(there)}.", hint="Give --split.")


def _lines(file: Path) -> Iterator[Row]:
    unpacked = gzip.open if file.suffix == ".gz" else open
    with unpacked(file, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"{file}, line {number}: no JSON: {error}.", hint="The file must have one row a line."
                ) from error
            if not isinstance(row, dict):
                raise ConfigError(f"{file}, line {number}: a {type(row).__name__}, not a mapping.")
            yield row


def _parquet(file: Path) -> Iterator[Row]:
    parquet = needed("pyarrow.parquet", "Parquet")
    with parquet.ParquetFile(file) as opened:
        for batch in opened.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def _arrow(file: Path) -> Iterator[Row]:
    arrow = needed("pyarrow", "an Arrow data set")
    with arrow.memory_map(str(file)) as source, arrow.ipc.open_stream(source) as stream:
        for batch in stream:
            yield from batch.to_pylist()
