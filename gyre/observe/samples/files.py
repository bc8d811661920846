"""The reader of a job's samples: which steps there are, the samples that a filter lets through, one sample whole.

Invariants:
- *the files are enough*: nothing else is asked, so the answers are the same while the job runs and when all of its
  machines are gone;
- *narrow first*: what filters and sorts is read of every file's end, and kept in memory while the file stays as it is;
  texts and tokens are read of those samples alone that are shown;
- *a torn file is skipped*: what cannot be read is told in `problems`, and costs nobody the other files.

This module must not know who asks.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gyre.errors import NotFound
from gyre.observe.samples.names import QUARANTINED, TRAINED, is_quarantined, step_of
from gyre.observe.samples.narrow import KEY, NARROW, Narrow, narrow_of, unpacked
from gyre.observe.samples.query import Order, SampleFilter

T = TypeVar("T")

TEXT_CUT = 2000
"""Characters of a prompt or an answer in a list; a sample that is asked for alone has all."""

BINS = 20
MOST_KEPT_SAMPLES = 4_000_000
"""Samples whose narrow columns stay in memory, about 60 bytes each."""

_READERS = 4
_SHOWN = (
    "step",
    "group",
    "sample",
    "outcome",
    "quarantined",
    "reward",
    "more",
    "finish_reason",
    "prompt_tokens",
    "tokens",
    "versions",
    "instances",
    "prompt",
    "answer",
)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    step: int | None
    """None: a group that is quarantined."""
    mtime_ns: int
    size: int

    @property
    def key(self) -> tuple[str, int, int]:
        return self.path.name, self.mtime_ns, self.size


class SampleFiles:
    """Reads `folder`, which need not exist. May be used by several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._narrow: OrderedDict[tuple[str, int, int], Narrow] = OrderedDict()
        self._kept_samples = 0
        """Of all that is in `_narrow`."""
        self._counts: dict[tuple[str, int, int], tuple[int, int]] = {}
        """Samples and groups of files."""
        self.problems: dict[str, str] = {}
        """Files that could not be read, each with a sentence."""

    @property
    def exists(self) -> bool:
        """Whether there is a file."""
        return bool(self._files())

    # -- what is asked --------------------------------------------------------------------------------

    def steps(self) -> dict[str, Any]:
        """`steps`: of each step that is kept its number, `samples`, `groups` and `bytes`; `quarantined`: how many
        groups are."""
        found, quarantined = [], 0
        files = self._files()
        for file, counts in zip(files, self._each(files, self._counted), strict=True):
            if counts is None:
                continue
            if file.step is None:
                quarantined += 1
                continue
            samples, groups = counts
            found.append({"step": file.step, "samples": samples, "groups": groups, "bytes": file.size})
        with self._lock:
            keys = {file.key for file in files}
            self._counts = {key: counts for key, counts in self._counts.items() if key in keys}
        return {"steps": found, "quarantined": quarantined}

    def find(
        self, wanted: SampleFilter, *, order: Order = "step", limit: int = 50, offset: int = 0
    ) -> dict[str, Any]:
        """`samples`: a page of those that the filter lets through, `total` of them, and the `histogram` of all their
        rewards: `edges`, one more than there are `counts`.

        In the order `step` the newest step comes first; `worst` and `best` go by reward, and samples without one come
        last.
        """
        files = [file for file in self._files() if wanted.step is None or file.step in (wanted.step, None)]
        read = [
            (file, narrow)
            for file, narrow in zip(files, self._each(files, self._narrow_of), strict=True)
            if narrow is not None
        ]
        found = [(file, narrow, narrow.matching(wanted)) for file, narrow in read]
        found = [(file, narrow, rows) for file, narrow, rows in found if len(rows)]
        total = sum(len(rows) for _, _, rows in found)
        if not total:
            return {"samples": [], "total": 0, "histogram": {"edges": [], "counts": []}}
        places = np.repeat(np.arange(len(found)), [len(rows) for _, _, rows in found])
        rows = np.concatenate([rows for _, _, rows in found])
        rewards = np.concatenate([narrow.rewards[rows] for _, narrow, rows in found])
        steps = np.concatenate([narrow.steps[rows] for _, narrow, rows in found])
        chosen = _ordered(order, rewards, steps, offset + limit)[offset : offset + limit]
        shown = self._shown([(found[int(places[at])][0], int(rows[at])) for at in chosen.tolist()])
        return {"samples": shown, "total": total, "histogram": histogram(rewards)}

    def sample(self, step: int, group: int, sample: int) -> dict[str, Any]:
        """One sample with all that is kept of it. Of one that was given up and one that was trained, which have the
        same number, the trained one. Raises NotFound."""
        best: tuple[bool, _File, int] | None = None
        for file in self._files():
            if file.step not in (step, None) or (narrow := self._narrow_of(file)) is None:
                continue
            wanted = SampleFilter(step=step, group=group)
            for row in narrow.matching(wanted).tolist():
                if narrow.samples[row] != sample:
                    continue
                is_trained = narrow.outcomes.names[narrow.outcomes.codes[row]] == TRAINED
                if best is None or is_trained:
                    best = (is_trained, file, row)
        if best is None:
            raise NotFound(
                f"There is no sample {sample} of group {group} in step {step}.",
                hint="`gyre samples` lists those that are kept.",
            )
        _, file, row = best
        (values,) = self._read(file, [row], None)
        return _whole(values)

    # -- files ----------------------------------------------------------------------------------------

    def _files(self) -> list[_File]:
        """The files in the order of steps, then those of quarantined groups."""
        found = []
        try:
            entries = list(os.scandir(self._folder))
        except OSError:
            return []
        for entry in entries:
            step = step_of(entry.name)
            if step is None and not is_quarantined(entry.name):
                continue
            try:
                status = entry.stat()
            except OSError:  # it was given up meanwhile
                continue
            found.append(_File(Path(entry.path), step, status.st_mtime_ns, status.st_size))
        found.sort(key=lambda file: (file.step is None, file.step or 0, file.path.name))
        return found

    def _each(self, files: Sequence[_File], read: Callable[[_File], T]) -> list[T]:
        if len(files) < 2 * _READERS:
            return [read(file) for file in files]
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(read, files))

    def _counted(self, file: _File) -> tuple[int, int] | None:
        if file.key in self._counts:
            return self._counts[file.key]
        import pyarrow.parquet as pq

        def count() -> tuple[int, int]:
            metadata = pq.read_metadata(file.path)
            return metadata.num_rows, int((metadata.metadata or {}).get(b"gyre.groups", b"0"))

        counts = self._tried(file, count)
        if counts is not None:
            self._counts[file.key] = counts
        return counts

    def _narrow_of(self, file: _File) -> Narrow | None:
        with self._lock:
            known = self._narrow.get(file.key)
            if known is not None:
                self._narrow.move_to_end(file.key)
                return known
        narrow = self._tried(file, lambda: _read_narrow(file))
        if narrow is not None:
            with self._lock:
                if file.key not in self._narrow:
                    self._kept_samples += len(narrow)
                self._narrow[file.key] = narrow
                while self._kept_samples > MOST_KEPT_SAMPLES and len(self._narrow) > 1:
                    self._kept_samples -= len(self._narrow.popitem(last=False)[1])
        return narrow

    def _tried(self, file: _File, read: Callable[[], T]) -> T | None:
        """What `read` returns; None, and a problem, where the file cannot be read."""
        try:
            return read()
        except FileNotFoundError:  # it was given up meanwhile
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:  # pyarrow's errors are some of these
            self.problems[file.path.name] = (
                f"{file.path} cannot be read, and is left out: {_first_line(error)}"
            )
            return None

    def _shown(self, chosen: Sequence[tuple[_File, int]]) -> list[dict[str, Any]]:
        """The items of these rows, in this order; without those whose file has gone meanwhile."""
        by_file: dict[str, tuple[_File, list[int]]] = {}
        for file, row in chosen:
            by_file.setdefault(file.path.name, (file, []))[1].append(row)
        items: dict[tuple[str, int], dict[str, Any]] = {}
        for name, (file, rows) in by_file.items():
            found = self._tried(file, partial(self._read, file, rows, _SHOWN))
            for row, values in zip(rows, found or (), strict=False):
                items[name, row] = _item(values, cut=TEXT_CUT)
        return [items[key] for file, row in chosen if (key := (file.path.name, row)) in items]

    def _read(self, file: _File, rows: Sequence[int], columns: Iterable[str] | None) -> list[dict[str, Any]]:
        """These columns of these rows, in this order; only the parts of the file that have them are read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetFile(file.path) as opened:
            sizes = [opened.metadata.row_group(at).num_rows for at in range(opened.num_row_groups)]
            starts = np.concatenate(([0], np.cumsum(sizes)))
            of = np.searchsorted(starts, rows, side="right") - 1
            parts = sorted(set(of.tolist()))
            table = opened.read_row_groups(parts, columns=list(columns) if columns else None)
            moved = dict(
                zip(parts, np.concatenate(([0], np.cumsum([sizes[at] for at in parts]))), strict=False)
            )
            places = [int(row - starts[at] + moved[at]) for row, at in zip(rows, of.tolist(), strict=True)]
            found: list[dict[str, Any]] = table.take(pa.array(places)).to_pylist()
            return found


def histogram(rewards: NDArray[np.float64]) -> dict[str, list[Any]]:
    """How many samples earned what; those without a finite reward are left out."""
    finite = rewards[np.isfinite(rewards)]
    if not len(finite):
        return {"edges": [], "counts": []}
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        return {"edges": [low, high], "counts": [len(finite)]}
    counts, edges = np.histogram(finite, bins=BINS, range=(low, high))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _ordered(
    order: Order, rewards: NDArray[np.float64], steps: NDArray[np.int32], most: int
) -> NDArray[np.int64]:
    """The first `most` in this order; what is equal stays as it is."""
    keys = -steps.astype(np.float64) if order == "step" else rewards if order == "worst" else -rewards
    if most >= len(keys):
        return np.argsort(keys, kind="stable")  # NaN comes last
    smallest = np.partition(keys, most - 1)[most - 1] if most else np.nan
    if np.isnan(smallest):
        return np.argsort(keys, kind="stable")[:most]
    candidates = np.flatnonzero(keys <= smallest)
    return candidates[np.argsort(keys[candidates], kind="stable")][:most]


def _read_narrow(file: _File) -> Narrow:
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(file.path).metadata or {}
    if KEY in metadata:
        return unpacked(metadata[KEY], file.step)
    with pq.ParquetFile(file.path) as opened:  # somebody wrote it anew
        return narrow_of(opened.read(columns=list(NARROW), use_threads=False), file.step)


def _item(values: dict[str, Any], *, cut: int | None) -> dict[str, Any]:
    return {
        "step": values["step"],
        "group": values["group"],
        "sample": values["sample"],
        "reward": values["reward"],
        "more": dict(values["more"] or ()),
        "outcome": values["outcome"],
        "finish_reason": values["finish_reason"] or "",
        "prompt": _cut(values["prompt"], cut),
        "answer": _cut(values["answer"], cut),
        "prompt_tokens": values["prompt_tokens"],
        "tokens": values["tokens"],
        "versions": [[run["version"], run["start"], run["end"]] for run in values["versions"] or ()],
        "instances": [[run["name"], run["start"], run["end"]] for run in values["instances"] or ()],
        "quarantined": values["outcome"] == QUARANTINED,
    }


def _whole(values: dict[str, Any]) -> dict[str, Any]:
    found = _item(values, cut=None)
    for name in ("prompt_ids", "prompt_pieces", "token_ids", "pieces"):
        found[name] = values[name]
    for name in ("logprobs", "trainer_logprobs", "ref_logprobs", "values", "advantage"):
        found[name] = values[name]
    found["mask"] = None  # every token of a sample is trained
    found["meta"] = _json(values["meta"])
    found["extras"] = _json(values["extras"])
    return found


def _json(text: str | None) -> dict[str, Any]:
    found = json.loads(text) if text else {}
    return found if isinstance(found, dict) else {}


def _cut(text: str | None, most: int | None) -> str | None:
    return text if text is None or most is None or len(text) <= most else text[:most]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
