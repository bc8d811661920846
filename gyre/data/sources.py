"""Reader of a data set's rows on disk, as mappings, in the order in which they are stored.

It reads a file of one of the kinds in `gyre.data.readers`; a folder that Hugging Face's `save_to_disk` wrote; and a
folder of such files from the Hub, whose card lists the files of each subset and split, or whose file names contain the
split.

This module must not know what a row means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gyre.data.readers import Row, download_hint, kind_of, rows_of, unreadable
from gyre.data.subsets import has_split, listed_files, one_of_several
from gyre.errors import ConfigError

_ABOUT = ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")
"""Files of a data set's folder that hold no rows."""
_DEFAULT_SPLIT = "train"
_OTHER_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")
"""Words that say that a folder's only file is not for training."""


def read_rows(path: Path, split: str = "train", subset: str = "") -> Iterator[Row]:
    """The rows of a split. Raises ConfigError if the files or the split are missing, or a row cannot be read."""
    for file in files_of(path, split, subset):
        yield from rows_of(file, split)


def files_of(path: Path, split: str = "train", subset: str = "") -> list[Path]:
    """The files that hold the split, in order. `subset` is a name from the folder's card, or, without a card, a folder
    in it. Raises ConfigError if there are none, or if several subsets have the split and none is named."""
    if path.is_file():
        _refuse_unknown(path)
        if subset:
            raise ConfigError(f"{path} is a file, and has no subset {subset!r}.", hint="Leave --subset out.")
        if kind_of(path) != ".json" and split != _DEFAULT_SPLIT and not has_split(Path(path.name), split):
            raise ConfigError(f"{path} is a file, and has no split {split!r}.", hint="Leave --split out.")
        return [path]
    if not path.is_dir():
        raise _not_there(path)
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
        splits = _saved(path / "dataset_dict.json")["splits"]
        if split not in splits:
            raise _no_split(path, split, splits)
        path = path / split
    elif split != _DEFAULT_SPLIT and (path / "state.json").exists():
        raise ConfigError(f"{path} is one split, and has no split {split!r}.", hint="Leave --split out.")
    if (path / "state.json").exists():
        named = _saved(path / "state.json")["_data_files"]
        return [path / one["filename"] for one in named]
    found = sorted(file for file in path.rglob("*") if _holds_rows(file.relative_to(path)))
    if not found:
        raise ConfigError(f"{path} holds no JSONL, JSON, CSV, TSV, Parquet or Arrow file.")
    of_split = [file for file in found if has_split(file.relative_to(path), split)]
    is_another = split != _DEFAULT_SPLIT or any(
        has_split(found[0].relative_to(path), one) for one in _OTHER_SPLITS
    )
    if not of_split and (len(found) > 1 or is_another):
        raise _no_split(path, split, [file.relative_to(path).as_posix() for file in found[:8]])
    return _of_one_kind(path, one_of_several(path, of_split, split), split) if of_split else found


def _saved(file: Path) -> dict[str, Any]:
    """What `save_to_disk` wrote of a data set."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error
    return found


def _holds_rows(file: Path) -> bool:
    """Whether a file of a folder has rows, by its name. Git and the Hub's client keep theirs in folders with a dot."""
    is_hidden = any(part.startswith(".") for part in file.parts)
    return not is_hidden and file.name not in _ABOUT and bool(kind_of(file))


def _refuse_unknown(file: Path) -> None:
    if not kind_of(file):
        raise ConfigError(
            f"{file}: unknown kind of file.", hint="Give JSONL, JSON, CSV, TSV, Parquet or Arrow."
        )


def _no_split(path: Path, split: str, there: list[str]) -> ConfigError:
    return ConfigError(
        f"{path} has no split {split!r}; there are {', '.join(there)}.",
        hint="Give --split, or one of its files in the place of the folder.",
    )


def _of_one_kind(path: Path, files: list[Path], split: str) -> list[Path]:
    """The same files. Raises ConfigError if they are of several kinds, and so most likely the same rows twice."""
    kinds = {kind_of(file): file for file in files}
    if len(kinds) > 1:
        raise ConfigError(
            f"{path} holds {split!r} as {' and as '.join(sorted(kinds))}.",
            hint=f"Give one of the files instead of the folder, such as {next(iter(kinds.values()))}.",
        )
    return files


def _not_there(path: Path) -> ConfigError:
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    return ConfigError(f"{path} does not exist{where}.", hint=download_hint(path, "dataset"))
