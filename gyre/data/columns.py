"""Which columns of a row go with its prompt to the reward, and under which names.

Every column that is not the prompt does, unless `keep` or `drop` says otherwise. A column that is named as something
that Gyre sets itself is refused, so that nothing is written over: the user drops it or gives it another name.

| name | what Gyre sets |
| --- | --- |
| `answer` | the answer that the layout finds |
| `row`, `epoch` | where the prompt is in the data set, and how often all were drawn before it |
| `finish_reason` | how a sample ended, `stop` or `length` |
| `reference` | the assistant's last turn, of a conversation that ends with one |

A column `max_new_tokens` is a prompt's own limit.

This module must not know of layouts or files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gyre.data.values import Unholdable, holds_nothing, plain, whole_text
from gyre.errors import ConfigError, nearest
from gyre.rollouts.samples import OWN_LIMIT, checked_limit

ANSWER = "answer"
REFERENCE = "reference"
_SET_BY_GYRE = {
    "row": "the row's number",
    "epoch": "the epoch's number",
    "finish_reason": "how a sample ended",
}


class Columns:
    """The columns that are kept. `prompt` are those of the prompt, `answer` is where the answer comes from. Raises
    ConfigError for names that are no columns, or that contradict each other."""

    def __init__(
        self,
        columns: Sequence[str],
        *,
        prompt: Collection[str],
        answer: str,
        keep: Sequence[str] = (),
        drop: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
    ) -> None:
        if keep and drop:
            raise ConfigError(
                "--keep and --drop are both given.", hint="Give one of them: --keep keeps no others."
            )
        self._rename = dict(rename or {})
        for option, names in (("--keep", keep), ("--drop", drop), ("--rename", self._rename)):
            for name in names:
                if name not in columns:
                    raise ConfigError(f"{option}: there is no column {name!r}; {nearest(name, columns)}")
                if name in prompt:
                    raise ConfigError(f"{option}: {name} is the prompt, which a reward is given as text.")
                if name == answer == ANSWER and option != "--keep":
                    raise ConfigError(f"{option}: {name} is the answer's column.")
        unused = [name for name in self._rename if name in drop or (keep and name not in keep)]
        if unused:
            raise ConfigError(f"--rename: the column {unused[0]} is not kept.")
        self.dropped = frozenset(drop)
        self._keep = frozenset(keep)
        self._not_kept = frozenset({*prompt, *({ANSWER} if answer == ANSWER else ())})
        self._check_names(columns)

    def is_kept(self, column: str) -> bool:
        if column in self._not_kept or column in self.dropped:
            return False
        return not self._keep or column in self._keep or column == OWN_LIMIT

    def meta(self, row: Mapping[str, Any], answer: Any, reference: str | None) -> dict[str, Any]:
        """What a reward is given of a row. Raises ConfigError that names the column with what cannot be held, without
        the row's number."""
        found = {}
        for column, value in row.items():
            if not self.is_kept(column):
                continue
            try:
                found[whole_text(self._rename.get(column, column))] = plain(value)
            except Unholdable as error:
                raise ConfigError(
                    f"column {column!a} holds {error}.", hint=f"Leave it out with --drop {column!a}."
                ) from None
        if found.keys() & _SET_BY_GYRE.keys() or ANSWER in found:  # columns that the first rows do not have
            self._check_names(list(row))
        limit = found.pop(OWN_LIMIT, None)
        if not holds_nothing(limit):
            found[OWN_LIMIT] = _limit(limit)
        if reference is not None:
            if REFERENCE in found:
                raise ConfigError(
                    f"column {REFERENCE}: the conversation ends with the assistant's turn, which has this name.",
                    hint=f"Give the column another name: --rename {REFERENCE}=NAME.",
                )
            found[REFERENCE] = reference
        if answer is not None:
            found[ANSWER] = answer
        return found

    def _check_names(self, columns: Sequence[str]) -> None:
        taken: dict[str, str] = {}
        for column in columns:
            if not self.is_kept(column):
                continue
            name = self._rename.get(column, column)
            what = "the answer" if name == ANSWER else _SET_BY_GYRE.get(name)
            if what:
                raise ConfigError(
                    f"column {column!a}: a reward is given {what} as {name!r}, so a column cannot have that name.",
                    hint=f"Leave it out with --drop {column}, or name it otherwise: --rename {column}=NAME.",
                )
            if name in taken:
                raise ConfigError(f"--rename: {taken[name]} and {column} would both be {name!r}.")
            taken[name] = column


def check_size(line: bytes, meta: Mapping[str, Any], most: int) -> None:
    """Raises ConfigError if what a reward is given of a row is larger than `most` bytes, with the columns that make it
    so."""
    if len(line) <= most:
        return
    sizes = {name: len(json.dumps(value, ensure_ascii=False).encode()) for name, value in meta.items()}
    by_size = sorted(sizes, key=lambda name: -sizes[name])
    too_large, left = [], len(line)
    for name in by_size:
        if left <= most:
            break
        too_large.append(name)
        left -= sizes[name]
    raise ConfigError(
        f"its columns have {len(line)} bytes, more than the {most} of --max-meta-bytes; the largest is "
        f"{by_size[0]} ({sizes[by_size[0]]} bytes).",
        hint=f"Leave out what the reward does not read: {' '.join(f'--drop {name}' for name in too_large)}.",
    )


def _limit(value: Any) -> int:
    """A prompt's own limit, from a cell. Files without integers have it as 16.0 or as text."""
    is_whole = value.is_integer() if isinstance(value, float) else str(value).strip().isdecimal()
    if is_whole and not isinstance(value, bool):
        value = int(value)
    try:
        return checked_limit(value, "the row")
    except ValueError as error:
        raise ConfigError(f"{str(error).removeprefix('the row: ')}.") from None
