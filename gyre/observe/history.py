"""Any moment of a job's journal, fast: from the keyframe before it, and the few events between.

Keyframes are made by whoever follows the journal (`follow`): the master does, in a thread of its own and a few events
at a time, so that they are there before anybody asks; a reader makes those that are missing, as of a job of an older
Gyre. The master's control loop makes none: to pack a state of ten thousand vertices takes it a tenth of a second. It
could hand over states, which never change, but not which events were decisions. The follower folds the events once
more, which costs a few ten microseconds each, needs nothing of the loop, and is the same code wherever it runs.

Invariants:
- *a keyframe changes nothing* (`gyre.observe.keyframes`);
- *the journal is the truth*: a keyframe is used only where the journal has the very event that it is of;
- *from the store alone*: neither master nor cluster is needed.

This module must not know how a moment is shown.
"""

from __future__ import annotations

import bisect
import json
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from gyre.errors import NotFound, StoreError
from gyre.failover import JobState
from gyre.observe.chapters import Chapter
from gyre.observe.folding import DAMAGED, Coordinators
from gyre.observe.keyframes import (
    BEGINNING,
    FORM,
    Kept,
    KeyframeMaker,
    chapter_of,
    decisions_of,
    kept_in,
    mark_of,
)
from gyre.store import EventRow, KeyframeRow, Store

PAGE = 500
KEPT_MOMENTS = 8
"""States that are kept in memory: a slider goes to and fro."""

MISSING_FROM = 4 * PAGE
"""So many events without a keyframe are no wide spacing: keyframes are missing."""

WRITTEN_TOGETHER = 16
"""Keyframes in one transaction, when many are missing."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The state after event `seq`, which is `event`; before the first one `seq` is 0, and there is none. `last` is the
    journal's last event."""

    state: JobState
    seq: int
    event: EventRow | None
    last: int
    first: int = 1


class JobHistory:
    """The journal of one job of a store. Safe to use from many threads; who follows holds up nobody who reads, unless
    keyframes are missing."""

    def __init__(self, store: Store, job_id: str) -> None:
        self.job_id = job_id
        self._store = store
        self._journal = store.journal(job_id)
        self._keyframes = store.keyframes(job_id)
        self._lock = threading.Lock()
        """Over the coordinators and the states in memory; held for moments."""
        self._following = threading.Lock()
        """Over the follower; held while it folds."""
        self._coordinators: Coordinators | None = None
        self._coordinated: object = None
        self._recent: OrderedDict[int, Kept] = OrderedDict()
        self._own: list[KeyframeRow] = []
        """The keyframes that could not be written, in order."""
        self._decisions = array("q")
        """Of the events up to the last keyframe; the follower has those since."""
        self._maker: KeyframeMaker | None = None

    # -- moments ------------------------------------------------------------------------------------

    def at(self, seq: int | None = None, *, time: float | None = None) -> Moment:
        """The moment after an event, at a time (seconds since 1970), or now. A number beyond the last means the last.
        Raises NotFound for a negative number, StoreError for a history that this Gyre cannot fold."""
        last = self._journal.last_seq()
        if seq is None:
            seq = last if time is None else self._seq_at(time)
        if seq < 0:
            raise NotFound(f"There is no event {seq}.", hint=f"Events are numbered from 1 to {last}.")
        seq = min(seq, last)
        kept = self._nearest(seq)
        if seq - kept.seq > MISSING_FROM:
            self.follow(until=seq)
            kept = self._nearest(seq)
        # The event of the keyframe is read too, to see whether this is its history.
        history = self._journal.events(after=max(0, kept.seq - 1), until=seq)
        if kept.seq and (not history or history[0].event_id != kept.event_id):
            kept, history = BEGINNING, self._journal.events(until=seq)
        rest = history[1:] if kept.seq else history
        try:
            state = self.coordinators().fold(rest, kept.state)
        except DAMAGED as error:
            raise unfoldable(self.job_id, error) from error
        if history:
            latest = max([kept.latest, *(row.at for row in rest)])
            self._remember(Kept(seq, latest, state, history[-1].event_id))
        return Moment(state, seq, history[-1] if history else None, last)

    def _seq_at(self, time: float) -> int:
        begun = max(
            [self._keyframes.before_time(time, FORM), *(row.seq for row in self._own if row.latest <= time)]
        )
        return self._journal.seq_at(time, after=begun)

    def _nearest(self, seq: int) -> Kept:
        """The last state up to event `seq` that is kept, in memory or in the store."""
        with self._lock:
            recent = self._recent.get(max((one for one in self._recent if one <= seq), default=0), BEGINNING)
        bound = seq
        while (row := self._keyframe(bound)) is not None and row.seq > recent.seq:
            if (kept := kept_in(self.job_id, row)) is not None:
                return kept
            bound = row.seq - 1
        return recent

    def _keyframe(self, seq: int) -> KeyframeRow | None:
        stored = self._keyframes.before(seq, FORM)
        own = self._own
        at = bisect.bisect_right(own, seq, key=lambda row: row.seq)
        return max((row for row in (stored, own[at - 1] if at else None) if row), default=None)

    def _remember(self, kept: Kept) -> None:
        with self._lock:
            self._recent[kept.seq] = kept
            self._recent.move_to_end(kept.seq)
            while len(self._recent) > KEPT_MOMENTS:
                self._recent.popitem(last=False)

    def coordinators(self) -> Coordinators:
        """Who decided what; the same ones until the job goes on with another spec."""
        row, continued = self._store.job(self.job_id), self._journal.continued()
        now = (row.spec, [event.seq for event in continued])
        with self._lock:
            if self._coordinators is None or now != self._coordinated:
                self._coordinators, self._coordinated = Coordinators(row.spec, continued), now
            return self._coordinators

    # -- decisions ----------------------------------------------------------------------------------

    def decisions(self, around: int) -> tuple[int | None, int | None]:
        """The last decision before event `around`, and the first one after it. A decision is an event whose handling
        made or settled an incident, or a command."""
        self.follow()
        with self._following:
            assert self._maker is not None
            for known in (self._maker.chapter.decisions, self._decisions):
                if at := bisect.bisect_left(known, around):
                    previous: int | None = known[at - 1]
                    break
            else:
                previous = None
            for known in (self._decisions, self._maker.chapter.decisions):
                if (at := bisect.bisect_right(known, around)) < len(known):
                    return previous, known[at]
        return previous, None

    # -- what happened ------------------------------------------------------------------------------

    def between(self, since: float, until: float) -> Chapter:
        """The flags, and the moves of vertices, between two times (seconds since 1970), in order."""
        self.follow()
        begin, end = self._seq_at(since), self._seq_at(until)
        with self._following:
            assert self._maker is not None
            followed, tail = self._maker.after, self._maker.chapter
            told = {row.after: chapter_of(self.job_id, mark_of(row), row.chapter) for row in self._own}
            ends = {row.after: row.seq for row in self._own}
        for mark, packed in self._keyframes.chapters(FORM, after=begin, until=end):
            if mark.after not in told and (chapter := chapter_of(self.job_id, mark, packed)) is not None:
                told[mark.after], ends[mark.after] = chapter, mark.seq
        found = Chapter()
        at = max((after for after in told if after <= begin < ends[after]), default=begin)
        while at < min(end, followed):
            chapter = told.get(at)
            stop = ends.get(at, 0)
            if chapter is None:  # what the keyframe says of it cannot be believed
                stop = min((after for after in told if after > at), default=followed)
                chapter = self._folded(at, stop)
            _add(found, chapter, since, until)
            at = stop
        _add(found, tail, since, until)
        return found

    def _folded(self, after: int, until: int) -> Chapter:
        """What happened in a part of the history, from the events themselves."""
        chapter = Chapter()
        try:
            for folded in self.coordinators().steps(
                self._journal.events(after=after, until=until), self.at(after).state
            ):
                chapter.add(folded)
        except DAMAGED as error:
            raise unfoldable(self.job_id, error) from error
        return chapter.trimmed()

    # -- keyframes ----------------------------------------------------------------------------------

    def follow(self, *, until: int | None = None, most: int | None = None) -> int:
        """Fold the journal on, up to event `until` and at most `most` events of it, and keep the keyframes that are
        due. Returns how many events were folded."""
        with self._following:
            maker = self._follower()
            last = self._journal.last_seq()
            until = last if until is None else min(until, last)
            if most is not None:
                until = min(until, maker.kept.seq + most)
            begun = maker.kept.seq
            made: list[KeyframeRow] = []
            try:
                while maker.kept.seq < until:
                    page = min(until, maker.kept.seq + PAGE)
                    made += maker.take(self._journal.events(after=maker.kept.seq, until=page))
                    if len(made) >= WRITTEN_TOGETHER:
                        self._keep(made)
                        made = []
                self._keep(made)
            except DAMAGED as error:
                self._maker = None
                raise unfoldable(self.job_id, error) from error
            except BaseException:
                self._maker = None  # what it has made is not in the store: the next one begins there
                raise
            return maker.kept.seq - begun

    def _follower(self) -> KeyframeMaker:
        """Who follows, from the end of the unbroken chain of keyframes that there is in the store."""
        coordinators = self.coordinators()
        if self._maker is not None:
            self._maker.coordinators = coordinators
            return self._maker
        next_of: dict[int, tuple[int, list[int]]] = {}
        for mark in self._keyframes.marks(FORM):
            if (found := decisions_of(self.job_id, mark)) is not None:
                next_of.setdefault(mark.after, (mark.seq, found))
        chain: list[tuple[int, list[int]]] = []
        while (link := next_of.get(chain[-1][0] if chain else 0)) is not None:
            chain.append(link)
        kept, size_bytes = BEGINNING, 0
        while chain:
            row = self._keyframes.before(chain[-1][0], FORM)
            last = None if row is None else kept_in(self.job_id, row)
            if row is not None and last is not None and self._is_of_this_history(last):
                kept, size_bytes = last, len(row.body)
                break
            chain.pop()
        self._own = []
        self._decisions = array("q", (seq for _, found in chain for seq in found))
        self._maker = KeyframeMaker(self.job_id, coordinators, kept, kept.seq, size_bytes)
        return self._maker

    def _is_of_this_history(self, kept: Kept) -> bool:
        rows = self._journal.events(after=kept.seq - 1, until=kept.seq)
        return bool(rows) and rows[0].event_id == kept.event_id

    def _keep(self, made: list[KeyframeRow]) -> None:
        try:
            self._keyframes.write(made)
        except StoreError:  # opened for reading, another user's file, a full disk: no reason not to look
            self._own = [*self._own, *made]
        for row in made:
            self._decisions.extend(json.loads(row.decisions))


def _add(to: Chapter, chapter: Chapter, since: float, until: float) -> None:
    to.flags += [flag for flag in chapter.flags if since <= flag.at <= until]
    to.moves += [move for move in chapter.moves if since < move.at <= until]


def unfoldable(job_id: str, error: BaseException) -> StoreError:
    return StoreError(
        f"The history of job {job_id} does not fold: {error}.",
        hint="A newer Gyre wrote it, or it was changed outside Gyre.",
    )
