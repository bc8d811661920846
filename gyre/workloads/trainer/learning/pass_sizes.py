"""How large the passes of each learner are: smaller after one that did not fit into memory, which first spares its
activations where it kept them by its own choice, and then is halved.

Invariants:
- *what was learned is kept*: the ledger has it before the gang is formed again, so it outlives ranks, trainer and
  master. Ranks that come back begin with passes that fit;
- *as it was made*: a step that is trained again is so in passes of the size that it was made in, which fitted, so that
  it gives the same bits. Where one does not fit any more, it and all later ones have smaller ones;
- *told once*: a later trainer reports again what an earlier one may not have been heard to say, under the same number,
  which the master accepts once;
- *of another size nothing is known*: where whole passes have another size than when they did not fit (the user has said
  another, or another number of ranks has other room), ranks begin with whole ones; and where they have a size of before
  again, with what was learned of that.

This module must not know what a pass is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gyre.errors import OUT_OF_MEMORY
from gyre.rollouts.trainer.sample_ledger import Passes
from gyre.workloads.memory.choice import smaller
from gyre.workloads.owner import HearsEvents
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.messages import Failure

_KEYS = ("pass_tokens", "passes", "recompute")
"""What ranks say of their passes: see `gyre.workloads.memory.choice.smaller`."""


class PassSizes:
    """Halves a learner's passes at most `most` times in the job, after activations that its ranks can spare."""

    def __init__(self, groups: GroupState, most: int, reports: HearsEvents) -> None:
        self._groups = groups
        self._most = most
        self._reports = reports
        self._sizes: dict[str, dict[str, int]] = {}
        """What the ranks of each role said last."""
        self._reported: set[int] = set()
        """The numbers of the rows that this trainer has reported."""

    def halved(self, role: str, step: int) -> int:
        """How often the passes of the role are made smaller in a step."""
        rows = [row for row in self._groups.passes if row.role == role and row.from_step <= step]
        return rows[-1].halved if rows else 0

    def failed(self, blamed: tuple[Member, str, Failure], step: int) -> None:
        """A gang was lost by this failure of one of its ranks, when it trained `step`."""
        (vertex, _), _, failure = blamed
        role = vertex.rpartition("-")[0]
        halved = self.halved(role, step)
        most = self._most + ("recompute" in self._sizes.get(role, {}))
        if failure.code == OUT_OF_MEMORY and halved < most:
            self._learn(role, step, halved + 1, failure.error)

    def begun(self, role: str, step: int, results: Sequence[Any]) -> bool:
        """The role's ranks have begun a step, with these results: tell it where their passes are smaller. False where
        they are to begin it again, because whole passes have another size than before."""
        first = results[0] if results and isinstance(results[0], dict) else {}
        size = {key: first[key] for key in _KEYS if isinstance(first.get(key), int)}
        rows = [row for row in self._groups.passes if row.role == role]
        self._sizes[role] = size
        if not rows or not size:
            return True
        last = rows[-1]
        if last.size and last.size != size:
            self._learn(role, step, 0, "")
            return False
        if not last.size:
            known = next((row for row in reversed(rows) if row.halved and _is_of(row, size)), None)
            if not last.halved and known is not None:
                self._learn(role, step, known.halved, "")
                return False
            self._groups.record_passes(replace(last, size=size))
        for row in self._groups.passes:
            if row.role == role and row.error and row.size and row.number not in self._reported:
                self._reported.add(row.number)
                self._reports.report(
                    "PassesHalved", role=role, error=row.error, number=row.number, **row.size
                )
        return True

    def _learn(self, role: str, step: int, halved: int, error: str) -> None:
        self._groups.record_passes(Passes(len(self._groups.passes) + 1, role, step, halved, error=error))


def _is_of(row: Passes, whole: dict[str, int]) -> bool:
    """Whether the row's passes are what whole ones of this size become."""
    return bool(row.size) and row.size == smaller(whole, row.halved)
