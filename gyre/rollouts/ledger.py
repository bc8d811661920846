"""The sample ledger: what became of every prompt, kept so that whoever trains next can go on exactly.

A group is `queued → done → trained(step)`. Its samples are written before they are trained on, and kept until
a committed checkpoint covers their step. So a trainer that falls back to a checkpoint is given again what the
checkpoint does not cover, in the same batches, and never what it covers.

Invariants:
- *written before trained*: no group reaches the actor before its samples are in the ledger;
- *batches are fixed*: group `g` belongs to step `g // prompts_per_step + 1`, in every replay;
- *one writer*: a writer with an older term is refused (`Fenced`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.store import CheckpointRow, GroupRow, LedgerStore, RolloutStore, StepRow, open_store


@dataclass(slots=True)
class Recovered:
    """Where an earlier writer got to. `groups` are those with samples that no checkpoint covers."""

    cursor: int
    groups: dict[int, Group]
    step: int
    """The last optimizer step in the ledger; 0 before the first."""
    digests: dict[int, str]
    checkpoint_step: int | None
    checkpoint_path: Path | None
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Account:
    """The sum at the end. `lost` and `trained_twice` are group ids; both must be empty."""

    drawn: int
    trained: int
    waiting: int
    lost: tuple[int, ...]
    trained_twice: tuple[int, ...]


class SampleLedger:
    """The one writer of a job's ledger. `term` is the trainer's incarnation."""

    def __init__(self, store: LedgerStore, term: int) -> None:
        self._store = store
        self._term = term

    @classmethod
    @contextmanager
    def at(cls, store_url: str, job_id: str, term: int) -> Iterator[SampleLedger]:
        """The ledger of a job in the store at this URL; the store is closed at the end. Raises StoreError."""
        with open_store(store_url) as store:
            yield cls(store.ledger(job_id), term)

    def open(self) -> Recovered:
        """Fence every older writer and read what it left. Raises Fenced where a newer one exists."""
        self._store.take_over(term=self._term)
        rows = self._store.load()
        groups = {}
        for row in rows.groups:
            if row.payload is not None and row.status != "queued":
                (group,) = unpack_groups(row.payload)
                groups[row.group_id] = group
        checkpoint = rows.checkpoints[-1] if rows.checkpoints else None
        return Recovered(
            cursor=rows.cursor,
            groups=groups,
            step=rows.steps[-1].step if rows.steps else 0,
            digests={row.step: row.digest for row in rows.steps if row.digest is not None},
            checkpoint_step=checkpoint.step if checkpoint else None,
            checkpoint_path=Path(checkpoint.path) if checkpoint else None,
            metrics={row.step: row.metrics for row in rows.steps},
        )

    def drawn(self, group_ids: Sequence[int], cursor: int) -> None:
        """Prompts taken from the data; from here on each must be accounted for."""
        rows = [GroupRow(group_id=group_id, status="queued") for group_id in group_ids]
        self._store.write(self._term, groups=rows, cursor=cursor)

    def done(self, groups: Sequence[Group]) -> None:
        """Groups whose samples are whole and scored."""
        rows = []
        for group in groups:
            versions = group.versions or (None, None)
            rows.append(
                GroupRow(
                    group_id=group.id,
                    status="done",
                    version_min=versions[0],
                    version_max=versions[1],
                    payload=pack_groups([group]),
                )
            )
        self._store.write(self._term, groups=rows)

    def trained(
        self,
        *,
        step: int,
        version: int,
        digest: str,
        group_ids: Sequence[int],
        metrics: dict[str, Any],
        now: float,
    ) -> None:
        self._store.write(
            self._term,
            groups=[GroupRow(group_id=group_id, status="trained", step=step) for group_id in group_ids],
            steps=[StepRow(step, version, digest, list(group_ids), metrics, now)],
        )

    def checkpoint(self, *, step: int, path: Path, now: float) -> None:
        """A complete checkpoint of `step` is on disk: the samples that it covers are no longer needed."""
        self._store.write(
            self._term,
            checkpoint=CheckpointRow(step, str(path), now),
            drop_payloads_through_step=step,
        )

    def account(self) -> Account:
        return account_of(self._store)


@contextmanager
def rollout_ledger(store_url: str, job_id: str) -> Iterator[RolloutStore]:
    """The rollout manager's rows of a job in the store at this URL; closed at the end. Raises StoreError."""
    with open_store(store_url) as store:
        yield store.rollouts(job_id)


def account_of(store: LedgerStore) -> Account:
    """The account of a ledger, by SQL over what is stored, whoever wrote it."""
    audit = store.audit()
    lost = [group_id for first, last in audit.gaps for group_id in range(first, last + 1)]
    trained = audit.counts["trained"]
    waiting = audit.counts["queued"] + audit.counts["done"] + audit.counts["delivered"]
    return Account(
        drawn=audit.cursor,
        trained=trained,
        waiting=waiting,
        lost=tuple(lost),
        trained_twice=tuple(sorted(audit.duplicates)),
    )
