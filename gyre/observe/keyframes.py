"""Keyframes of a journal: the folded state after an event, and what happened since the keyframe before.

Invariants:
- *a keyframe changes nothing*: the fold from any keyframe is the fold from the beginning. One that was changed, of
  another history, or of another form of the state, is as if it were not there;
- *by size*: the keyframes of a history take no more bytes than a share of the events' own.

This module must not know where keyframes are, or who makes them when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields

import xxhash
import zstandard

from gyre.errors import StoreCorrupt
from gyre.failover import JobState, rows_of, state_from
from gyre.failover import state as states
from gyre.failover.evaluation import Evaluation
from gyre.observe.chapters import Chapter, pack_chapter, unpack_chapter
from gyre.observe.folding import Coordinators
from gyre.store import EventRow, KeyframeMark, KeyframeRow
from gyre.store.tables import decode_body, encode_body

LEAST_EVENTS = 200
"""Events between two keyframes, at the least: reading and folding so many takes some 10 ms."""

BYTES_PER_EVENT = 128
"""What keyframes may cost for each event: less than half of what an event itself takes."""

LARGEST_BYTES = 512 * 2**20
_LAYOUT = 1
"""Of the packed body; what is in the state has a form of its own."""


def _form() -> str:
    """Another one with every field that any record of the state gains: what a Gyre of another form folded need not be
    what this one folds."""
    records = (
        states.JobRecord,
        states.VertexRecord,
        states.MachineRecord,
        states.Incident,
        states.JoinToken,
        Evaluation,
        states.TrainingRecord,
        states.LearningWarning,
        states.JobState,
    )
    told = [f"{record.__name__}:{','.join(item.name for item in fields(record))}" for record in records]
    return f"{_LAYOUT}-{hashlib.sha256('|'.join(told).encode()).hexdigest()[:16]}"


FORM = _form()


@dataclass(frozen=True, slots=True)
class Kept:
    """A state that was kept: after event `seq`, whose id is `event_id`."""

    seq: int
    latest: float
    state: JobState
    event_id: str


def is_due(events: int, size_bytes: int) -> bool:
    """Whether so many events after the last keyframe, which had this size, the next one is made."""
    return events >= max(LEAST_EVENTS, size_bytes // BYTES_PER_EVENT)


def keyframe_of(job_id: str, kept: Kept, *, after: int, chapter: Chapter) -> KeyframeRow:
    rows = [[kind, key, row] for (kind, key), row in sorted(rows_of(kept.state).items())]
    text = encode_body({"event": kept.event_id, "rows": rows}, f"the keyframe of event {kept.seq}")
    body = zstandard.ZstdCompressor(level=3).compress(text.encode())
    decisions = encode_body(chapter.decisions, "the decisions")
    packed = pack_chapter(chapter.trimmed())
    small = _small_checksum(job_id, kept.seq, after, kept.latest, decisions)
    return KeyframeRow(
        kept.seq,
        after,
        kept.latest,
        FORM,
        f"{small}-{_checksum(small.encode(), packed)}-{_checksum(small.encode(), body)}",
        decisions,
        packed,
        body,
    )


def kept_in(job_id: str, row: KeyframeRow) -> Kept | None:
    """The state of a keyframe; None where it cannot be believed."""
    small = _small_checksum(job_id, row.seq, row.after, row.latest, row.decisions)
    if row.form != FORM or row.checksum != (
        f"{small}-{_checksum(small.encode(), row.chapter)}-{_checksum(small.encode(), row.body)}"
    ):
        return None
    try:
        text = zstandard.ZstdDecompressor().decompress(row.body, max_output_size=LARGEST_BYTES)
        body = decode_body(text.decode(), "a keyframe")
        state = state_from({(kind, key): value for kind, key, value in body["rows"]})
        return Kept(row.seq, row.latest, state, str(body["event"]))
    except (StoreCorrupt, zstandard.ZstdError, ValueError, TypeError, LookupError):
        return None  # its checksum is right, and its form is not ours: another Gyre wrote it


def decisions_of(job_id: str, mark: KeyframeMark) -> list[int] | None:
    """The decisions that a keyframe names; None where it cannot be believed."""
    small = _small_checksum(job_id, mark.seq, mark.after, mark.latest, mark.decisions)
    if mark.form != FORM or mark.checksum.partition("-")[0] != small:
        return None
    try:
        found = decode_body(mark.decisions, "the decisions")
    except StoreCorrupt:
        return None
    return found if isinstance(found, list) and all(type(one) is int for one in found) else None


def chapter_of(job_id: str, mark: KeyframeMark, packed: bytes) -> Chapter | None:
    """What happened since the keyframe before; None where it cannot be believed."""
    found = decisions_of(job_id, mark)
    small = mark.checksum.partition("-")[0]
    if found is None or mark.checksum.split("-")[1:2] != [_checksum(small.encode(), packed)]:
        return None
    try:
        chapter = unpack_chapter(packed)
    except StoreCorrupt:
        return None  # another Gyre's
    chapter.decisions = found
    return chapter


def mark_of(row: KeyframeRow) -> KeyframeMark:
    return KeyframeMark(row.seq, row.after, row.latest, row.form, row.checksum, row.decisions)


def _small_checksum(job_id: str, seq: int, after: int, latest: float, decisions: str) -> str:
    return _checksum(f"{job_id}|{seq}|{after}|{latest!r}|{FORM}|".encode(), decisions.encode())


def _checksum(salt: bytes, body: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(salt + body)


@dataclass(slots=True)
class KeyframeMaker:
    """Folds a history from a kept state on, and makes the keyframes that are due on the way."""

    job_id: str
    coordinators: Coordinators
    kept: Kept
    after: int
    """The last keyframe."""
    size_bytes: int = 0
    """Of the last keyframe."""
    chapter: Chapter = field(default_factory=Chapter)

    def take(self, history: Iterable[EventRow]) -> Iterator[KeyframeRow]:
        """Fold these events, which follow the kept state."""
        for folded in self.coordinators.steps(history, self.kept.state):
            row = folded.row
            self.kept = Kept(row.seq, max(self.kept.latest, row.at), folded.decision.state, row.event_id)
            self.chapter.add(folded)
            if is_due(row.seq - self.after, self.size_bytes):
                made = keyframe_of(self.job_id, self.kept, after=self.after, chapter=self.chapter)
                self.after, self.size_bytes, self.chapter = row.seq, len(made.body), Chapter()
                yield made


BEGINNING = Kept(0, float("-inf"), JobState(), "")
