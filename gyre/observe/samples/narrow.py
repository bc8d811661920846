"""What filters and sorts of a file's samples: a few columns, which a file also has packed at its end.

A reader looks at every file of a job, which may have thousands. What is packed says itself where it ends, so it is
found by its key: pyarrow parses all that an end says of row groups and columns too, which takes four times as long.

Invariant *the same*: what is packed is what the columns say.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import zstandard
from numpy.typing import NDArray

from gyre.observe.samples.query import SampleFilter

KEY = b"gyre.narrow"
"""Among a file's own metadata."""

NARROW = (
    "step",
    "group",
    "sample",
    "outcome",
    "quarantined",
    "reward",
    "tokens",
    "finish_reason",
    "session_outcome",
    "versions",
    "instances",
)
_FORM = 3
"""Of what is packed. Form 1 had no numbers of tokens, form 2 no ends of sessions."""

_MOST_BYTES = 1 << 28
"""Of one file, unpacked."""

_AT_FIRST = 1 << 14
"""Bytes of a file's end that are read at first: most ends are shorter."""

_PARQUET, _TAIL = b"PAR1", 8
"""How a file of Parquet ends: the length of its footer in four bytes, and these four."""


@dataclass(frozen=True, slots=True)
class Names:
    """Texts of which few are different: a number for each row, and what the numbers stand for."""

    codes: NDArray[np.int32]
    names: list[str | None]

    def equal(self, name: str) -> NDArray[np.bool_]:
        if name not in self.names:
            return np.zeros(len(self.codes), np.bool_)
        found: NDArray[np.bool_] = self.codes == self.names.index(name)
        return found


@dataclass(frozen=True, slots=True)
class Narrow:
    """What filters and sorts of a file's samples, `[rows]` each."""

    steps: NDArray[np.int32]
    groups: NDArray[np.int64]
    samples: NDArray[np.int32]
    rewards: NDArray[np.float64]
    tokens: NDArray[np.int32]
    """Of the answer."""
    quarantined: NDArray[np.bool_]
    outcomes: Names
    finishes: Names
    ends: Names
    """Of the sessions."""
    version_rows: NDArray[np.int32]
    """The row of each run of a version, and the version."""
    version_values: NDArray[np.int32]
    instance_rows: NDArray[np.int32]
    instance_values: Names

    def __len__(self) -> int:
        return len(self.groups)

    def matching(self, wanted: SampleFilter) -> NDArray[np.int64]:
        """The rows that the filter lets through."""
        keep = np.ones(len(self), np.bool_)
        if wanted.step is not None:
            keep &= self.steps == wanted.step
        if wanted.group is not None:
            keep &= self.groups == wanted.group
        for condition in wanted.reward:
            keep &= condition.holds(self.rewards)
            keep &= ~np.isnan(self.rewards)  # `!=` holds of it
        for condition in wanted.tokens:
            keep &= condition.holds(self.tokens)
        if wanted.outcome is not None:
            named = (self.outcomes, self.finishes, self.ends)
            keep &= np.logical_or.reduce([names.equal(wanted.outcome) for names in named])
        if wanted.quarantined is not None:
            keep &= self.quarantined == wanted.quarantined
        if wanted.version is not None:
            keep &= _rows_in(self.version_rows[self.version_values == wanted.version], len(self))
        if wanted.instance is not None:
            keep &= _rows_in(self.instance_rows[self.instance_values.equal(wanted.instance)], len(self))
        return np.flatnonzero(keep)


def _rows_in(rows: NDArray[np.int32], count: int) -> NDArray[np.bool_]:
    found = np.zeros(count, np.bool_)
    found[rows] = True
    return found


def narrow_of(table: Any, step: int | None) -> Narrow:
    """Of a table that has the columns `NARROW`. `step` is the file's, None where each row has its own."""
    version_rows, versions = _runs(table, "versions")
    instance_rows, instances = _runs(table, "instances")
    steps = _numbers(table, "step").astype(np.int32)
    return Narrow(
        steps=steps if step is None else np.full(table.num_rows, step, np.int32),
        groups=_numbers(table, "group").astype(np.int64),
        samples=_numbers(table, "sample").astype(np.int32),
        rewards=_numbers(table, "reward").astype(np.float64),
        tokens=_numbers(table, "tokens").astype(np.int32),
        quarantined=_numbers(table, "quarantined").astype(np.bool_),
        outcomes=_names(table.column("outcome").combine_chunks()),
        finishes=_names(table.column("finish_reason").combine_chunks()),
        ends=_ends(table),
        version_rows=version_rows,
        version_values=_plain(versions.field("version"), np.int32),
        instance_rows=instance_rows,
        instance_values=_names(instances.field("name")),
    )


def _ends(table: Any) -> Names:
    """A file of before there were sessions has none."""
    if "session_outcome" not in table.column_names:
        return Names(np.full(table.num_rows, -1, np.int32), [])
    return _names(table.column("session_outcome").combine_chunks())


def packed(narrow: Narrow) -> bytes:
    """`unpacked` is its inverse."""
    columns = [getattr(narrow, name).astype(dtype).tobytes() for name, dtype in _COLUMNS]
    names = [
        [one.codes.astype("<i4").tobytes(), one.names]
        for one in (narrow.outcomes, narrow.finishes, narrow.ends, narrow.instance_values)
    ]
    return zstandard.compress(msgpack.packb([_FORM, columns, names]))


def unpacked(data: bytes, step: int | None) -> Narrow | None:
    """None where another version of Gyre packed it, in a form of its own. Raises ValueError where this is not what
    `packed` makes."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=_MOST_BYTES)
        form, columns, names = msgpack.unpackb(raw)
        if form != _FORM:
            return None
        found = {
            name: np.frombuffer(column, dtype)
            for (name, dtype), column in zip(_COLUMNS, columns, strict=True)
        }
        outcomes, finishes, ends, instances = (
            Names(np.frombuffer(codes, "<i4"), known) for codes, known in names
        )
    except (zstandard.ZstdError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"its index is damaged: {error}") from error
    if step is not None:
        found["steps"] = np.full(len(found["groups"]), step, np.int32)
    return Narrow(**found, outcomes=outcomes, finishes=finishes, ends=ends, instance_values=instances)


def packed_at_end(path: str, step: int | None) -> Narrow | None:
    """What is packed at the end of a Parquet file; None where there is nothing that is whole and of this form. Raises
    OSError."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _AT_FIRST, 0))
        end = file.read()
        length = int.from_bytes(end[-_TAIL : -len(_PARQUET)], "little") + _TAIL
        if len(end) < length <= size:
            file.seek(size - length)
            end = file.read()
    if length > size or not end.endswith(_PARQUET):
        return None
    _, _, behind = end[-length:].rpartition(KEY)
    start = behind.find(zstandard.FRAME_HEADER)
    try:
        return unpacked(behind[start:], step) if start >= 0 else None
    except ValueError:  # pyarrow will say whether it is damaged
        return None


_COLUMNS = (
    ("steps", "<i4"),
    ("groups", "<i8"),
    ("samples", "<i4"),
    ("rewards", "<f8"),
    ("tokens", "<i4"),
    ("quarantined", "?"),
    ("version_rows", "<i4"),
    ("version_values", "<i4"),
    ("instance_rows", "<i4"),
)


def _numbers(table: Any, name: str) -> NDArray[Any]:
    found: NDArray[Any] = table.column(name).to_numpy()
    return found


def _plain(values: Any, dtype: Any) -> NDArray[Any]:
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=dtype)


def _names(values: Any) -> Names:
    """Nulls have the number -1."""
    encoded = values.dictionary_encode()
    codes = np.asarray(encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int32)
    return Names(codes, encoded.dictionary.to_pylist())


def _runs(table: Any, name: str) -> tuple[NDArray[np.int32], Any]:
    """The row of each run in a column of lists, and the runs one after another."""
    column = table.column(name).combine_chunks()
    lengths = np.asarray(column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
    return np.repeat(np.arange(len(column), dtype=np.int32), lengths), column.flatten()
