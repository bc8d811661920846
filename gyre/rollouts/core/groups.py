"""The rollout manager's book: every open group, where each of its samples is, and how far it got.

It is told what happened (`open`, `join`, `progress`, `leave`, `close`) and answers what is to be done. It does no
I/O and reads no clock; what must be durable is collected in a `WriteBatch`, which the manager commits as one.

Invariants:
- *from its last token*: a sample that loses its instance is queued again with the tokens it has, alone, whatever
  its group does; a finished sample is never generated again;
- *one on trial*: a sample that two engines died with goes to an instance that has no other such, and nothing new
  comes there until it got further than where it died, which clears it. Only if the engine dies with it, and with
  nothing else that had not got on there, it is set aside;
- *one lease*: of each sample at most one lease is valid. Tokens that come under another are counted as discarded,
  with the reason, and change nothing;
- *exact account*: `generated = delivered + in flight + discarded`, in tokens, at any time and over restarts;
- *no other policy*: a sample waits until its `min_version` is served, and is given to nobody with an older one;
- *the fold is the book*: `restore` from what was committed gives the same samples with the same tokens.

This module must not know about sockets, Ray, the store or how routing decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.philox import words
from gyre.rollouts.core.accounting import TokenAccount
from gyre.rollouts.core.admission import PolicyBounds
from gyre.rollouts.core.leases import EndedLeases
from gyre.rollouts.core.quarantine import POISON_AFTER, acquit, blame, is_suspect, strike
from gyre.rollouts.core.report_batch import ReportBatch
from gyre.rollouts.core.requests import INDEX_BITS, GroupRequest, InFlightSample, Record
from gyre.rollouts.core.sample_rows import SampleRows
from gyre.rollouts.protocol.frames import (
    End,
    Held,
    Hello,
    Keep,
    Progress,
    Prompt,
    Report,
    Request,
    Work,
    lineage,
    refuse,
)
from gyre.rollouts.samples import Group, unpack_groups
from gyre.rollouts.scheduling.router import Router
from gyre.rollouts.token_log.records import delta_in, request_in
from gyre.rollouts.token_log.write_buffer import WriteBatch, WriteBuffer

MOST_RESETS = 3
"""Times that a sample is set aside and begun anew before its group is given up."""

BLAMED_INCARNATIONS = 256
"""Lost ones that are remembered with their samples: the network may have been cut, and they come back."""

_SEED_STREAM = 32


@dataclass(slots=True)
class Instance:
    name: str
    incarnation: str
    number: int
    max_running: int
    kv_tokens: int
    version: int = -1
    accepting: bool = False
    held: dict[int, InFlightSample] = field(default_factory=dict)
    """By row."""
    tokens: int = 0
    suspect: InFlightSample | None = None
    """The one sample here that two engines died with."""


class OpenGroups:
    def __init__(self, *, epoch: int, router: Router | None = None) -> None:
        self.router = router or Router()
        self.account = TokenAccount()
        self.required_version = -1
        """An instance with an older policy is given nothing."""
        self.newest_version = -1
        """Tokens of a newer policy than this cannot be."""
        self.requests: dict[int, GroupRequest] = {}
        self.instances: dict[str, Instance] = {}
        self.migrating: dict[int, str] = {}
        """Samples that were called back from their instance, by key, and where they go next ("" for anywhere)."""
        self.served_version = -1
        """What instances are to have. Samples that need a newer one wait."""
        self.quarantined: list[InFlightSample] = []
        """Samples that were set aside, until somebody told it and cleared this."""
        self.given_up: dict[int, InFlightSample] = {}
        """Samples that failed wherever and with whatever seed they were tried, by key."""
        self.cancelled: list[tuple[str, int, int]] = []
        """(instance, row, lease) that are to be stopped, until somebody did and cleared this."""
        self._early: dict[int, InFlightSample] = {}
        self._suspects: dict[int, InFlightSample] = {}
        self._asked: dict[tuple[str, int], GroupRequest] = {}
        self._pinned: dict[int, GroupRequest] = {}
        self._next_ticket = 1
        self._lease = epoch << 40
        self._instance_numbers = 0
        self._rows = SampleRows()
        self._write_buffer = WriteBuffer()
        self._ended_leases = EndedLeases()
        self._blamed: dict[str, dict[int, tuple[Record, Record]]] = {}
        """What samples answered for before and after an incarnation was lost with them, by key: it may come back."""

    # -- requests -----------------------------------------------------------------------------------

    def open(self, request: Request) -> list[GroupRequest]:
        """The request's groups that are not known yet, as new tickets. Raises FrameError for what is no group."""
        try:
            groups = unpack_groups(request.groups)
        except ValueError as error:
            raise refuse("invalid", f"request.groups: {error}") from None
        limit = request.sampling.get("max_new_tokens")
        if type(limit) is not int or limit < 1:
            raise refuse(
                "invalid", f"request.sampling.max_new_tokens: {limit!r:.40}, expected a positive number"
            )
        new: dict[int, Group] = {}
        for group in groups:
            _check_group(group)
            if (request.purpose, group.id) not in self._asked:
                new.setdefault(group.id, group)
        if new and request.pinned and request.min_version < self.served_version:
            raise refuse(
                "pinned_late",
                f"request.min_version: {request.min_version} and no newer policy, but {self.served_version} is served",
            )
        opened = []
        for group in new.values():
            ticket = self._add(
                self._next_ticket,
                request.purpose,
                Group(group.id, group.prompt_ids.astype(np.int32), group.meta),
                request.n,
                request.sampling,
                request.seed,
                request.min_version,
                request.pinned,
            )
            self._write_buffer.open(ticket)
            opened.append(ticket)
        _draw_seeds(opened)
        for ticket in opened:
            for state in ticket.samples:
                self._queue(state)
        return opened

    def find(self, purpose: str, group_id: int) -> GroupRequest | None:
        return self._asked.get((purpose, group_id))

    def close(self, purpose: str, ids: Iterable[int]) -> list[tuple[str, int, int]]:
        """The trainer has these groups: forget them. Unknown ones were closed before. What still runs of them is to
        be cancelled: (instance, row, lease)."""
        running = []
        for group_id in ids:
            ticket = self._asked.pop((purpose, group_id), None)
            if ticket is None:
                continue
            del self.requests[ticket.number]
            self._pinned.pop(ticket.number, None)
            self._write_buffer.close(ticket)
            for state in ticket.samples:
                if state.finish:
                    self.account.delivered += state.length
                    self.account.samples_delivered += 1
                else:
                    if state.instance is not None:
                        running.append((state.instance, state.row, state.lease))
                    self._detach(state)
                    self._unqueue(state)
                    self.given_up.pop(state.key, None)
                    self.account.discarded["withdrawn"] += state.length
                self._rows.free(state)
                self._write_buffer.closed_sample(state.key, self._rows.keys)
            ticket.samples = []  # they know their ticket: a circle would wait for the garbage collector
        return running

    def _add(
        self,
        number: int,
        purpose: str,
        group: Group,
        n: int,
        sampling: dict[str, Any],
        seed: int,
        min_version: int,
        pinned: bool,
    ) -> GroupRequest:
        ticket = GroupRequest(number, purpose, group, n, sampling, seed, min_version, pinned)
        ticket.samples = [InFlightSample(ticket, index, self._rows.tokens) for index in range(n)]
        ticket.left = n
        for state in ticket.samples:
            self._rows.give(state)
        self.requests[number] = ticket
        self._asked[(purpose, group.id)] = ticket
        if pinned:
            self._pinned[number] = ticket
        self._next_ticket = max(self._next_ticket, number + 1)
        return ticket

    @property
    def pinned_version(self) -> int | None:
        """The newest that open requests allow; None where any may be served."""
        return min((ticket.min_version for ticket in self._pinned.values() if ticket.left), default=None)

    def pinned_to(self, version: int) -> list[GroupRequest]:
        """Open requests that no policy but this one may answer."""
        return [one for one in self._pinned.values() if one.left and one.min_version == version]

    def promote(self, version: int) -> None:
        """Instances are to have this version from now on: what waited for it may be given out."""
        self.served_version = version
        waiting, self._early = self._early, {}
        for state in waiting.values():
            self._queue(state)

    def _queue(self, state: InFlightSample) -> None:
        """Somebody is to go on with the sample, which nobody has."""
        ticket = state.request
        if state.length >= ticket.max_new_tokens:  # who had it died between its last token and saying so
            self._finish(state, "length")
        elif state.resets > MOST_RESETS:
            self.given_up[state.key] = state
        elif ticket.min_version > self.served_version:
            self._early[state.key] = state
        else:
            self.required_version = max(self.required_version, ticket.min_version)
            if state.failed_at or is_suspect(state):
                self._suspects[state.key] = state
            else:
                self._submit(state)

    def _submit(self, state: InFlightSample) -> None:
        self.router.submit(
            state.key,
            group=state.request.number,
            prompt_tokens=len(state.request.group.prompt_ids),
            done_tokens=state.length,
            max_new_tokens=state.request.max_new_tokens,
        )

    def _unqueue(self, state: InFlightSample) -> None:
        self.router.withdraw(state.key)
        self._early.pop(state.key, None)
        self._suspects.pop(state.key, None)

    @property
    def queued(self) -> int:
        """Samples that wait: for room, for their policy, or for an instance without another suspect."""
        return self.router.queued() + len(self._early) + len(self._suspects)

    # -- instances ----------------------------------------------------------------------------------

    def join(self, hello: Hello) -> list[Keep]:
        """A new instance, or one that is back. What of its samples it goes on with; the rest it is to drop.

        A sample that went on elsewhere meanwhile comes back to whoever has more of it; who has it then is to stop
        (`cancelled`).
        """
        old = self.instances.get(hello.instance)
        if old is not None:
            self.leave(hello.instance)
        self._instance_numbers += 1
        instance = Instance(
            hello.instance, hello.incarnation, self._instance_numbers, hello.max_running, hello.kv_tokens
        )
        self.instances[hello.instance] = instance
        self.router.join(hello.instance, max_running=hello.max_running, kv_tokens=hello.kv_tokens)
        self.router.set_accepting(hello.instance, False)
        return [keep for held in hello.held if (keep := self._take_back(instance, held)) is not None]

    def _take_back(self, instance: Instance, held: Held) -> Keep | None:
        state = self.sample(held.key)
        known = self._ended_leases.take(held.lease)
        here = state is not None and not state.finish and held.start <= state.length <= held.length
        if held.key in self.given_up:
            here = False
        if state is not None and state.instance is not None and held.length == state.length:
            here = False  # who has it now is as far
        if state is None or not here:
            if known is not None:
                self.account.lost("superseded", held.length - known)
            return None
        if state.instance is not None:
            self.cancelled.append((state.instance, state.row, state.lease))
            self._detach(state)
        self._unqueue(state)
        before, after = self._blamed.get(instance.incarnation, {}).pop(state.key, (None, None))
        if before is not None and state.record == after:
            state.record = before  # it was the network, and nobody died
            self._note_record(state)
        if state.length >= state.request.max_new_tokens:
            self._queue(state)
            return None
        self._submit(state)
        self.router.place(state.key, instance.name)
        self._lend(state, instance)
        return Keep(
            key=state.key, row=state.row, lease=state.lease, known=state.length, lineage=self._lineage(state)
        )

    def _lineage(self, state: InFlightSample) -> str:
        return lineage(state.request.group.prompt_ids, self.seed_of(state), state.tokens()[0])

    def serve(self, name: str, version: int) -> None:
        """The instance serves `version` from now on."""
        instance = self.instances[name]
        instance.version = version
        self.admit(name)

    def admit(self, name: str, *, able: bool = True) -> None:
        """Let the instance have work if its policy is new enough and nothing else forbids it."""
        instance = self.instances[name]
        instance.accepting = able and self.bounds.admit(instance.version)
        self._offer(instance)

    @property
    def bounds(self) -> PolicyBounds:
        return PolicyBounds(oldest=self.required_version, served=self.served_version)

    def _offer(self, instance: Instance) -> None:
        self.router.set_accepting(instance.name, instance.accepting and instance.suspect is None)

    def leave(self, name: str, *, died: str = "") -> list[InFlightSample]:
        """The instance is gone: its samples are queued again as far as they got. `died` says how, where it did not go
        in order: what takes a whole machine down, agent and all, is found as what takes an engine down."""
        instance = self.instances.pop(name, None)
        if instance is None:
            return []
        self.router.leave(name)
        orphans = list(instance.held.values())
        for state in orphans:
            self._end_lease(state)
            if self.migrating.pop(state.key, None) is not None:
                self.router.withdraw(state.key)
        if not died:
            for state in orphans:
                self._queue(state)
            return orphans
        if len(self._blamed) >= BLAMED_INCARNATIONS:
            del self._blamed[next(iter(self._blamed))]
        before = [state.record for state in orphans]
        for state in orphans:
            state.add_evidence(f"{name}: {died}")
        self._blame(orphans, instance.suspect)
        self._blamed[instance.incarnation] = {
            state.key: (record, state.record) for state, record in zip(orphans, before, strict=True)
        }
        return orphans

    def engine_died(self, name: str) -> None:
        """The instance has no engine, and so no policy. What ran there has ended with `died` before."""
        instance = self.instances[name]
        instance.version = -1
        self.admit(name)

    def _blame(self, dead: list[InFlightSample], suspect: InFlightSample | None) -> None:
        """An engine died with these."""
        for state in blame(dead, suspect):
            self._set_aside(state)
        for state in dead:
            self._note_record(state)
            self.migrating.pop(state.key, None)
            self.router.withdraw(state.key)
            self._queue(state)

    def _note_record(self, state: InFlightSample) -> None:
        """What it answers for outlasts this manager."""
        self._note_end(state, "record", *state.record, list(state.evidence))

    def _set_aside(self, state: InFlightSample) -> None:
        self.account.discarded["poison"] += state.clear()
        state.deaths, state.died_at = POISON_AFTER - 1, 0  # another seed, but the same prompt
        state.resets += 1
        self.quarantined.append(state)
        self.account.samples_quarantined += 1
        self._note_end(state, "reset", seal=True)

    # -- giving work --------------------------------------------------------------------------------

    def assign(self, limit: int | None = None) -> dict[str, tuple[list[Prompt], list[Work]]]:
        """Work for instances, by name, each with the prompts that it was not sent yet."""
        given: dict[str, tuple[list[Prompt], list[Work]]] = {}
        if self._suspects:
            self._try_suspects(given)
        for sample, name in self.router.assign(limit):
            state = self.sample(sample)
            assert state is not None, f"the router gave out sample {sample}, which is not in the book"
            self._give(state, self.instances[name], given)
        return given

    def _try_suspects(self, given: dict[str, tuple[list[Prompt], list[Work]]]) -> None:
        """Elsewhere than where they failed, if there is an elsewhere; one that two engines died with at a time."""
        able = [instance for instance in self.instances.values() if instance.accepting]
        able.sort(key=lambda instance: self.router.drain_s(instance.name))
        only = able[0].name if len(able) == 1 else ""
        alone = {one.name: one for one in able if one.suspect is None}
        roomy = {one.name: one for one in able if self.router.has_room(one.name)}
        for state in list(self._suspects.values()):
            if not alone and not roomy:
                break  # there may be thousands of them, and this is called whenever a slot frees
            avoided = state.failed_at if state.failed_at != only else ""
            choice = alone if is_suspect(state) else roomy
            chosen = next((one for name, one in choice.items() if name != avoided), None)
            if chosen is None:
                continue
            del self._suspects[state.key]
            self._submit(state)
            self.router.place(state.key, chosen.name)
            self._give(state, chosen, given)
            if chosen.suspect is not None:
                alone.pop(chosen.name, None)
            if not self.router.has_room(chosen.name):
                roomy.pop(chosen.name, None)

    def stay(self, state: InFlightSample) -> None:
        """The router moved a sample that is not to move: it counts where it is."""
        assert state.instance is not None
        self.router.withdraw(state.key)
        self._submit(state)
        self.router.place(state.key, state.instance)

    def handoff(self, state: InFlightSample) -> dict[str, tuple[list[Prompt], list[Work]]]:
        """A sample that came back from a move goes to where it was called to."""
        given: dict[str, tuple[list[Prompt], list[Work]]] = {}
        target = self.migrating.pop(state.key, "")
        instance = self.instances.get(target)
        if (
            instance is not None
            and instance.accepting
            and not state.deaths
            and self.router.instance_of(state.key) == target
        ):
            self._give(state, instance, given)
        else:
            self.router.withdraw(state.key)
            self._queue(state)
        return given

    def _give(
        self, state: InFlightSample, instance: Instance, given: dict[str, tuple[list[Prompt], list[Work]]]
    ) -> None:
        self._lend(state, instance)
        ticket = state.request
        prompts, work = given.setdefault(instance.name, ([], []))  # a prompt goes out once a frame
        if not any(prompt.ticket == ticket.number for prompt in reversed(prompts)):
            tokens = np.ascontiguousarray(ticket.group.prompt_ids, dtype="<i4").tobytes()
            prompts.append(Prompt(ticket=ticket.number, tokens=tokens, sampling=ticket.sampling))
        prior = state.tokens()[0].astype("<i4").tobytes() if state.length else b""
        work.append(
            Work(
                row=state.row,
                lease=state.lease,
                key=state.key,
                ticket=ticket.number,
                prior=prior,
                seed=self.seed_of(state),
            )
        )

    def seed_of(self, state: InFlightSample) -> int:
        """31 bits that depend on the request's seed, the group and the sample's index, on nothing that happens."""
        ticket = state.request
        if state.resets:
            return (
                int(words(ticket.seed, _SEED_STREAM, ticket.group.id, state.index, state.resets)) & 0x7FFFFFFF
            )
        if not ticket.seeds:
            _draw_seeds([ticket])
        return ticket.seeds[state.index]

    def recall(self, state: InFlightSample, target: str = "") -> None:
        """The instance that has the sample is told to hand it back, so that it goes on at `target`."""
        self.migrating[state.key] = target

    # -- what agents report -------------------------------------------------------------------------

    def progress(self, name: str, frame: Progress) -> list[InFlightSample]:
        """Take the tokens in. Returns samples that were handed back or failed, now without an instance; they are
        queued again unless they were being moved. Raises FrameError for a frame that cannot be, and then has
        changed nothing."""
        instance = self.instances[name]
        rows = frame.rows
        if frame.ends and max(end.row for end in frame.ends) >= len(self._rows.samples):
            raise refuse("unknown_row", "progress.ends: a row that this manager never gave out")
        for end in frame.ends:
            if any(version > self.newest_version for version, _ in end.runs):
                raise refuse("unknown_version", f"progress.ends: the newest policy is {self.newest_version}")
        if rows.size:
            if int(rows[-1]) >= len(self._rows.samples):
                raise refuse("unknown_row", f"progress.rows: {int(rows[-1])} is no row of this manager")
            mine = (self._rows.leases[rows] == frame.leases) & (self._rows.owners[rows] == instance.number)
            lengths = self._rows.tokens.lengths[rows]
            fits = bool((mine & (lengths == frame.starts)).all())
            self._check(frame, mine, None if fits else lengths)
            self.account.generated += len(frame.tokens)
            if not fits:
                frame = self._fitting(frame, mine)
            if frame.rows.size:
                self._append(frame)
                self._grew(instance, len(frame.tokens))
        self._reported(instance, frame.seq, frame.rate_tokens_s, frame.used_tokens)
        if frame.ends:
            self._write_buffer.ended.add(instance.number)
        if not frame.ends:
            return []
        suspect = instance.suspect
        dead: list[InFlightSample] = []
        back = [state for end in frame.ends if (state := self._end(instance, end, dead)) is not None]
        if dead:
            self._blame(dead, suspect)
        return back

    def progress_of_many(self, names: Sequence[str], reports: Sequence[Report], joined: ReportBatch) -> bool:
        """As `progress` of each, in one pass: reports of different instances, each with samples, that end nothing.
        False, and nothing has changed, where one of them has to be looked at by itself."""
        instances = [self.instances[name] for name in names]
        rows, table = joined.rows, self._rows
        if int(rows.max()) >= len(table.samples) or int(joined.versions.max()) > self.newest_version:
            return False
        numbers = np.repeat(np.array([instance.number for instance in instances]), joined.sizes)
        lengths = table.tokens.lengths[rows]
        fits = (
            (table.leases[rows] == joined.leases)
            & (table.owners[rows] == numbers)
            & (lengths == joined.starts)
            & (lengths.astype(np.int64) + joined.counts <= table.limits[rows])
        )
        if not fits.all():
            return False
        self.account.generated += len(joined.tokens)
        self._append(joined)
        for instance, report, total in zip(instances, reports, joined.totals, strict=True):
            self._grew(instance, total)
            _, _, used_tokens, rate_tokens_s = report.load
            self._reported(instance, report.seq, rate_tokens_s, used_tokens)
        return True

    def nothing_new(self, name: str, report: Report) -> None:
        """The instance says how full and fast it is, and that no sample got further."""
        _, _, used_tokens, rate_tokens_s = report.load
        self.router.observe(name, rate_tokens_s=rate_tokens_s, kv_used_tokens=used_tokens)

    def _reported(self, instance: Instance, seq: int, rate_tokens_s: float, used_tokens: int) -> None:
        """Its tokens are in."""
        self._write_buffer.sessions[instance.number] = seq
        self.router.observe(instance.name, rate_tokens_s=rate_tokens_s, kv_used_tokens=used_tokens)
        if instance.suspect is not None and acquit(instance.suspect):
            self._note_record(instance.suspect)
            instance.suspect = None
            self._offer(instance)

    def _check(self, frame: Progress, mine: NDArray[np.bool_], lengths: NDArray[np.uint32] | None) -> None:
        """`lengths` where not all of the frame begins at its samples' last tokens."""
        rows, starts = frame.rows, frame.starts
        if lengths is not None and (mine & (starts > lengths)).any():
            at = int(np.flatnonzero(mine & (starts > lengths))[0])
            raise refuse(
                "gap",
                f"progress: row {rows[at]} goes on at token {starts[at]}, but {lengths[at]} are known here",
            )
        ends = starts.astype(np.int64) + frame.counts
        if (mine & (ends > self._rows.limits[rows])).any():
            raise refuse("too_long", "progress: a sample is longer than its max_new_tokens")
        if int(frame.versions.max()) > self.newest_version:
            raise refuse(
                "unknown_version",
                f"progress.versions: {int(frame.versions.max())}; the newest policy is {self.newest_version}",
            )

    def _append(self, frame: Progress | ReportBatch) -> None:
        """Into memory and into the batch; every delta here fits."""
        rows = frame.rows
        self._rows.tokens.append(rows, frame.counts, frame.versions, frame.tokens, frame.logprobs)
        keys = self._rows.keys[rows]
        self._rows.deltas[rows] = self._write_buffer.tokens(frame, keys)

    def _grew(self, instance: Instance, tokens: int) -> None:
        instance.tokens += tokens
        self.router.generated(instance.name, tokens)

    def _fitting(self, frame: Progress, mine: NDArray[np.bool_]) -> Progress:
        """The frame without what a former holder sent, and without tokens that are here already (a resend)."""
        offsets = np.concatenate(([0], np.cumsum(frame.counts, dtype=np.int64)))
        keep_rows: list[int] = []
        ids, logprobs, starts, counts = [], [], [], []
        for at, (row, start, count) in enumerate(
            zip(frame.rows.tolist(), frame.starts.tolist(), frame.counts.tolist(), strict=True)
        ):
            begin, end = int(offsets[at]), int(offsets[at + 1])
            if not mine[at]:
                self.account.discarded["superseded"] += count
                continue
            length = int(self._rows.tokens.lengths[row])
            skip = min(length - start, count)
            self.account.generated -= skip
            begin, start, count = begin + skip, length, count - skip
            if not count:
                continue
            keep_rows.append(at)
            starts.append(start)
            counts.append(count)
            ids.append(frame.tokens[begin:end])
            logprobs.append(frame.logprobs[begin:end])
        return Progress(
            frame.seq,
            frame.rows[keep_rows],
            frame.leases[keep_rows],
            np.array(starts, np.uint32),
            np.array(counts, np.uint32),
            frame.versions[keep_rows],
            np.concatenate(ids) if ids else np.empty(0, np.int32),
            np.concatenate(logprobs) if logprobs else np.empty(0, np.float32),
            frame.ends,
            frame.running,
            frame.waiting,
            frame.used_tokens,
            frame.rate_tokens_s,
        )

    def _end(self, instance: Instance, end: End, dead: list[InFlightSample]) -> InFlightSample | None:
        """The sample if it is to go on elsewhere. Those that their engine died with are added to `dead`."""
        state = self._rows.samples[end.row]
        if state is None or state.lease != end.lease or state.instance != instance.name:
            return None
        since = state.lent_at
        self._end_lease(state)
        if end.runs and sum(count for _, count in end.runs) == state.length - since:
            state.correct(since, end.runs)
            goes_on = end.kind not in ("stop", "length")
            self._note_end(state, "runs", since, [list(run) for run in end.runs], seal=goes_on)
        if end.kind in ("stop", "length"):
            self._finish(state, end.kind)
            return None
        if end.kind in ("failed", "died"):
            state.add_evidence(f"{instance.name}: {end.message[:2000]}")
        if end.kind == "died":
            dead.append(state)
            return state
        if end.kind == "failed":
            acquit(state)
            if strike(state, instance.name):
                self._set_aside(state)
            self._note_record(state)
            self.router.withdraw(state.key)
            self.migrating.pop(state.key, None)
        if state.key not in self.migrating:
            self.router.withdraw(state.key)
            self._queue(state)
        return state

    def _finish(self, state: InFlightSample, kind: str) -> None:
        state.finish = kind
        self.migrating.pop(state.key, None)
        self.router.finished(state.key, state.length)
        self._note_end(state, kind)
        state.request.left -= 1
        if not state.request.left:
            self._write_buffer.complete.append(state.request)

    # -- the batch ----------------------------------------------------------------------------------

    @property
    def is_dirty(self) -> bool:
        return self._write_buffer.is_dirty

    @property
    def has_complete(self) -> bool:
        """Somebody waits for the next commit."""
        return bool(self._write_buffer.complete)

    def take_batch(self) -> WriteBatch:
        return self._write_buffer.take(self.counters())

    def counters(self) -> dict[str, Any]:
        return {
            **self.account.counters(),
            "next_ticket": self._next_ticket,
            "next_seq": self._write_buffer.next_seq,
        }

    def _note_end(self, state: InFlightSample, kind: str, *more: Any, seal: bool = False) -> None:
        row, deltas = state.row, self._rows.deltas
        deltas[row] = self._write_buffer.end(row, state.key, int(deltas[row]), kind, *more, seal=seal)

    # -- restoring ----------------------------------------------------------------------------------

    def restore(
        self, counters: dict[str, Any], groups: dict[int, bytes], deltas: list[tuple[int, bytes]]
    ) -> None:
        """The book as it was committed. Every unfinished sample is queued; agents that come back claim theirs."""
        self.account.restore(counters)
        for number, body in groups.items():
            self._add(number, *request_in(body))
        for seq, body in deltas:
            self._fold(seq, body)
        self._next_ticket = max(self._next_ticket, counters.get("next_ticket", 1))
        self._write_buffer.next_seq = max(
            self._write_buffer.next_seq, counters.get("next_seq", 1), (deltas[-1][0] + 1) if deltas else 1
        )
        for ticket in self.requests.values():
            if not ticket.left:
                self._write_buffer.complete.append(ticket)
            for state in ticket.samples:
                if not state.finish:
                    self._queue(state)

    def _fold(self, seq: int, body: bytes) -> None:
        keys, starts, counts, versions, tokens, logprobs, ends = delta_in(body)
        users: dict[int, int] = {}
        first = 0
        for key, start, count, version in zip(keys, starts, counts, versions, strict=True):
            state = self.sample(key)
            if state is not None and state.length == start:
                self._rows.tokens.append(
                    np.array([state.row], np.uint32),
                    np.array([count], np.uint32),
                    np.array([version], np.int32),
                    tokens[first : first + count],
                    logprobs[first : first + count],
                )
                users[key] = state.row
            first += count
        for key, kind, *more in ends:
            state = self.sample(key)
            if state is None:
                continue
            users[key] = state.row
            if kind == "reset":
                state.clear()
                state.resets += 1
            elif kind == "record":
                *record, evidence = more
                state.record = Record(*record)
                state.evidence = tuple(evidence)
            elif kind == "runs":
                state.correct(*more)
            elif not state.finish:
                state.finish = kind
                state.request.left -= 1
        if users:
            rows = np.array(list(users.values()), np.uint32)
            self._rows.deltas[rows] = seq
            self._write_buffer.live.add(seq, rows, np.array(list(users)))
        else:
            self._write_buffer.forgotten.append(seq)

    # -- looking ------------------------------------------------------------------------------------

    @property
    def in_flight_tokens(self) -> int:
        """Of all open groups, finished samples that were not yet taken included."""
        return sum(state.length for ticket in self.requests.values() for state in ticket.samples)

    def samples(self) -> Iterator[InFlightSample]:
        for ticket in self.requests.values():
            yield from ticket.samples

    def unfinished(self) -> Iterator[InFlightSample]:
        """Samples that somebody generates or is to generate."""
        for ticket in self.requests.values():
            if ticket.left:
                yield from (s for s in ticket.samples if not s.finish and s.key not in self.given_up)

    def missing_tokens(self) -> int:
        """`generated - delivered - in flight - discarded`: 0, always."""
        account = self.account
        return account.generated - account.delivered - self.in_flight_tokens - sum(account.discarded.values())

    def last_delta(self, state: InFlightSample) -> int:
        """The number of the last one that holds something of the sample; 0 without."""
        return int(self._rows.deltas[state.row])

    # -- rows and leases ----------------------------------------------------------------------------

    def sample(self, key: int) -> InFlightSample | None:
        """The sample of this key; None where its group was closed."""
        ticket = self.requests.get(key >> INDEX_BITS)
        index = key & ((1 << INDEX_BITS) - 1)
        return ticket.samples[index] if ticket is not None and index < ticket.n else None

    def _lend(self, state: InFlightSample, instance: Instance) -> None:
        self._lease += 1
        state.lease = self._lease
        state.lent_at = state.length
        state.instance = instance.name
        self._rows.lend(state.row, state.lease, instance.number)
        instance.held[state.row] = state
        if is_suspect(state) and instance.suspect is None:
            instance.suspect = state
            self._offer(instance)

    def _end_lease(self, state: InFlightSample) -> None:
        """The sample is with nobody. The router is not told."""
        instance = self.instances.get(state.instance) if state.instance is not None else None
        if instance is not None:
            instance.held.pop(state.row, None)
            if instance.suspect is state:
                instance.suspect = None
                self._offer(instance)
        if state.instance is not None:
            self._ended_leases.note(state.lease, state.length)
        state.instance = None
        state.lease = 0
        self._rows.lend(state.row, 0, 0)

    def _detach(self, state: InFlightSample) -> None:
        self._end_lease(state)
        self.migrating.pop(state.key, None)


def _draw_seeds(tickets: list[GroupRequest]) -> None:
    """Of tickets of one request, all together: which costs as much as of one sample."""
    if tickets:
        ids = np.array([[ticket.group.id] for ticket in tickets])
        bits = words(tickets[0].seed, _SEED_STREAM, ids, np.arange(tickets[0].n), 0) & np.uint64(0x7FFFFFFF)
        for ticket, seeds in zip(tickets, bits.tolist(), strict=True):
            ticket.seeds = seeds


def _check_group(group: Group) -> None:
    """Raises FrameError for a group that nobody can generate."""
    if type(group.id) is not int or not -(2**63) <= group.id < 2**63:  # held-out prompts have negative ids
        raise refuse("invalid", f"request.groups: {group.id!r:.40} is no group's id")
    ids = group.prompt_ids
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise refuse(
            "invalid", f"request.groups: group {group.id} has no prompt, or one that is no list of ids"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= 2**31:
        raise refuse("invalid", f"request.groups: group {group.id} has a token id out of range")
