"""The samples on their way, with their tokens and leases, and what of them the ledger has yet to be told.

Invariants:
- *exact account*: `generated = delivered + in flight + discarded`, in tokens, at any time and over restarts;
- *all or nothing*: a report that cannot be changes nothing;
- *the fold is the store*: `fold` of what was committed gives the same samples with the same tokens.

This module must not know which instance a sample should go to, or what follows when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gyre.chat.stop_texts import Words
from gyre.rollouts.plane.accounting import TokenAccount
from gyre.rollouts.plane.leases import Leases
from gyre.rollouts.plane.report_checks import check_versions, match, trim
from gyre.rollouts.plane.requests import FailureRecord, InFlightRequest, InFlightSample
from gyre.rollouts.plane.sample_rows import SampleRows
from gyre.rollouts.plane.text_stops import TextStops, cut
from gyre.rollouts.protocol.columns import ReportColumns
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.sample_checks import MOST_TOKENS
from gyre.rollouts.scheduling.fleet import Instance
from gyre.rollouts.token_log.records import LeaseRecord, delta_in
from gyre.rollouts.token_log.write_buffer import WriteBuffer

AFTER_STOP = "after_stop"
"""Why tokens are discarded that an engine drew after the text that ended their sample: it was stopped too late."""


class SampleStore:
    def __init__(self, *, epoch: int, vocabulary: int = MOST_TOKENS, words: Words | None = None) -> None:
        """Token ids are below `vocabulary`, and written as `words` say."""
        self._vocabulary = vocabulary
        self.account = TokenAccount()
        self.rows = SampleRows()
        self.leases = Leases(self.rows, epoch=epoch)
        self.write_buffer = WriteBuffer()
        self.text_stops = TextStops(words)
        self.stopped: list[InFlightSample] = []
        """Samples that a text has ended, which the caller has not yet ended and cleared."""
        self._granted: dict[int, list[LeaseRecord]] = {}
        """Leases that were folded so far, by their samples' keys."""

    # -- samples come and go ------------------------------------------------------------------------

    def add_samples(self, request: InFlightRequest) -> None:
        request.samples = [InFlightSample(request, index, self.rows.tokens) for index in range(request.n)]
        request.left = request.n
        for sample in request.samples:
            self.rows.give(sample)
            self.text_stops.watch(sample)

    def remove(self, sample: InFlightSample, *, unused: str = "") -> None:
        """Its group is closed, and nobody has it. `unused` is why nobody uses it, "" where somebody does."""
        if unused:
            self.account.discarded[unused] += sample.length
        elif sample.finish:
            self.account.delivered += sample.length
            self.account.samples_delivered += 1
        else:
            self.account.discarded["withdrawn"] += sample.length
        self.text_stops.forget(sample)
        self.rows.free(sample)
        self.write_buffer.close_sample(sample.key, self.rows.keys)

    # -- tokens -------------------------------------------------------------------------------------

    def take_in(self, columns: ReportColumns, instance: Instance, *, newest_version: int) -> int:
        """Take in what a report of the instance brings. Returns how many tokens are new. Raises FrameError for a report
        that cannot be."""
        owner = instance.number
        matched = match(columns, self.rows, owner, newest_version=newest_version, vocabulary=self._vocabulary)
        check_versions(
            columns, matched, self.rows, instance.version, lambda at, version: instance.loaded.has(version)
        )
        self.account.generated += len(columns.tokens)
        if not (matched.mine & (matched.lengths == columns.starts)).all():
            trimmed = trim(columns, matched)
            new = len(trimmed.columns.tokens) if trimmed.columns is not None else 0
            self.account.generated -= len(columns.tokens) - new - trimmed.superseded
            self.account.discarded["superseded"] += trimmed.superseded
            if trimmed.columns is None:
                return 0
            columns = trimmed.columns
        if kept := self.text_stops.found(columns, self.rows.tokens):
            whole, columns = columns, cut(columns, kept)
            self.account.discarded[AFTER_STOP] += len(whole.tokens) - len(columns.tokens)
            rows = columns.rows[list(kept)].tolist()
            self.stopped += [one for row in rows if (one := self.rows.samples[row]) is not None]
        self._append(columns)
        return len(columns.tokens)

    def take_in_many(
        self,
        columns: ReportColumns,
        instances: Sequence[Instance],
        samples: Sequence[int],
        *,
        newest_version: int,
    ) -> bool:
        """The same for reports of different instances in one pass, of which each brings so many `samples`. False, and
        nothing has changed, where one of them has to be looked at by itself."""
        of = np.repeat(np.arange(len(instances)), samples)
        owners = np.array([instance.number for instance in instances])[of]
        served = np.array([instance.version for instance in instances])[of]
        try:
            matched = match(
                columns, self.rows, owners, newest_version=newest_version, vocabulary=self._vocabulary
            )
            check_versions(
                columns,
                matched,
                self.rows,
                served,
                lambda at, version: instances[int(of[at])].loaded.has(version),
            )
        except FrameError:  # which report is refused, and why, shows when each is taken in by itself
            return False
        if not (matched.mine & (matched.lengths == columns.starts)).all():
            return False
        if self.text_stops.found(columns, self.rows.tokens):
            return False
        self.account.generated += len(columns.tokens)
        self._append(columns)
        return True

    def _append(self, columns: ReportColumns) -> None:
        rows = columns.rows
        self.rows.tokens.append(rows, columns.counts, columns.versions, columns.tokens, columns.logprobs)
        self.rows.deltas[rows] = self.write_buffer.tokens(columns, self.rows.keys[rows])

    def last_delta(self, sample: InFlightSample) -> int:
        """The number of the last delta that holds something of the sample; 0 if there is none."""
        return int(self.rows.deltas[sample.row])

    # -- what outlasts this manager, beside tokens --------------------------------------------------

    def note_finish(self, sample: InFlightSample, kind: str) -> None:
        sample.finish = kind
        sample.request.left -= 1
        self.text_stops.forget(sample)
        self._note(sample, kind)
        self.write_buffer.finished.append(sample.key)
        if not sample.request.left:
            self.write_buffer.complete.append(sample.request.number)

    def note_record(self, sample: InFlightSample) -> None:
        """What the sample answers for."""
        self._note(sample, "record", *sample.record, list(sample.evidence))

    def reset(self, sample: InFlightSample) -> None:
        """The sample begins anew, without its tokens."""
        self.account.discarded["quarantined"] += sample.forget_tokens()
        self.account.samples_quarantined += 1
        sample.resets += 1
        self.leases.begin_anew(sample)
        self._note(sample, "reset", seal=True)

    def correct_runs(
        self, sample: InFlightSample, instance: str, runs: tuple[tuple[int, int], ...], *, goes_on: bool
    ) -> None:
        """The sample's last tokens have these versions, as (version, tokens), says the instance that has it. What is
        said of tokens that came from others is left out, and all of it where there are not so many tokens."""
        since = sample.length - sum(count for _, count in runs)
        if not runs or since < 0:
            return
        first = max(since, sample.stays_since(instance))
        own = [list(run) for run in _after(runs, first - since)]
        if own:
            sample.correct(first, [(version, count) for version, count in own])
            self._note(sample, "runs", first, own, seal=goes_on)

    def _note(self, sample: InFlightSample, kind: str, *more: Any, seal: bool = False) -> None:
        row, deltas = sample.row, self.rows.deltas
        deltas[row] = self.write_buffer.end(row, sample.key, int(deltas[row]), kind, *more, seal=seal)

    @property
    def is_dirty(self) -> bool:
        return self.write_buffer.is_dirty or self.leases.is_dirty

    def write_leases(self) -> None:
        """Hand the leases that were granted since the last time to the write buffer, but those of closed samples."""
        if not (granted := self.leases.take_unstored()):
            return
        rows = np.array([row for row, _ in granted], np.uint32)
        keys = np.array([record.key for _, record in granted], np.int64)
        is_open = self.rows.keys[rows] == keys
        if is_open.any():
            records = [record for (_, record), keep in zip(granted, is_open.tolist(), strict=True) if keep]
            self.write_buffer.leases(rows[is_open], keys[is_open], records)

    # -- restoring ----------------------------------------------------------------------------------

    def fold(self, seq: int, body: bytes, find: Callable[[int], InFlightSample | None]) -> None:
        """Take in a delta as it was committed. `find` gives the sample of a key."""
        delta = delta_in(body)
        rows: dict[int, int] = {}
        """Rows of the samples that the delta holds something of, by key."""
        first = 0
        for key, start, count, version in zip(
            delta.keys, delta.starts, delta.counts, delta.versions, strict=True
        ):
            sample = find(key)
            if sample is not None and sample.length == start:
                self.rows.tokens.append(
                    np.array([sample.row], np.uint32),
                    np.array([count], np.uint32),
                    np.array([version], np.int32),
                    delta.tokens[first : first + count],
                    delta.logprobs[first : first + count],
                )
                rows[key] = sample.row
            first += count
        for record in delta.leases:
            self.leases.restore_newest(record.lease)
            sample = find(record.key)
            if sample is not None:
                rows[record.key] = sample.row
                self._granted.setdefault(record.key, []).append(record)
        for key, kind, *more in delta.ends:
            sample = find(key)
            if sample is not None:
                rows[key] = sample.row
                _fold_end(sample, kind, more)
                if kind == "reset":
                    self._granted.pop(key, None)
        if rows:
            row_array = np.array(list(rows.values()), np.uint32)
            self.rows.deltas[row_array] = seq
            self.write_buffer.retention.add(seq, row_array, np.array(list(rows)))
        else:
            self.write_buffer.forget(seq)

    def end_fold(self, find: Callable[[int], InFlightSample | None]) -> None:
        """All deltas are folded."""
        granted, self._granted = self._granted, {}
        for key, records in granted.items():
            if (sample := find(key)) is not None:
                self.leases.restore(sample, records)


def _after(runs: tuple[tuple[int, int], ...], skipped: int) -> list[tuple[int, int]]:
    """The runs (version, tokens) without their first `skipped` tokens."""
    found = []
    for version, count in runs:
        left = count - min(count, skipped)
        skipped -= count - left
        if left:
            found.append((version, left))
    return found


def _fold_end(sample: InFlightSample, kind: str, more: list[Any]) -> None:
    if kind == "reset":
        sample.forget_tokens()
        sample.resets += 1
    elif kind == "record":
        *record, evidence = more
        sample.record = FailureRecord(*record)
        sample.evidence = tuple(evidence)
    elif kind == "runs":
        sample.correct(*more)
    elif not sample.finish:
        sample.finish = kind
        sample.request.left -= 1
