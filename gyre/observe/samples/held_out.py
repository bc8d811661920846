"""The reader of what policy versions answered to held-out prompts: one version, or two side by side.

Invariants:
- *the same prompt beside itself*: two versions are compared where both have the same prompt, by its tokens, at the same
  place of the set; a set that changed between them shows no pair that is none;
- *a verdict has a meaning or is null*: an answer is right as its evaluation's accuracy counted it
  (`gyre.workloads.trainer.evaluation.results`), which its file says; where that had none, rewards alone are compared.

This module must not know who asks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gyre.errors import NotFound
from gyre.observe.samples.names import held_out_of
from gyre.rollouts.samples import MORE
from gyre.rollouts.session_extras import ASKED

RIGHT_FROM = "gyre.right_from"
"""In a file's metadata: the reward from which on an answer is right; absent where the reward does not say it."""

RIGHT_BY = "gyre.right_by"
"""In a file's metadata: the number beside the reward that says of an answer whether it is right, as `reward.acc`."""

ROUNDING = 1e-6
"""How far a reward may be below that, or two means apart, and still count as equal."""


@dataclass(frozen=True, slots=True)
class _Version:
    """What is kept of one version: the rows of each prompt, by its place in the set."""

    version: int
    right_from: float | None
    right_by: str
    prompts: Mapping[int, Sequence[dict[str, Any]]]

    def is_right(self, row: Mapping[str, Any]) -> bool | None:
        """None where that has no meaning."""
        if self.right_by:
            said = dict(row["more"] or ()).get(self.right_by.removeprefix(MORE))
            return None if said is None else bool(said)
        if self.right_from is None or row["reward"] is None:
            return None
        return bool(row["reward"] >= self.right_from - ROUNDING)


class HeldOutFiles:
    """Reads `folder`, which need not exist. `item` makes of a row what a list of samples shows of it, and `columns` are
    those that it needs."""

    def __init__(
        self, folder: Path, item: Callable[[dict[str, Any]], dict[str, Any]], columns: Sequence[str]
    ) -> None:
        self._folder = folder
        self._item = item
        self._columns = columns

    def sets(self) -> dict[str, Any]:
        """`sets`: of each set its name as `set` and the `versions` that are kept, oldest first."""
        found: dict[str, list[int]] = {}
        for name, version in self._files():
            found.setdefault(name, []).append(version)
        return {"sets": [{"set": name, "versions": sorted(found[name])} for name in sorted(found)]}

    def answers(
        self, name: str, *, version: int | None = None, against: int | None = None, limit: int, offset: int
    ) -> dict[str, Any]:
        """A page of the prompts of a set with what `version` (the newest) answered, and beside it what the version
        `against` did. Those whose verdict changed come first, those that changed most first of all. Raises NotFound.
        """
        versions = sorted(version for of, version in self._files() if of == name)
        if not versions:
            raise NotFound(
                f"No answers to the held-out set {name} are kept.",
                hint="They come with its first evaluation, if observe.samples lets them.",
            )
        now = self._read(name, versions, versions[-1] if version is None else version)
        before = self._read(name, versions, against) if against is not None else None
        pairs = [_pair(now, before, place) for place in sorted(now.prompts)]
        changed = [pair for pair in pairs if pair["changed"]]
        changed.sort(key=lambda pair: (-abs(pair["difference"]), pair["prompt_number"]))
        same = [pair for pair in pairs if not pair["changed"]]
        page = (changed + same)[offset : offset + limit]
        for pair in page:
            self._show(pair)
        return {
            "set": name,
            "version": now.version,
            "against": before.version if before is not None else None,
            "total": len(pairs),
            "changed": len(changed),
            "better": sum(pair["difference"] > 0 for pair in changed),
            "unmatched": sum(pair["before"] is None for pair in pairs) if before is not None else 0,
            "prompts": page,
        }

    def _show(self, pair: dict[str, Any]) -> None:
        first = pair["now"]["samples"][0]
        shown = self._item(first)
        pair |= {key: shown[key] for key in ("prompt", "right_answer")}
        for side in (pair["now"], pair["before"]):
            if side is not None:
                side["samples"] = [self._item(row) for row in side["samples"]]

    def _files(self) -> list[tuple[str, int]]:
        """The set and the version of each file."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        return [found for name in names if (found := held_out_of(name)) is not None]

    def _read(self, name: str, versions: Sequence[int], version: int) -> _Version:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from gyre.observe.samples.names import held_out_file

        try:
            if version not in versions:
                raise FileNotFoundError
            with pq.ParquetFile(self._folder / held_out_file(name, version)) as opened:
                table = opened.read(
                    columns=list(self._columns)
                )  # an earlier version's file has not all of them
        except (OSError, pa.ArrowInvalid) as error:
            gone = isinstance(error, FileNotFoundError)  # perhaps given up meanwhile
            raise NotFound(
                f"The answers of version {version} to the held-out set {name} "
                + ("are not kept." if gone else f"cannot be read: {error}"),
                hint=f"Kept are those of {', '.join(map(str, versions))}.",
            ) from None
        prompts: dict[int, list[dict[str, Any]]] = {}
        for row in table.to_pylist():
            prompts.setdefault(row["group"], []).append(row)
        told = table.schema.metadata or {}
        right_from = told.get(RIGHT_FROM.encode())
        right_by = told.get(RIGHT_BY.encode(), b"").decode()
        return _Version(version, float(right_from) if right_from else None, right_by, prompts)


def _pair(now: _Version, before: _Version | None, place: int) -> dict[str, Any]:
    rows = now.prompts[place]
    earlier = before.prompts.get(place) if before is not None else None
    if earlier is not None and _asked(earlier[0]) != _asked(rows[0]):
        earlier = None
    right = _side(now, rows)
    left = _side(before, earlier) if before is not None and earlier is not None else None
    difference = _difference(right, left) if left is not None else 0.0
    return {
        "prompt_number": place,
        "difference": difference,
        "changed": abs(difference) > ROUNDING,
        "now": right,
        "before": left,
    }


def _asked(row: Mapping[str, Any]) -> Any:
    """The prompt that the data set has: of a session its rows begin with what its agent made of that."""
    return json.loads(row["meta"]).get(ASKED, row["prompt_ids"])


def _side(of: _Version, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many of the samples are `right`, None where that has no meaning, and what they earned on average. Of a
    rollout in several rows the last one, with which it ended."""
    rows = list({_rollout_of(row): row for row in rows}.values())
    verdicts = [of.is_right(row) for row in rows]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return {
        "count": len(rows),
        "right": None if None in verdicts else sum(map(bool, verdicts)),
        "reward": fmean(rewards) if rewards else None,
        "samples": rows,
    }


def _rollout_of(row: Mapping[str, Any]) -> int:
    rollout = row.get("rollout")  # an earlier version's file has none
    return int(row["sample"] if rollout is None else rollout)


def _difference(now: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    """By how much a larger share is right now, or by how much more was earned where nothing is right or wrong."""
    if now["right"] is not None and before["right"] is not None:
        return float(now["right"] / now["count"] - before["right"] / before["count"])
    if now["reward"] is None or before["reward"] is None:
        return 0.0
    return float(now["reward"] - before["reward"])
