"""The reader of a job's samples: which steps there are, the samples that a filter lets through, one sample whole.

Invariants:
- *the files are enough*: nothing else is asked, so the answers are the same while the job runs and when all of its
  machines are gone;
- *narrow first*: what filters and sorts is read of every file's end, and kept in memory while the file stays as it is;
  texts and tokens are read of those samples alone that are shown;
- *each end once*: however many ask at the same time, one of them reads a file's end;
- *a torn file is skipped*: what cannot be read is listed in `problems`, and costs nobody the other files.

This module must not know who asks.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gyre.errors import NotFound
from gyre.observe.samples.conversation import conversation_of, session_sentence
from gyre.observe.samples.held_out import HeldOutFiles
from gyre.observe.samples.names import HELD_OUT_FOLDER, QUARANTINED, TRAINED, is_quarantined, step_of
from gyre.observe.samples.narrow import KEY, NARROW, Narrow, narrow_of, packed_at_end, unpacked
from gyre.observe.samples.query import Order, SampleFilter
from gyre.observe.samples.right_answer import shown_right_answer

T = TypeVar("T")

TEXT_CUT = 2000
"""Characters of a prompt or an answer in a list; a sample that is asked for alone has all."""

BINS = 20
MOST_KEPT_SAMPLES = 4_000_000
"""Samples whose narrow columns stay in memory, about 64 bytes each."""

_SHOWN = (
    "step",
    "group",
    "sample",
    "rollout",
    "outcome",
    "quarantined",
    "reward",
    "more",
    "finish_reason",
    "prompt_tokens",
    "tokens",
    "versions",
    "instances",
    "turns",
    "session_outcome",
    "session_reason",
    "session_turns",
    "tool_s",
    "engine_s",
    "prompt",
    "answer",
    "meta",
)


_Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    name: str
    step: int | None
    """None: a group that is quarantined."""
    mtime_ns: int
    size: int

    @property
    def key(self) -> _Key:
        return self.name, self.mtime_ns, self.size


class SampleFiles:
    """Reads `folder`, which need not exist. May be used by several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held_out = HeldOutFiles(
            folder / HELD_OUT_FOLDER, partial(_item, cut=TEXT_CUT), (*_SHOWN, "prompt_ids")
        )
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        """Held while the ends of files are read."""
        self._narrow: OrderedDict[_Key, Narrow] = OrderedDict()
        self._kept_samples = 0
        """Of all that is in `_narrow`."""
        self._counts: dict[_Key, tuple[int, int]] = {}
        """Samples and groups of files."""
        self.problems: dict[str, str] = {}
        """Files that could not be read, each with a sentence."""

    @property
    def exists(self) -> bool:
        """Whether there is a file."""
        try:
            with os.scandir(self._folder) as entries:
                return any(_is_kept(entry.name) for entry in entries)
        except OSError:
            return False

    # -- what is asked --------------------------------------------------------------------------------

    def steps(self) -> dict[str, Any]:
        """`steps`: of each step that is kept its number, `samples`, `groups` and `bytes`; `quarantined`: how many
        groups are."""
        found, quarantined = [], 0
        files = self._files()
        self._read_ends(file for file in files if file.key not in self._counts)
        for file in files:
            counts = self._counts.get(file.key)
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
            for file, narrow in zip(files, self._narrows(files), strict=True)
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
        files = [file for file in self._files() if file.step in (step, None)]
        for file, narrow in zip(files, self._narrows(files), strict=True):
            if narrow is None:
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

    def held_out_sets(self) -> dict[str, Any]:
        """`sets`: of each held-out set its name as `set` and the `versions` whose answers are kept."""
        return self._held_out.sets()

    def held_out(
        self,
        name: str,
        *,
        version: int | None = None,
        against: int | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> dict[str, Any]:
        """What a version answered to a held-out set: see `HeldOutFiles.answers`. Raises NotFound."""
        return self._held_out.answers(name, version=version, against=against, limit=limit, offset=offset)

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
            found.append(_File(entry.path, entry.name, step, status.st_mtime_ns, status.st_size))
        found.sort(key=lambda file: (file.step is None, file.step or 0, file.name))
        return found

    def _narrows(self, files: Sequence[_File]) -> list[Narrow | None]:
        """Of each file what filters and sorts; None of one that cannot be read."""
        with self._lock:
            found = [self._known(file.key) for file in files]
        if any(one is None for one in found):
            read = self._read_ends(file for file, one in zip(files, found, strict=True) if one is None)
            found = [
                read.get(file.key) if one is None else one for file, one in zip(files, found, strict=True)
            ]
        return found

    def _known(self, key: _Key) -> Narrow | None:
        known = self._narrow.get(key)
        if known is not None:
            self._narrow.move_to_end(key)
        return known

    def _read_ends(self, files: Iterable[_File]) -> dict[_Key, Narrow]:
        """What filters and sorts of these files, which are kept from now on; without those that cannot be read."""
        read: dict[_Key, Narrow] = {}
        with self._reading:
            for file in files:
                with self._lock:
                    known = self._known(file.key) if file.key in self._counts else None
                if known is None:
                    if (known := self._tried(file, partial(_read_end, file))) is None:
                        continue
                    self._keep(file.key, known)
                read[file.key] = known
        return read

    def _keep(self, key: _Key, narrow: Narrow) -> None:
        with self._lock:
            self._counts[key] = len(narrow), len(np.unique(narrow.groups))
            if key not in self._narrow:
                self._kept_samples += len(narrow)
            self._narrow[key] = narrow
            while self._kept_samples > MOST_KEPT_SAMPLES and len(self._narrow) > 1:
                self._kept_samples -= len(self._narrow.popitem(last=False)[1])

    def _tried(self, file: _File, read: Callable[[], T]) -> T | None:
        """What `read` returns; None, and a problem, where the file cannot be read."""
        try:
            return read()
        except FileNotFoundError:  # it was given up meanwhile
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:  # pyarrow's errors are some of these
            self.problems[file.name] = f"{file.path} cannot be read, and is left out: {_first_line(error)}"
            return None

    def _shown(self, chosen: Sequence[tuple[_File, int]]) -> list[dict[str, Any]]:
        """The items of these rows, in this order; without those whose file has gone meanwhile."""
        by_file: dict[str, tuple[_File, list[int]]] = {}
        for file, row in chosen:
            by_file.setdefault(file.name, (file, []))[1].append(row)
        items: dict[tuple[str, int], dict[str, Any]] = {}
        for name, (file, rows) in by_file.items():
            found = self._tried(file, partial(self._read, file, rows, _SHOWN))
            for row, values in zip(rows, found or (), strict=False):
                items[name, row] = _item(values, cut=TEXT_CUT)
        return [items[key] for file, row in chosen if (key := (file.name, row)) in items]

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


def _read_end(file: _File) -> Narrow:
    """What filters and sorts of the file. Raises what pyarrow does."""
    if (narrow := packed_at_end(file.path, file.step)) is not None:
        return narrow
    import pyarrow.parquet as pq

    with pq.ParquetFile(file.path) as opened:
        packed = (opened.metadata.metadata or {}).get(KEY)
        if packed is not None and (narrow := unpacked(packed, file.step)) is not None:
            return narrow
        # Somebody wrote it anew, or another version of Gyre wrote it.
        return narrow_of(opened.read(columns=list(NARROW), use_threads=False), file.step)


def _is_kept(name: str) -> bool:
    return step_of(name) is not None or is_quarantined(name)


def _item(values: dict[str, Any], *, cut: int | None) -> dict[str, Any]:
    return {
        "step": values["step"],
        "group": values["group"],
        "sample": values["sample"],
        "rollout": values.get("rollout"),  # a file of an earlier version has none
        "reward": values["reward"],
        "more": dict(values["more"] or ()),
        "outcome": values["outcome"],
        "finish_reason": values["finish_reason"] or "",
        "prompt": _cut(values["prompt"], cut),
        "answer": _cut(values["answer"], cut),
        "right_answer": _cut(shown_right_answer(_json(values["meta"])), cut),
        "prompt_tokens": values["prompt_tokens"],
        "tokens": values["tokens"],
        "versions": [[run["version"], run["start"], run["end"]] for run in values["versions"] or ()],
        "instances": [[run["name"], run["start"], run["end"]] for run in values["instances"] or ()],
        "quarantined": values["outcome"] == QUARANTINED,
        "session": _session(values),
    }


def _session(values: dict[str, Any]) -> dict[str, Any] | None:
    """What a row says of its session; None of another sample, as of every one in a file of an earlier version."""
    if values.get("session_outcome") is None:
        return None
    session = {
        "outcome": values["session_outcome"],
        "reason": values["session_reason"] or "",
        "turns": values["session_turns"],
        "turns_here": len(values["turns"] or ()),
        "tool_s": values["tool_s"],
        "engine_s": values["engine_s"],
    }
    return session | {"sentence": session_sentence(values["rollout"], session)}


def _whole(values: dict[str, Any]) -> dict[str, Any]:
    found = _item(values, cut=None)
    for name in ("prompt_ids", "prompt_pieces", "token_ids", "pieces"):
        found[name] = values[name]
    for name in ("logprobs", "trainer_logprobs", "ref_logprobs", "values", "advantage"):
        found[name] = values[name]
    found["mask"] = _mask(values.get("drawn"), values["tokens"])
    found["conversation"] = conversation_of(values)
    found["meta"] = _json(values["meta"])
    found["extras"] = _json(values["extras"])
    return found


def _mask(drawn: list[dict[str, int]] | None, count: int) -> list[bool] | None:
    """Of each token whether it was drawn, and so trained; None where all were, as in every file of an earlier
    version."""
    if drawn is None:
        return None
    mask = np.zeros(count, np.bool_)
    for run in drawn:
        mask[run["start"] : run["end"]] = True
    found: list[bool] = mask.tolist()
    return found


def _json(text: str | None) -> dict[str, Any]:
    found = json.loads(text) if text else {}
    return found if isinstance(found, dict) else {}


def _cut(text: str | None, most: int | None) -> str | None:
    return text if text is None or most is None or len(text) <= most else text[:most]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
