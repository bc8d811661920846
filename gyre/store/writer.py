"""A thread that commits the entries of many submitters together: full durability without a disk sync per event.

Invariants:
    In-order            entries are committed in the order of `submit`, which is the order of their numbers.
    Acknowledged-once   a future is done exactly once: with None after the commit, or with the error.
    Suffix-fails        when a commit fails, that batch and everything queued behind it fail at once with the same
                        error, because numbers are consecutive and nothing can follow a hole.
                        Until `resume()` every submit raises that error, and nothing is written.
    Bounded             no more than `queue_limit` entries wait.

This file must not know what is in an entry.
"""

from __future__ import annotations

import collections
import threading
import time
from concurrent.futures import Future

from gyre.errors import GyreError, StoreError
from gyre.store.journal import EncodedEntry, Entry, Journal, encode_entry

MAX_BATCH = 1000
"""Entries per transaction: past this a batch gains no throughput and only delays its first entry."""

QUEUE_LIMIT = 10_000
"""About a fifth of a second's work on a common disk; a caller that would wait longer gets an error."""


class GroupCommitWriter:
    """Appends to `journal` under `epoch` from its own thread. It is a context manager; `close` drains the queue."""

    def __init__(
        self, journal: Journal, epoch: int, *, max_batch: int = MAX_BATCH, queue_limit: int = QUEUE_LIMIT
    ) -> None:
        self._journal = journal
        self._epoch = epoch
        self._max_batch = max_batch
        self._queue_limit = queue_limit
        self._queue: collections.deque[tuple[EncodedEntry, Future[None]]] = collections.deque()
        self._changed = threading.Condition()
        self._error: GyreError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"journal-{journal.job_id}", daemon=True)
        self._thread.start()

    def submit(self, entry: Entry, *, timeout_s: float = 5.0) -> Future[None]:
        """Encode and queue one entry; raises at once if it cannot be stored."""
        # Encoded in the submitter's thread, so that a bad body fails its submitter alone.
        return self.submit_encoded(encode_entry(entry), timeout_s=timeout_s)

    def submit_encoded(self, encoded: EncodedEntry, *, timeout_s: float = 5.0) -> Future[None]:
        """Queue one entry; the future is done when it is durable (`asyncio.wrap_future` awaits it).

        Raises the error of a failed commit until `resume()`, and StoreError if the queue stays full for `timeout_s`
        (0: do not wait; a full queue is an answer).
        """
        future: Future[None] = Future()
        # Marked as running, so that nobody can cancel a queued entry, which would leave a hole.
        future.set_running_or_notify_cancel()
        with self._changed:
            self._changed.wait_for(self._may_enter, timeout_s)
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StoreError(f"The writer of job {self._journal.job_id} is closed.")
            if len(self._queue) >= self._queue_limit:
                raise StoreError(
                    f"{len(self._queue)} entries of job {self._journal.job_id} wait for the disk.",
                    hint="The disk is far slower than the job's events; send this entry again later.",
                    details={"queued": len(self._queue)},
                )
            self._queue.append((encoded, future))
            self._changed.notify_all()
        return future

    @property
    def error(self) -> GyreError | None:
        """The error of the last failed commit, until `resume()`."""
        return self._error

    def resume(self) -> None:
        """Accept entries again. The caller submits the failed ones first, in order. Entries that were stored after
        all, because the failure came after the commit, are recognised by number and id."""
        with self._changed:
            self._error = None
            self._changed.notify_all()

    def close(self, timeout_s: float = 10.0) -> None:
        """Commit what is queued and stop. What is still queued after `timeout_s` fails with StoreError."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queue, timeout_s)
            left = list(self._queue)
            self._queue.clear()
        if left:
            error = StoreError(
                f"The writer of job {self._journal.job_id} was closed with {len(left)} entries queued.",
                hint="Whether the batch in hand was stored is known at the next start: fold the journal.",
            )
            for _, future in left:
                future.set_exception(error)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> GroupCommitWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _may_enter(self) -> bool:
        return self._error is not None or self._closed or len(self._queue) < self._queue_limit

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._max_batch))]
                self._changed.notify_all()
            try:
                self._journal.append_encoded(self._epoch, [entry for entry, _ in batch])
            except GyreError as error:
                self._fail(batch, error)
            except BaseException as error:  # a bug here must not leave anyone waiting for ever
                wrapped = StoreError(f"The writer of job {self._journal.job_id} broke: {error!r}.")
                wrapped.__cause__ = error
                self._fail(batch, wrapped)
            else:
                for _, future in batch:
                    future.set_result(None)

    def _fail(self, batch: list[tuple[EncodedEntry, Future[None]]], error: GyreError) -> None:
        with self._changed:
            self._error = error
            failed = batch + list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for _, future in failed:
            future.set_exception(error)
