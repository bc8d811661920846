"""The master's watch over its store: a file that vanishes, is replaced or does not answer is noticed within seconds.

Invariants:
- *noticed without a write*: the file is looked at each second, also while the job has nothing to commit;
- *a look has an end*: a file system that hangs holds up neither the control loop nor the watch;
- *history has it*: once the store is back, an event opens and closes an incident with what was found and how long;
- *clients can ask*: meanwhile the job's directory says where its master is, and what was last committed;
- *no new store*: a master whose store is away waits, up to `lost_timeout_s`, and makes none in its place;
- *no older store*: nor does it take one that had come less far than its predecessor saw (`store_notes`).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gyre.clock import Clock
from gyre.errors import StoreError, StoreFull
from gyre.failover.events import StoreReturned
from gyre.master.job_context import JobContext
from gyre.master.owner import HearsOfLoss
from gyre.master.store_notes import LostNote, MarkWriter, remove_note, write_note
from gyre.store import Store, StoreMark, open_store
from gyre.store.presence import Finding, Lost

LOOK_S = 1.0


async def store_at(
    url: str,
    *,
    timeout_s: float,
    clock: Clock,
    mark: StoreMark | None = None,
    look_s: float = LOOK_S,
) -> Store | None:
    """The store at this URL, which is no older than the `mark`. While it is not there, or damaged, it is waited for:
    somebody may put it back. None where that did not happen within `timeout_s`. StoreFull is raised at once, for a full
    disk has no deadline."""
    until, told = clock.monotonic() + timeout_s, ""
    while True:
        try:
            return await asyncio.to_thread(_open_no_older, url, mark)
        except StoreFull:
            raise
        except StoreError as error:
            if str(error) != told:
                told = str(error)
                print(f"waiting for the store: {told}", file=sys.stderr, flush=True)
        if clock.monotonic() >= until:
            return None
        await asyncio.sleep(look_s)


def _open_no_older(url: str, mark: StoreMark | None) -> Store:
    store = open_store(url, create=False)
    try:
        if mark is not None:
            store.check_mark(mark)
    except BaseException:
        store.close()
        raise
    return store


class StoreWatch:
    """Looks at `store` until it is cancelled; `owner` gives up once it was away for `timeout_s`."""

    def __init__(
        self,
        store: Store,
        context: JobContext,
        *,
        timeout_s: float,
        clock: Clock,
        owner: HearsOfLoss,
        directory: Path,
        look_s: float = LOOK_S,
    ) -> None:
        """`directory` is the job's: what was last committed is noted there while the store is lost."""
        self._store, self._context = store, context
        self._timeout_s, self._look_s = timeout_s, look_s
        self._clock = clock
        self._owner = owner
        self._directory = directory
        self._marks = MarkWriter(directory)
        self.lost = ""
        """What is wrong with the store, in a sentence; empty while it is there."""

    async def run(self) -> None:
        kind, at, since = "", 0.0, 0.0
        remove_note(self._directory)  # of a master that died meanwhile
        while True:
            finding = await asyncio.to_thread(self._store.look)
            if finding is not None:
                if not self.lost:
                    at, since = self._clock.time(), self._clock.monotonic()
                    if finding.kind is not Lost.HANGING:  # a write to that disk might not end
                        write_note(self._directory, self._note(finding, at))
                if str(finding.sentence) != self.lost:
                    print(
                        f"the store is lost, nothing is committed: {finding.error()}",
                        file=sys.stderr,
                        flush=True,
                    )
                kind, self.lost = str(finding.kind), finding.sentence
                self._context.error = str(finding.error())
                if self._clock.monotonic() - since > self._timeout_s:
                    await self._owner.give_up(self.lost)
                    return
                await asyncio.sleep(self._look_s)
                continue
            self._marks.keep(self._store.mark)
            if self.lost:
                print("the store is back", file=sys.stderr, flush=True)
                sentence, self.lost = self.lost, ""
                remove_note(self._directory)
                self._context.error = ""
                self._context.submit(
                    StoreReturned(
                        kind, sentence, lost_at=at, away_s=round(self._clock.monotonic() - since, 3)
                    )
                )
            await asyncio.sleep(self._look_s)

    def _note(self, finding: Finding, at: float) -> LostNote:
        job = self._context.committed.job
        return LostNote(finding.path, job.job_id, job.name, job.phase.value, job.step, job.master_url, at)
