"""The store: jobs, journals and sample ledgers in SQLite (by default) or PostgreSQL (by URL).

    store = open_store("sqlite:////var/lib/gyre/jobs.db")
    store.create_job(job_id="j1", name="grpo", spec={}, now=now)
    journal = store.journal("j1")
    epoch = journal.take_over(now=now, pid=os.getpid())
    journal.append(epoch, [Entry(seq=1, ...)])

It knows nothing of graphs, events' meanings or phases: bodies are plain JSON. The invariants stand in the
modules that hold them: `database` (transactions, errors), `tables`, `journal`, `writer`, `directory`, `ledger`.
"""

from gyre.store.directory import JobFields, JobRow, QueuedJob, Store, open_store
from gyre.store.journal import CommandRow, EncodedEntry, Entry, EventRow, Journal, StoredCommand, encode_entry
from gyre.store.keyframes import KeyframeMark, KeyframeRow, KeyframeStore
from gyre.store.ledger import (
    CheckpointRow,
    DiscardRow,
    GroupRow,
    LedgerAudit,
    LedgerRows,
    LedgerStore,
    MicroBatchRow,
    PassesRow,
    RestoreRow,
    StepRow,
)
from gyre.store.listing import JobListing, Labels, ListedJob
from gyre.store.presence import StoreMark
from gyre.store.rollouts import RolloutRows, RolloutStore
from gyre.store.series import SeriesExtent, SeriesRow, SeriesStore
from gyre.store.writer import GroupCommitWriter

__all__ = [
    "CheckpointRow",
    "CommandRow",
    "DiscardRow",
    "EncodedEntry",
    "Entry",
    "EventRow",
    "GroupCommitWriter",
    "GroupRow",
    "JobFields",
    "JobListing",
    "JobRow",
    "Journal",
    "KeyframeMark",
    "KeyframeRow",
    "KeyframeStore",
    "Labels",
    "LedgerAudit",
    "LedgerRows",
    "LedgerStore",
    "ListedJob",
    "MicroBatchRow",
    "PassesRow",
    "QueuedJob",
    "RestoreRow",
    "RolloutRows",
    "RolloutStore",
    "SeriesExtent",
    "SeriesRow",
    "SeriesStore",
    "StepRow",
    "Store",
    "StoreMark",
    "StoredCommand",
    "encode_entry",
    "open_store",
]
