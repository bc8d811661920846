"""Tags and notes of a job: checked, and kept in the store beside the job's row.

They are not in the job's journal: that has one writer, the job's master, and a job that has ended has none; and no
decision depends on what a job is called.

This module must not know who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre.config.labels import checked_note, checked_tags
from gyre.store import Labels, Store

LabelsRecord = dict[str, Any]
"""`tags`, a list in the order of the alphabet, and `notes`."""


def labels_of(labels: Labels) -> LabelsRecord:
    return {"tags": list(labels.tags), "notes": labels.notes}


def label(
    store: Store,
    job_id: str,
    *,
    add: Sequence[str] = (),
    remove: Sequence[str] = (),
    notes: str | None = None,
) -> LabelsRecord:
    """Add and remove tags, and write another note; None leaves it. Asked for nothing it writes nothing.
    Returns what then holds. Raises ConfigError for a bad tag or too many, NotFound and StoreError."""
    if not add and not remove and notes is None:
        return labels_of(store.listing.labels(store.job(job_id).job_id))
    added = checked_tags(add)
    text = None if notes is None else checked_note(notes)
    if added:
        checked_tags({*store.listing.labels(job_id).tags, *added} - set(remove))
    return labels_of(store.listing.label(job_id, add=added, remove=remove, notes=text))
