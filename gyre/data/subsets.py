"""The subsets and splits of a data set's repository: which of its files belong together, by its card.

A clone from the Hub often holds several data sets: GSM8K's `main` and `socratic`, OpenR1-Math-220k's `default`,
`extended` and `all`. They are different views of the same questions, so reading every file would draw each question
twice. The card, `README.md`, begins with YAML, whose `configs` list the files of each
(huggingface.co/docs/hub/datasets-manual-configuration).

Invariant *never two at once*: files of several subsets are not read together. A user who names none gets the default,
or an error with their names if there is no default.

This module must not know how a file is read, or what a row means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gyre.errors import ConfigError

Splits = dict[str, list[str]]
"""File patterns by split."""

_DEFAULT = "default"


def listed_files(path: Path, split: str, subset: str) -> list[Path] | None:
    """The files that the card of the folder `path` lists for a subset's split, in the order of its patterns; None if it
    lists none. Raises ConfigError for a subset or split that the card does not name, and for missing files."""
    subsets = _subsets_of(path)
    if not subsets:
        return None
    name = subset or _default(path, subsets)
    if name not in subsets:
        raise ConfigError(
            f"{path} has no subset {name!r}; there are {', '.join(subsets)}.", hint="Give --subset."
        )
    splits = subsets[name]
    if split not in splits:
        raise ConfigError(
            f"the subset {name!r} of {path} has no split {split!r}; there are {', '.join(splits)}.",
            hint="Give --split.",
        )
    files: list[Path] = []
    for pattern in splits[split]:
        if ".." in Path(pattern).parts:
            raise ConfigError(
                f"the card of {path} names {pattern} for {name!r}, which is outside of the folder.",
                hint="Give the file itself instead of the folder.",
            )
        try:
            found = sorted(file for file in path.glob(pattern) if file.is_file())
        except (ValueError, NotImplementedError):  # an address elsewhere, or no pattern at all
            found = []
        if not found:
            raise ConfigError(
                f"the card of {path} names {pattern} for {name!r}, and there is no such file.",
                hint="If the clone was made without its files, `git lfs pull` gets them.",
            )
        files += [file for file in found if file not in files]
    return files


def one_of_several(path: Path, files: Sequence[Path], split: str) -> list[Path]:
    """The same files, of a folder without a card. Raises ConfigError if several folders have a split of this name."""
    above = {_before_split(file.relative_to(path), split): None for file in files}
    if len(above) > 1:
        raise ConfigError(
            f"{path} holds {split!r} more than once, in {', '.join(sorted(above))}.",
            hint="Give --subset with one of these folders.",
        )
    return list(files)


def has_split(file: Path, split: str) -> bool:
    """Whether a file's path, relative to its data set's folder, contains the split's name as a word."""
    return split in re.split(r"[^A-Za-z0-9]+", file.as_posix())


def _before_split(file: Path, split: str) -> str:
    """The folders above the first part of the path that names the split."""
    above = []
    for part in file.parts:
        if has_split(Path(part), split):
            break
        above.append(part)
    return "/".join(above) or "."


def _default(path: Path, subsets: Mapping[str, Splits]) -> str:
    if len(subsets) == 1:
        return next(iter(subsets))
    if _DEFAULT in subsets:
        return _DEFAULT
    raise ConfigError(
        f"{path} holds several subsets: {', '.join(subsets)}.", hint="Give --subset with one of them."
    )


def _subsets_of(path: Path) -> dict[str, Splits]:
    """The card's subsets by name; the one that is marked as the default has the name `default` too."""
    try:
        text = (path / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # no card
        return {}
    head = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        card = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:  # the file begins with something else
        return {}
    found: dict[str, Splits] = {}
    configs = card.get("configs") if isinstance(card, dict) else None
    for one in configs if isinstance(configs, list) else []:
        splits = _splits(one.get("data_files")) if isinstance(one, dict) else {}
        if splits:
            found[str(one.get("config_name", _DEFAULT))] = splits
            if one.get("default") is True:
                found.setdefault(_DEFAULT, splits)
    return found


def _splits(data_files: Any) -> Splits:
    """The splits in a card's `data_files`, which is a pattern, a list of patterns, or a list of splits."""
    splits: Splits = {}
    for one in data_files if isinstance(data_files, list) else [data_files]:
        if isinstance(one, str):
            splits.setdefault("train", []).append(one)
        elif isinstance(one, Mapping) and "path" in one:
            paths = one["path"] if isinstance(one["path"], list) else [one["path"]]
            splits.setdefault(str(one.get("split", "train")), []).extend(str(path) for path in paths)
    return splits
