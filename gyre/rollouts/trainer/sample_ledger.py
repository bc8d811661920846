"""The sample ledger: the status of every prompt, so that the next trainer goes on exactly where the last one was.

A group's status is `queued` when its prompt is drawn, `done` when its samples are scored, and `trained` with its step.
The samples are written before they are trained on, and kept until a committed checkpoint covers their step. So a
trainer that falls back to a checkpoint is given again what the checkpoint does not cover, in the same batches, and
never what it covers. Samples outlast one checkpoint more, for the newest may turn out to be damaged (`trained_since`).
A group that is quarantined or given up is `dropped`, and another prompt takes its slot.

Invariants:
- *written before trained*: no group reaches the actor before its samples are in the ledger;
- *batches are recorded*: no micro-batch reaches the actor before the ledger knows which groups it has, on which rank.
  A replay sends what is recorded;
- *nothing vanishes*: every prompt that was drawn is queued, done, trained or dropped, and samples that
  are not trained on are counted, with the reason;
- *one writer*: a writer with an older term is refused (`Fenced`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gyre.errors import ConfigError
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.store import (
    CheckpointRow,
    DiscardRow,
    GroupRow,
    LedgerStore,
    MicroBatchRow,
    PassesRow,
    RestoreRow,
    RolloutStore,
    StepRow,
    open_store,
)


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """A micro-batch: the ids of each rank's groups. The `last` one completes its step."""

    step: int
    index: int
    shares: tuple[tuple[int, ...], ...]
    last: bool

    @property
    def ids(self) -> list[int]:
        return sorted(group_id for share in self.shares for group_id in share)


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore of a role's ranks, which could not go on from the state that they had. `gang` is the incarnation of the
    first rank; `number` counts a job's restores from 1."""

    number: int
    role: str
    gang: int
    source: str
    checkpoint_step: int
    step: int | None = None
    """The step that they were restored to; None while the restore is under way, or where the trainer died in it."""
    seconds: float | None = None
    """How long it took; None where the trainer that began it died."""


@dataclass(frozen=True, slots=True)
class Passes:
    """From `from_step` on the passes of a role are halved so many times, for `error` was said by a rank whose pass did
    not fit into memory. The row with the greatest `number` of those that hold for a step counts."""

    number: int
    role: str
    from_step: int
    halved: int
    size: dict[str, int] = field(default_factory=dict)
    """What the ranks said of it when they began with it: `pass_tokens`, or `passes`; empty before."""
    error: str = ""


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
    batches: dict[int, list[RecordedBatch]] = field(default_factory=dict)
    """The micro-batches of the steps that no checkpoint covers, and of the step that was being made."""
    trained: frozenset[int] = frozenset()
    """Those of `groups` that are trained."""
    queued: dict[int, int | None] = field(default_factory=dict)
    """Groups that were drawn and are not scored, each with the oldest policy version that it was requested of, where
    that was recorded."""
    replaced: dict[int, int] = field(default_factory=dict)
    """Groups that were replaced, each with the group in its slot."""
    restores: dict[str, Restore] = field(default_factory=dict)
    """The last restore of each role that had one."""
    restore_count: int = 0
    passes: list[Passes] = field(default_factory=list)
    """What was learned of how large passes may be, by number."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Scored groups whose samples cannot be read, each with the reason."""


@dataclass(frozen=True, slots=True)
class PromptAccount:
    """The sum at the end: `drawn = trained + waiting + dropped`. `lost` and `trained_twice` are group ids; both must
    be empty. `discarded` counts tokens of samples that were not trained on, by reason."""

    drawn: int
    trained: int
    waiting: int
    lost: tuple[int, ...]
    trained_twice: tuple[int, ...]
    dropped: int = 0
    discarded: dict[str, int] = field(default_factory=dict)


NOT_FINITE_BATCH = "not_finite"
"""The reason of discards for a batch that was skipped because its gradient was not finite."""

NO_SAMPLES = b""
"""The payload of a group whose samples were discarded: nobody reads them again, and a long run would keep them all."""


class SampleLedger:
    """The one writer of a job's ledger. `term` is the trainer's incarnation."""

    def __init__(self, store: LedgerStore, term: int) -> None:
        self._store = store
        self._term = term
        self._discards = 0

    @classmethod
    @contextmanager
    def at(cls, store_url: str, job_id: str, term: int, *, hold_s: float) -> Iterator[SampleLedger]:
        """The ledger of a job in the store at this URL, whose transactions wait `hold_s` for a store that is lost; it
        is closed at the end. Raises StoreError."""
        with open_store(store_url, create=False, hold_s=hold_s) as store:
            yield cls(store.ledger(job_id), term)

    def open(self) -> Recovered:
        """Fence every older writer and read what it left. Raises Fenced where a newer one exists."""
        self._store.take_over(term=self._term)
        rows = self._store.load()
        self._discards = rows.discards
        groups: dict[int, Group] = {}
        trained: set[int] = set()
        queued: dict[int, int | None] = {}
        unreadable: dict[int, str] = {}
        for row in rows.groups:
            if row.status == "queued":
                queued[row.group_id] = row.version_min
            elif row.payload is not None and row.status != "dropped":
                try:
                    (group,) = unpack_groups(row.payload)
                except ValueError as error:
                    if row.status == "trained":
                        raise  # a replay needs it
                    unreadable[row.group_id] = str(error)
                    continue
                groups[row.group_id] = group
                if row.status == "trained":
                    trained.add(row.group_id)
        batches = _batches_of(rows.micro_batches)
        checkpoint = rows.checkpoints[-1] if rows.checkpoints else None
        return Recovered(
            cursor=rows.cursor,
            groups=groups,
            step=rows.steps[-1].step if rows.steps else 0,
            digests={row.step: row.digest for row in rows.steps if row.digest is not None},
            checkpoint_step=checkpoint.step if checkpoint else None,
            checkpoint_path=Path(checkpoint.path) if checkpoint else None,
            metrics={row.step: row.metrics for row in rows.steps},
            batches=batches,
            trained=frozenset(trained),
            queued=queued,
            replaced=rows.replaced,
            restores={row.role: Restore(**asdict(row)) for row in rows.restores},
            restore_count=rows.restores[-1].number if rows.restores else 0,
            passes=[Passes(**asdict(row)) for row in rows.passes],
            unreadable=unreadable,
        )

    def check_data(self, identity: str) -> None:
        """Check that prompts are drawn from what they were drawn from before, where that is known; from now on it is.
        Raises ConfigError, which names both."""
        held = self._store.hold_data(self._term, identity)
        if held != identity:
            raise ConfigError(
                f"the job has drawn its prompts from {held}; now they would come from {identity}.",
                hint="A prompt that is asked for again must be the same. Bring the data back, or begin another job "
                "with these weights: gyre run FILE --from JOB.",
            )

    def record_drawn(self, group_ids: Sequence[int], cursor: int) -> None:
        """Prompts were drawn from the data; from here on each must be accounted for."""
        rows = [GroupRow(group_id=group_id, status="queued") for group_id in group_ids]
        self._store.write(self._term, groups=rows, cursor=cursor)

    def record_requested(self, group_ids: Sequence[int], version: int) -> None:
        """Queued groups are requested of this policy version and newer ones. A later trainer must not take their
        samples for younger than they may be."""
        self._store.write(self._term, groups=[_queued(group_id, version) for group_id in group_ids])

    def record_batch(self, batch: RecordedBatch) -> None:
        """The groups of a micro-batch, before it is sent to the actor. The last one of a step survives a power cut."""
        shares = [list(share) for share in batch.shares]
        row = MicroBatchRow(batch.step, batch.index, shares, batch.last)
        self._store.write(self._term, micro_batches=[row])

    def forget_batches(self, step: int) -> None:
        """Forget the micro-batches of a step that is not trained, whose groups are not to be trained as they are."""
        self._store.write(self._term, forget_micro_batches_of_step=step)

    def record_redrawn(
        self, group_id: int, *, version: int, reason: str, tokens: int, evidence: str, now: float
    ) -> None:
        """The samples of a group are discarded, and its prompt is queued again for policies of `version` and newer."""
        discard = self._discard(group_id, reason, tokens, evidence, now, None)
        row = replace(_queued(group_id, version), payload=NO_SAMPLES)
        self._store.write(self._term, groups=[row], discards=[discard])

    def record_replaced(
        self,
        group_id: int,
        *,
        replaced_by: int,
        cursor: int,
        reason: str,
        tokens: int,
        evidence: str,
        now: float,
    ) -> None:
        """Record that the group `replaced_by`, newly drawn, takes the slot of another for good."""
        discard = self._discard(group_id, reason, tokens, evidence, now, replaced_by)
        rows = [
            GroupRow(group_id, "dropped", payload=NO_SAMPLES),
            GroupRow(replaced_by, "queued"),
        ]
        self._store.write(self._term, groups=rows, discards=[discard], cursor=cursor)

    def _discard(
        self, group_id: int, reason: str, tokens: int, evidence: str, now: float, replaced_by: int | None
    ) -> DiscardRow:
        self._discards += 1
        return DiscardRow(self._discards, group_id, reason, tokens, now, replaced_by, evidence)

    def record_scored(self, groups: Sequence[Group]) -> None:
        """Groups with all of their samples, scored."""
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

    def record_trained(
        self,
        *,
        step: int,
        version: int,
        digest: str | None,
        group_ids: Sequence[int],
        metrics: dict[str, Any],
        now: float,
    ) -> None:
        """`digest` is None where it is not known yet: `record_digest` tells it before anybody is served the weights."""
        self._store.write(
            self._term,
            groups=[GroupRow(group_id=group_id, status="trained", step=step) for group_id in group_ids],
            steps=[StepRow(step, version, digest, list(group_ids), metrics, now)],
        )

    def record_skipped(
        self, *, step: int, group_tokens: dict[int, int], evidence: str, metrics: dict[str, Any], now: float
    ) -> None:
        """A step that left the weights as they were. Its groups, with their numbers of tokens, are dropped; none
        takes their slots, for the step is done."""
        discards = [
            self._discard(group_id, NOT_FINITE_BATCH, tokens, evidence, now, None)
            for group_id, tokens in group_tokens.items()
        ]
        self._store.write(
            self._term,
            groups=[GroupRow(group_id, "dropped", payload=NO_SAMPLES) for group_id in group_tokens],
            steps=[StepRow(step, step, None, [], metrics, now)],
            discards=discards,
        )

    def record_digest(self, step: int, digest: str) -> None:
        """The checksum of the weights after a step that is recorded."""
        self._store.write(self._term, digests={step: digest})

    def forget_digests(self, step: int) -> None:
        """From `step` on the weights differ from those whose digests were recorded."""
        self._store.write(self._term, forget_digests_from_step=step)

    def record_checkpoint(self, *, step: int, path: Path, now: float, older: int | None = None) -> None:
        """A complete checkpoint of `step` is on disk. The samples that the one of step `older` covers, which is kept
        beside it, are no longer needed; without such a one, those that this one covers."""
        self._store.write(
            self._term,
            checkpoint=CheckpointRow(step, str(path), now),
            drop_payloads_through_step=step if older is None else older,
        )

    def trained_since(
        self, step: int, last: int, *, skipped: Collection[int] = ()
    ) -> tuple[dict[int, Group], dict[int, list[RecordedBatch]]] | None:
        """The groups that the steps after `step` up to `last` trained, and their micro-batches by step; nothing of
        those that were `skipped`. None where some of it is in the ledger no more."""
        groups, rows = self._store.load_trained(after=step, through=last)
        if any(row.payload is None for row in groups):
            return None
        found = {row.group_id: unpack_groups(row.payload)[0] for row in groups if row.payload is not None}
        batches = {at: found for at, found in _batches_of(rows).items() if at not in skipped}
        trained: dict[int, set[int]] = {at: set() for at in range(step + 1, last + 1) if at not in skipped}
        for row in groups:
            trained.setdefault(row.step or 0, set()).add(row.group_id)
        listed = {at: {group_id for one in batches.get(at, ()) for group_id in one.ids} for at in trained}
        return (found, batches) if all(trained.values()) and listed == trained else None

    def record_restore(self, restore: Restore) -> None:
        """The state of a restore: written before the ranks are changed, and when it has ended."""
        self._store.write(self._term, restore=RestoreRow(**asdict(restore)))

    def record_passes(self, passes: Passes) -> None:
        """What was learned of how large passes may be: written when one did not fit, and when the ranks have begun with
        smaller ones."""
        self._store.write(self._term, passes=PassesRow(**asdict(passes)))

    def account(self) -> PromptAccount:
        return account_of(self._store)


def _batches_of(rows: Sequence[MicroBatchRow]) -> dict[int, list[RecordedBatch]]:
    """By step."""
    batches: dict[int, list[RecordedBatch]] = {}
    for row in rows:
        shares = tuple(tuple(share) for share in row.shares)
        batches.setdefault(row.step, []).append(RecordedBatch(row.step, row.position, shares, row.last))
    return batches


def _queued(group_id: int, version: int) -> GroupRow:
    return GroupRow(group_id, "queued", version_min=version, version_max=version)


@contextmanager
def rollout_ledger(store_url: str, job_id: str, *, hold_s: float) -> Iterator[RolloutStore]:
    """The rollout manager's rows of a job in the store at this URL, whose transactions wait `hold_s` for a store that
    is lost; closed at the end. Raises StoreError."""
    with open_store(store_url, create=False, hold_s=hold_s) as store:
        yield store.rollouts(job_id)


def account_of(store: LedgerStore) -> PromptAccount:
    """The account of a ledger, by SQL over what is stored, whoever wrote it."""
    audit = store.audit()
    lost = [group_id for first, last in audit.gaps for group_id in range(first, last + 1)]
    trained = audit.counts["trained"]
    waiting = audit.counts["queued"] + audit.counts["done"]
    return PromptAccount(
        drawn=audit.cursor,
        trained=trained,
        waiting=waiting,
        lost=tuple(lost),
        trained_twice=tuple(sorted(audit.duplicates)),
        dropped=audit.counts["dropped"],
        discarded=audit.discarded,
    )
