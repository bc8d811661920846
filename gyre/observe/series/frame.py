"""The numbers of one moment as columns: sources with the same names are a group that shares them.

Ten thousand vertices report under the same ten names. As columns of 64-bit floats they take a tenth of the time to read
and to add up that nested mappings take.

Invariants:
- *what is written is read*: what `unpack(pack(frame_of(numbers)))` holds are the numbers, to the last bit; a name that
  a source lacks it lacks afterwards;
- *a mean of means*: the mean of frames has every source and every name that one of them has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np
import zstandard
from numpy.typing import NDArray

from gyre.errors import StoreCorrupt
from gyre.observe.series.numbers import Numbers

FORM = 1
LARGEST_BYTES = 256 * 2**20
"""Beyond what any job writes: a damaged row must not take all memory."""

MAX_SUFFIX = "_max"
"""What the names of numbers end with of which the greatest counts, and not the mean."""

_SHARES = ("phase/", "state/", "in/", "times/", "waits/")


def is_share(name: str) -> bool:
    """Whether the number says for what share of the time something held: where it is not named, it is 0."""
    return name.startswith(_SHARES)


@dataclass(frozen=True, slots=True, eq=False)
class SourceGroup:
    """`values` has a row for each source and a column for each name. The sources are of one kind: all vertices, or all
    instances."""

    sources: tuple[str, ...]
    names: tuple[str, ...]
    values: NDArray[np.float64]


Frame = list[SourceGroup]


def frame_of(numbers: Numbers) -> Frame:
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for source, values in numbers.items():
        if values:
            groups[_kind(source), tuple(sorted(values))].append(source)
    return [
        SourceGroup(
            tuple(sources),
            names,
            np.array([[numbers[source][name] for name in names] for source in sources], dtype="<f8"),
        )
        for (_, names), sources in groups.items()
    ]


def _kind(source: str) -> str:
    return source.partition("/")[0]


def pack(frame: Frame) -> bytes:
    # By columns: neighbours are then alike, which is what a compressor lives on.
    parts = [
        [
            msgpack.packb(list(group.sources)),
            msgpack.packb(list(group.names)),
            np.ascontiguousarray(group.values.T).tobytes(),
        ]
        for group in frame
    ]
    body: bytes = zstandard.ZstdCompressor(level=3).compress(msgpack.packb([FORM, parts]))
    return body


def unpack(body: bytes) -> Frame:
    """Raises StoreCorrupt for bytes that `pack` does not write; nothing for those of a newer Gyre."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=LARGEST_BYTES)
        form, parts = msgpack.unpackb(raw)
        return list(_groups(parts)) if form == FORM else []
    except (ValueError, TypeError, zstandard.ZstdError, msgpack.UnpackException) as error:
        raise StoreCorrupt(
            f"A row of the job's numbers is none: {error!r:.200}.",
            hint="It was changed or damaged outside Gyre; the job itself needs no such row.",
        ) from error


def _groups(parts: Any) -> Iterator[SourceGroup]:
    for packed_sources, packed_names, columns in parts:
        sources, names = _texts(packed_sources), _texts(packed_names)
        values = np.frombuffer(columns, dtype="<f8").reshape(len(names), len(sources))
        yield SourceGroup(sources, names, values.T)


@lru_cache(maxsize=64)
def _texts(packed: bytes) -> tuple[str, ...]:
    """From row to row the names are mostly the same bytes, and unpacking them is most of the work."""
    names = msgpack.unpackb(packed)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("names that are no texts")
    return tuple(names)


def only(frame: Frame, meant: Iterable[str]) -> Frame:
    """The part of the frame that is of these sources."""
    wanted = frozenset(meant)
    found = []
    for group in frame:
        rows = [at for at, source in enumerate(group.sources) if source in wanted]
        if len(rows) == len(group.sources):
            found.append(group)
        elif rows:
            found.append(
                SourceGroup(tuple(group.sources[at] for at in rows), group.names, group.values[rows])
            )
    return found


def mean_of(frames: Sequence[Frame]) -> Frame:
    """One frame for all of them. Of a number the mean over the frames that have it; of a share (`is_share`) over those
    that have its source; of one whose name ends in `_max` the greatest."""
    if len(frames) == 1:
        return list(frames[0])
    kinds: dict[str, list[list[SourceGroup]]] = {}
    for number, frame in enumerate(frames):
        for group in frame:
            kinds.setdefault(_kind(group.sources[0]), [[] for _ in frames])[number].append(group)
    return [group for kind in kinds for group in _mean_of_kind(kinds[kind])]


def _mean_of_kind(frames: list[list[SourceGroup]]) -> Iterator[SourceGroup]:
    """Sources of one kind have nearly the same names, so that a table of all sources and all names is nearly full."""
    sources = _numbered(group.sources for frame in frames for group in frame)
    names = _numbered(group.names for frame in frames for group in frame)
    shape = (len(sources), len(names))
    sums, counts = np.zeros(shape), np.zeros(shape)
    there = np.zeros(len(sources))
    greatest = np.full(shape, -np.inf)
    for frame in frames:
        for group in frame:
            rows = np.fromiter((sources[source] for source in group.sources), dtype=np.intp)
            columns = np.fromiter((names[name] for name in group.names), dtype=np.intp)
            cells = np.ix_(rows, columns)
            sums[cells] += group.values
            counts[cells] += 1
            greatest[cells] = np.maximum(greatest[cells], group.values)
            there[rows] += 1
    has = counts > 0
    for name, column in names.items():
        if name.endswith(MAX_SUFFIX):
            sums[:, column], counts[:, column] = greatest[:, column], 1
        elif is_share(name):
            counts[:, column] = there
    means = sums / np.maximum(counts, 1)
    listed_sources, listed_names = list(sources), list(names)
    patterns, which = np.unique(has, axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        rows, filled = np.flatnonzero(which.reshape(-1) == number), np.flatnonzero(pattern)
        yield SourceGroup(
            tuple(listed_sources[row] for row in rows),
            tuple(listed_names[column] for column in filled),
            means[np.ix_(rows, filled)],
        )


def _numbered(names: Iterable[tuple[str, ...]]) -> dict[str, int]:
    found = dict.fromkeys(name for part in names for name in part)
    return {name: number for number, name in enumerate(found)}
