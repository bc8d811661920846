"""The rollout manager's open groups, and the next action for each of their samples.

Callers tell it what happened (`open`, `join`, `progress`, `leave`, `close`), and it answers what to do. It does no I/O
and reads no clock. `Placement` holds where samples are, `SampleStore` their tokens and leases; this module decides over
both.

Invariants:
- *from its last token*: a sample that loses its instance is queued again with the tokens it has, alone, whatever its
  group does; a finished sample is never generated again;
- *one on trial*: a sample that two engines died with goes to an instance that has no other such sample, and nothing new
  comes there until the sample gets further than where it died, which clears it. It is quarantined only if the engine
  dies with it, and with no other sample that had made no progress there;
- *no other policy*: a sample waits until its `min_version` is served, and goes to no instance with an older version.
  That is the sample's wish: whoever has an older version generates what accepts it;
- *the fold is the state*: `restore` from the committed rows gives the same samples with the same tokens.

This module must not know about sockets, Ray, the store or how routing decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.chat.stop_texts import Words
from gyre.rollouts.plane.accounting import TokenAccount
from gyre.rollouts.plane.admission import PolicyBounds
from gyre.rollouts.plane.quarantine import (
    QUARANTINE_AFTER,
    LostIncarnations,
    clear,
    is_suspect,
    record_engine_death,
    record_failure,
)
from gyre.rollouts.plane.report_checks import check_ends, check_runs
from gyre.rollouts.plane.requests import (
    INDEX_BITS,
    InFlightRequest,
    InFlightSample,
    draw_seeds,
    requested_groups,
    sampling_of,
    seed_of,
)
from gyre.rollouts.plane.sample_store import SampleStore
from gyre.rollouts.plane.text_stops import STOP
from gyre.rollouts.protocol.columns import JoinedColumns, lineage
from gyre.rollouts.protocol.fields import refuse
from gyre.rollouts.protocol.frames import Assignment, Held, Hello, Keep, Prompt, Request
from gyre.rollouts.protocol.progress import End, GenerationProgress, Report
from gyre.rollouts.sample_checks import MOST_TOKENS
from gyre.rollouts.samples import Group, GroupRequest
from gyre.rollouts.scheduling.fleet import Instance, Prefix
from gyre.rollouts.scheduling.loaded_versions import LoadedByIncarnation
from gyre.rollouts.scheduling.placement import Placement
from gyre.rollouts.scheduling.rebalancing import Move, Rebalancing
from gyre.rollouts.scheduling.router import OpenInstances, Router
from gyre.rollouts.token_log.records import request_in
from gyre.rollouts.token_log.write_buffer import WriteBatch

MOST_RESETS = 3
"""Times that a sample is quarantined and begun anew before its group is given up."""

Given = dict[str, tuple[list[Prompt], list[Assignment]]]
"""Prompts that were not sent yet, and work, by instance name."""

Recalled = dict[str, list[tuple[int, int]]]
"""(row, lease) of the samples to hand back, by instance name."""


class OpenGroups:
    def __init__(
        self,
        *,
        epoch: int,
        vocabulary: int = MOST_TOKENS,
        most_resets: int = MOST_RESETS,
        words: Words | None = None,
    ) -> None:
        """Token ids are below `vocabulary`, and written as `words` say. A sample may be begun anew `most_resets`
        times."""
        self.placement = Placement()
        self.newest_version = -1
        """No token can come from a newer policy than this."""
        self.served_version = -1
        """The policy that instances should have. Samples that need a newer one wait."""
        self.requests: dict[int, InFlightRequest] = {}
        """The requests of the open groups, by number."""
        self.quarantined: list[InFlightSample] = []
        """Quarantined samples that the caller has not yet reported and cleared."""
        self.given_up: dict[int, InFlightSample] = {}
        """Samples that failed on every instance and with every seed, by key."""
        self.cancelled: list[tuple[str, int, int]] = []
        """(instance, row, lease) of samples to stop, which the caller has not yet stopped and cleared."""
        self._most_resets = most_resets
        self._store = SampleStore(epoch=epoch, vocabulary=vocabulary, words=words)
        open_instances = OpenInstances(self.placement)
        self._router = Router(self.placement, open_instances)
        self._rebalancing = Rebalancing(self.placement, open_instances, self._router)
        self._early: dict[int, InFlightSample] = {}
        """Samples that wait for an instance that serves their policy, by key: they are in nobody's way."""
        self._reach = -1
        """The newest version that an admitted instance has; the served one where none is admitted."""
        self._suspects: dict[int, InFlightSample] = {}
        """Samples that wait to be tried on another instance than where they failed, or alone on one, by key."""
        self._by_group: dict[tuple[str, int], InFlightRequest] = {}
        """Open requests by purpose and group."""
        self._pinned: dict[int, InFlightRequest] = {}
        self.pins: dict[int, int] = {}
        """Versions that have to stay served for what will be asked for, by who holds each."""
        self._next_number = 1
        self._lost = LostIncarnations()
        self._loaded = LoadedByIncarnation()

    # -- requests -----------------------------------------------------------------------------------

    def open(self, frame: Request, texts: Sequence[str] = ()) -> list[InFlightRequest]:
        """Open the groups of the frame that are not known yet; `texts` end their samples. Raises FrameError if nobody
        could generate them."""
        new: dict[int, Group] = {}
        for group in requested_groups(frame):
            if (frame.purpose, group.id) not in self._by_group:
                new.setdefault(group.id, group)
        if new:
            self.check_pin(frame.min_version, pinned=frame.pinned)
        opened = []
        for group in new.values():
            prompt = Group(group.id, group.prompt_ids.astype(np.int32), group.meta)
            sampling = sampling_of(frame, prompt) | ({STOP: list(texts)} if texts else {})
            opened.append(
                self._begin(
                    GroupRequest(
                        frame.purpose, prompt, frame.n, sampling, frame.seed, frame.min_version, frame.pinned
                    )
                )
            )
        draw_seeds(opened)
        for one in opened:
            for sample in one.samples:
                self._queue(sample)
        return opened

    def prefer(self, request: InFlightRequest, order: tuple[int, int], prefix: Prefix | None) -> None:
        """The request's samples wait in this order, and best go where their prefix is."""
        for sample in request.samples:
            sample.placed.order, sample.placed.prefix = order, prefix
            if sample.placed.queue_key is not None:
                self._queue(sample)

    def open_after(self, asked: GroupRequest, prompt_ids: NDArray[np.int32]) -> InFlightRequest | None:
        """Open this group, which is of its form: what it goes on from is open and finished, and with what it adds to
        that its prompt is `prompt_ids`, int32 `[p]`. None where its name is taken. Raises FrameError where no policy
        may generate it any more."""
        if (asked.purpose, asked.group.id) in self._by_group:
            return None
        self.check_pin(asked.min_version, pinned=asked.pinned)
        request = self._begin(asked)
        request.put_together(prompt_ids)
        for sample in request.samples:
            self._queue(sample)
        return request

    def check_pin(self, version: int, *, pinned: bool) -> None:
        """Raises FrameError where only this version would do, and a newer one is served."""
        if pinned and version < self.served_version:
            raise refuse(
                "pinned_late",
                f"request.min_version: {version} and no newer policy, but {self.served_version} is served",
            )

    def _begin(self, asked: GroupRequest) -> InFlightRequest:
        self._store.write_buffer.open(self._next_number, asked)
        return self._add(self._next_number, asked)

    def close(self, purpose: str, ids: Iterable[int], *, unused: str = "") -> list[tuple[str, int, int]]:
        """Forget these groups, which the trainer has, or which nobody uses for the reason `unused`; unknown ones were
        closed before. Returns (instance, row, lease) of their samples that still run and have to be cancelled."""
        running = []
        for group_id in ids:
            request = self._by_group.pop((purpose, group_id), None)
            if request is None:
                continue
            del self.requests[request.number]
            self._pinned.pop(request.number, None)
            self._store.write_buffer.close(request.number)
            for sample in request.samples:
                if sample.instance is not None:
                    running.append((sample.instance, sample.row, sample.lease))
                self._detach(sample)
                self.given_up.pop(sample.key, None)
                self._store.remove(sample, unused=unused)
            request.samples = []  # samples refer to their request: the cycle would wait for the garbage collector
        return running

    def keep_session(self, name: str, body: bytes | None) -> None:
        """This row of a session goes into the next batch; None where it is forgotten."""
        self._store.write_buffer.keep_session(name, body)

    def _add(self, number: int, asked: GroupRequest) -> InFlightRequest:
        request = InFlightRequest.of(asked, number)
        request.before = self.requests[asked.after] if asked.after else None
        self._store.add_samples(request)
        self.requests[number] = request
        self._by_group[(request.purpose, request.group.id)] = request
        if request.pinned:
            self._pinned[number] = request
        self._next_number = max(self._next_number, number + 1)
        return request

    @property
    def pinned_version(self) -> int | None:
        """The newest policy that open requests allow; None if any may be served."""
        asked = [one.min_version for one in self._pinned.values() if self._is_wanted(one)]
        return min([*asked, *self.pins.values()], default=None)

    def pinned_to(self, version: int) -> list[InFlightRequest]:
        """Open requests that no policy but this one may answer."""
        return [one for one in self._pinned.values() if one.min_version == version and self._is_wanted(one)]

    def _is_wanted(self, request: InFlightRequest) -> bool:
        """Whether it is not complete, and can be."""
        return bool(request.left) and not any(sample.key in self.given_up for sample in request.samples)

    def give_up(self, request: InFlightRequest, why: str) -> None:
        """No sample of the request that is not finished can be generated any more."""
        for sample in request.samples:
            if not sample.finish and sample.key not in self.given_up:
                if sample.instance is not None:
                    self.cancelled.append((sample.instance, sample.row, sample.lease))
                self._detach(sample)
                sample.add_evidence(why)
                while sample.resets <= self._most_resets:
                    self._store.reset(sample)
                self._store.note_record(sample)
                self._queue(sample)

    def promote(self, version: int) -> None:
        """Note that instances should have this version: samples that waited for it may be assigned."""
        self.served_version = version
        self._update_reach()

    def _update_reach(self) -> None:
        """Queue the samples that an instance may have now, and take those that none may have out of the queue."""
        admitted = (one.version for one in self.instances.values() if one.admitted)
        before, self._reach = self._reach, max(admitted, default=self.served_version)
        if self._reach > before:
            waiting, self._early = self._early, {}
            for sample in waiting.values():
                self._queue(sample)
        elif self._reach < before and any(one > self._reach for one in self.placement.queue.versions):
            for sample in list(self.unfinished()):
                if sample.placed.queue_key is not None and sample.placed.min_version > self._reach:
                    self._queue(sample)

    # -- what a sample waits for --------------------------------------------------------------------

    def _queue(self, sample: InFlightSample) -> None:
        """Take the sample from its holder, if any, and queue it."""
        request = sample.request
        self._detach(sample)
        if (kind := sample.finished_as) is not None:  # its engine died after its last token, before its end
            self._finish(sample, kind)
        elif sample.resets > self._most_resets:
            self.given_up[sample.key] = sample
        elif request.min_version > min(self._reach, self.served_version):
            self._early[sample.key] = sample
        elif sample.failed_at or is_suspect(sample):
            self._suspects[sample.key] = sample
        else:
            self.placement.enqueue(sample.placed, sample.length)

    def _detach(self, sample: InFlightSample) -> None:
        """Remove the sample from its holder and from every queue."""
        holder = sample.placed.holder
        if holder is not None:
            self._store.leases.end(sample, holder.incarnation)
        self.placement.take_away(sample.placed)
        self._early.pop(sample.key, None)
        self._suspects.pop(sample.key, None)

    def _finish(self, sample: InFlightSample, kind: str) -> None:
        self.placement.finish(sample.placed, sample.length)
        self._store.note_finish(sample, kind)
        if not sample.request.left:
            sample.request.take_apart()

    @property
    def queued(self) -> int:
        """The number of samples that wait for room, for their policy, or for an instance to be tried on."""
        return len(self.placement.queue) + len(self._early) + len(self._suspects)

    @property
    def waiting_for_policy(self) -> int:
        """The number of those that wait because no instance serves their policy yet."""
        return len(self._early)

    @property
    def out_of_reach(self) -> list[InFlightRequest]:
        """The requests with samples that wait for their policy, while others are served: no instance has it. None where
        no instance serves at all."""
        if not any(one.admitted for one in self.instances.values()):
            return []
        return list({sample.request.number: sample.request for sample in self._early.values()}.values())

    def is_newer_wanted(self, version: int) -> bool:
        """Whether an open request accepts only policies after this one."""
        return any(one.min_version > version for one in self.requests.values() if self._is_wanted(one))

    # -- instances ----------------------------------------------------------------------------------

    @property
    def instances(self) -> dict[str, Instance]:
        return self.placement.instances

    def join(self, hello: Hello) -> list[Keep]:
        """Add an instance that is new or back. Returns the samples that it goes on with; it drops the others.

        A sample that went on elsewhere meanwhile comes back if this instance has more of it; its present holder then
        has to stop (`cancelled`).
        """
        if hello.instance in self.instances:
            self.leave(hello.instance)
        instance = self.placement.join(
            hello.instance,
            incarnation=hello.incarnation,
            max_running=hello.max_running,
            kv_tokens=hello.kv_tokens,
            admitted=False,
        )
        kept = [keep for held in hello.held if (keep := self._take_back(instance, held)) is not None]
        instance.loaded = self._loaded.join(hello.incarnation, holds=bool(kept), newest=self.newest_version)
        return kept

    def _take_back(self, instance: Instance, held: Held) -> Keep | None:
        sample = self.sample(held.key)
        if sample is None or not self._goes_back(sample, held, instance):
            lost = self._store.leases.take_lost_tokens(held, instance.incarnation, sample)
            self.account.lost("superseded", lost)
            return None
        if sample.instance is not None:
            self.cancelled.append((sample.instance, sample.row, sample.lease))
        self._detach(sample)
        if self._lost.came_back(instance.incarnation, sample):
            self._store.note_record(sample)
        if sample.finished_as is not None:
            self._queue(sample)
            return None
        self._give(sample, instance)
        return Keep(
            key=sample.key,
            row=sample.row,
            lease=sample.lease,
            known=sample.length,
            lineage=lineage(sample.request.group.prompt_ids, seed_of(sample), sample.tokens()[0]),
        )

    def _goes_back(self, sample: InFlightSample, held: Held, instance: Instance) -> bool:
        if sample.finish or sample.key in self.given_up:
            return False
        if sample.instance is not None and held.length == sample.length:
            return False  # the present holder has as many tokens
        return self._store.leases.is_believed(held, instance.incarnation, sample)

    def serve(self, name: str, version: int) -> None:
        """Note that the instance now serves `version`."""
        instance = self.instances[name]
        self.placement.serve(instance, version)
        instance.loaded.acknowledge(version)
        self.admit(name)

    def resize(self, name: str, *, max_running: int, kv_tokens: int) -> None:
        """The instance's engine takes this much at once."""
        self.placement.resize(self.instances[name], max_running=max_running, kv_tokens=kv_tokens)

    @property
    def bounds(self) -> PolicyBounds:
        return PolicyBounds(self.served_version)

    def admit(self, name: str, *, able: bool = True) -> None:
        """Let the instance have work if it has a policy that may be served and nothing else forbids it."""
        instance = self.instances[name]
        self.placement.admit(instance, able and self.bounds.admit(instance.version))
        self._update_reach()

    def leave(self, name: str, *, died: str = "") -> list[InFlightSample]:
        """Remove an instance and queue its samples with the tokens they have; returns them. `died` is the reason if it
        did not leave in order: a sample that takes down whole machines is found like one that takes down engines."""
        instance = self.instances.get(name)
        if instance is None:
            return []
        orphans = self.held_by(name)
        on_trial = self._on_trial(instance)
        for sample in orphans:
            self._store.leases.end(sample, instance.incarnation)
        self.placement.leave(instance)
        self._loaded.leave(instance.incarnation, instance.loaded)
        self._update_reach()
        if died:
            before = [sample.record for sample in orphans]
            for sample in orphans:
                sample.add_evidence(f"{name}: {died}")
            self._record_death(orphans, on_trial)
            self._lost.add(instance.incarnation, orphans, before)
        for sample in orphans:
            self._queue(sample)
        return orphans

    def engine_died(self, name: str) -> None:
        """Note that the instance has no engine, and so no policy. Its samples have ended with `died` before."""
        self.placement.serve(self.instances[name], -1)
        self.admit(name)

    def _on_trial(self, instance: Instance) -> InFlightSample | None:
        return self.sample(instance.on_trial.key) if instance.on_trial is not None else None

    def _record_death(self, dead: list[InFlightSample], on_trial: InFlightSample | None) -> None:
        """Record that an engine died with these samples."""
        for sample in record_engine_death(dead, on_trial):
            self._quarantine(sample)
        for sample in dead:
            self._store.note_record(sample)

    def _quarantine(self, sample: InFlightSample) -> None:
        sample.deaths, sample.died_at = QUARANTINE_AFTER - 1, 0  # another seed, but the same prompt
        self._store.reset(sample)
        self.quarantined.append(sample)

    # -- giving work --------------------------------------------------------------------------------

    def assign(self, limit: int | None = None) -> Given:
        """Assign waiting samples to instances."""
        given: Given = {}
        if self._suspects:
            self._try_suspects(given)
        for placed, instance in self._router.assign(limit):
            sample = self.sample(placed.key)
            assert sample is not None, f"the router gave out sample {placed.key}, whose group is not open"
            self._lease(sample, instance)
            _add_work(given, sample, instance)
        return given

    def _try_suspects(self, given: Given) -> None:
        """Assign each suspect to an instance other than the one where it failed, if there is one. Each suspect that two
        engines died with gets an instance of its own."""
        able = [instance for instance in self.instances.values() if instance.admitted]
        able.sort(key=self.placement.load.left_s)
        only = able[0].name if len(able) == 1 else ""
        alone = {one.name: one for one in able if one.on_trial is None}
        roomy = {one.name: one for one in able if one.has_room}
        for sample in list(self._suspects.values()):
            if not alone and not roomy:
                break  # there may be thousands of suspects, and this runs whenever a slot frees
            avoided = sample.failed_at if sample.failed_at != only else ""
            choice = alone if is_suspect(sample) else roomy
            chosen = next(
                (one for name, one in choice.items() if name != avoided and one.accepts(sample.placed)), None
            )
            if chosen is None:
                continue
            del self._suspects[sample.key]
            self._give(sample, chosen)
            _add_work(given, sample, chosen)
            if chosen.on_trial is not None:
                alone.pop(chosen.name, None)
            if not chosen.has_room:
                roomy.pop(chosen.name, None)

    def _give(self, sample: InFlightSample, instance: Instance) -> None:
        """Assign the sample to the instance, whether that has room or not."""
        self.placement.place(sample.placed, instance, sample.length)
        self._lease(sample, instance)

    def _lease(self, sample: InFlightSample, instance: Instance) -> None:
        """Grant a lease to the instance that just got the sample."""
        self._store.leases.grant(sample, instance)
        sample.placed.stays = bool(sample.deaths)
        if is_suspect(sample) and instance.on_trial is None:
            self.placement.try_alone(instance, sample.placed)

    # -- migration ----------------------------------------------------------------------------------

    def recall(self, samples: Iterable[InFlightSample]) -> Recalled:
        """Recall samples, so that they go on wherever there is room."""
        recalled: Recalled = defaultdict(list)
        for sample in samples:
            if sample.instance is not None and not sample.placed.recalled:
                self.placement.recall(sample.placed)
                recalled[sample.instance].append((sample.row, sample.lease))
        return recalled

    def take_back(self, row: int, lease: int) -> str | None:
        """Take a recalled sample from its holder, which did not hand it back: it is queued with the tokens that it has,
        and what the holder still reports of it counts no more. Returns the holder's name; None where the holder has
        handed it back, or the sample is another's."""
        sample = self._store.rows.samples[row]
        if sample is None or sample.lease != lease or not sample.placed.recalled:
            return None
        name = sample.instance
        self._queue(sample)
        return name

    def deal(self, now: float) -> Recalled:
        """Recall samples that others can begin at once, while that is cheap. It costs nothing where nobody came."""
        return self._recall_moved(self._rebalancing.deal(now))

    @property
    def can_deal(self) -> bool:
        """Whether `deal` was not done with what came."""
        return self._rebalancing.is_due

    def rebalance(self, now: float) -> Recalled:
        """Recall samples that would end sooner elsewhere."""
        moves = self._rebalancing.even_out(now)
        return self._recall_moved(moves + self._rebalancing.relieve_stragglers(now))

    def _recall_moved(self, moves: Iterable[Move]) -> Recalled:
        recalled: Recalled = defaultdict(list)
        for move in moves:
            sample = self.sample(move.sample.key)
            assert sample is not None, f"sample {move.sample.key} moves, and its group is not open"
            recalled[move.source.name].append((sample.row, sample.lease))
        return recalled

    # -- what agents report -------------------------------------------------------------------------

    def progress(self, name: str, frame: GenerationProgress) -> Given:
        """Take in a report's tokens and ends. Returns the work for samples that migrate; other samples that were handed
        back are queued. Raises FrameError, and changes nothing, if the frame is inconsistent."""
        instance = self.instances[name]
        check_ends(frame.ends, self._store.rows, newest_version=self.newest_version)
        check_runs(frame.ends, self._store.rows, instance.number, instance.loaded.has)
        if frame.rows.size:
            tokens = self._store.take_in(frame.columns, instance, newest_version=self.newest_version)
            self.placement.load.generated(instance, tokens)
        load = (frame.running, frame.waiting, frame.used_tokens, frame.rate_tokens_s)
        self._reported(instance, frame.seq, load, ended=bool(frame.ends))
        self._stop(instance)
        given: Given = {}
        if frame.ends:
            on_trial = self._on_trial(instance)
            dead = [sample for end in frame.ends if (sample := self._end(instance, end, given)) is not None]
            if dead:
                self._record_death(dead, on_trial)
                for sample in dead:
                    self._queue(sample)
        return given

    def progress_of_many(
        self, names: Sequence[str], reports: Sequence[Report], joined: JoinedColumns
    ) -> bool:
        """Take in several reports in one pass: of different instances, each with samples and no ends. Returns False,
        and changes nothing, if one of them has to be handled by itself."""
        instances = [self.instances[name] for name in names]
        if not self._store.take_in_many(
            joined.columns, instances, joined.samples, newest_version=self.newest_version
        ):
            return False
        for instance, report, total in zip(instances, reports, joined.totals, strict=True):
            self.placement.load.generated(instance, total)
            self._reported(instance, report.seq, report.load)
        return True

    def nothing_new(self, name: str, report: Report) -> None:
        """Take in a report without samples: how full and fast the instance is."""
        self._observe(self.instances[name], report.load)

    def _reported(
        self, instance: Instance, seq: int, load: tuple[int, int, int, float], *, ended: bool = False
    ) -> None:
        """Update the instance after its report's tokens were taken in."""
        self._store.write_buffer.reported(instance.number, seq, ended=ended)
        self._observe(instance, load)
        sample = self._on_trial(instance)
        if sample is not None and clear(sample):
            self._store.note_record(sample)
            sample.placed.stays = False
            self.placement.try_alone(instance, None)

    def _stop(self, instance: Instance) -> None:
        """End the samples that a text has ended in what the instance reported; it stops generating them. Their tokens
        have the versions that it has said so far, of which none is newer than the true one."""
        stopped, self._store.stopped = self._store.stopped, []
        for sample in stopped:
            self.cancelled.append((instance.name, sample.row, sample.lease))
            self._store.leases.end(sample, instance.incarnation)
            self._finish(sample, "stop")

    def _observe(self, instance: Instance, load: tuple[int, int, int, float]) -> None:
        running, _, used_tokens, rate_tokens_s = load
        self.placement.load.observe(
            instance, rate_tokens_s=rate_tokens_s, running=running, kv_used_tokens=used_tokens
        )

    def _end(self, instance: Instance, end: End, given: Given) -> InFlightSample | None:
        """End the sample's stay on the instance. Returns the sample if its engine died with it."""
        sample = self._store.rows.samples[end.row]
        if sample is None or sample.lease != end.lease or sample.placed.holder is not instance:
            return None
        is_finished = end.kind in ("stop", "length")
        destination = sample.placed.destination
        self._store.correct_runs(sample, instance.name, end.runs, goes_on=not is_finished)
        self._store.leases.end(sample, instance.incarnation)
        if is_finished:
            self._finish(sample, end.kind)
            return None
        self.placement.take_away(sample.placed)
        if end.kind in ("failed", "died"):
            sample.add_evidence(f"{instance.name}: {end.message[:2000]}")
        if end.kind == "died":
            return sample
        if end.kind == "failed":
            clear(sample)
            if record_failure(sample, instance.name):
                self._quarantine(sample)
            self._store.note_record(sample)
        elif destination is not None and destination.accepts(sample.placed) and sample.finished_as is None:
            self._give(sample, destination)
            _add_work(given, sample, destination)
            return None
        self._queue(sample)
        return None

    # -- the ledger ---------------------------------------------------------------------------------

    @property
    def is_dirty(self) -> bool:
        return self._store.is_dirty

    @property
    def has_complete(self) -> bool:
        """Whether a complete group waits for the next commit."""
        return bool(self._store.write_buffer.complete)

    def take_batch(self) -> WriteBatch:
        self._store.write_leases()
        return self._store.write_buffer.take(self.counters())

    def counters(self) -> dict[str, Any]:
        return {
            **self.account.counters(),
            "next_request_id": self._next_number,
            "next_seq": self._store.write_buffer.next_seq,
        }

    def restore(
        self, counters: dict[str, Any], groups: dict[int, bytes], deltas: list[tuple[int, bytes]]
    ) -> None:
        """Restore the committed state. Every unfinished sample is queued; agents that come back claim theirs."""
        self.account.restore(counters)
        for number, body in groups.items():
            self._add(number, request_in(body))
        for seq, body in deltas:
            self._store.fold(seq, body, self.sample)
        self._store.end_fold(self.sample)
        self._next_number = max(self._next_number, counters.get("next_request_id", 1))
        buffer = self._store.write_buffer
        after_last = deltas[-1][0] + 1 if deltas else 1
        buffer.next_seq = max(buffer.next_seq, counters.get("next_seq", 1), after_last)
        for request in self.requests.values():
            if request.left:
                request.put_together()
            else:
                buffer.complete.append(request.number)
            for sample in request.samples:
                if not sample.finish:
                    self._queue(sample)
                else:
                    self._store.text_stops.forget(sample)

    # -- looking ------------------------------------------------------------------------------------

    @property
    def account(self) -> TokenAccount:
        return self._store.account

    def sample(self, key: int) -> InFlightSample | None:
        """The sample of this key; None if its group was closed."""
        request = self.requests.get(key >> INDEX_BITS)
        index = key & ((1 << INDEX_BITS) - 1)
        return request.samples[index] if request is not None and index < request.n else None

    def held_by(self, name: str) -> list[InFlightSample]:
        """The samples that the instance has, in the order in which it got them."""
        instance = self.instances.get(name)
        keys = instance.held if instance is not None else ()
        return [sample for key in keys if (sample := self.sample(key)) is not None]

    def samples(self) -> Iterator[InFlightSample]:
        for request in self.requests.values():
            yield from request.samples

    def unfinished(self) -> Iterator[InFlightSample]:
        """The samples of open groups that are not finished."""
        for request in self.requests.values():
            if request.left:
                yield from (s for s in request.samples if not s.finish and s.key not in self.given_up)

    @property
    def in_flight_tokens(self) -> int:
        """Tokens of all open groups, including finished samples that the trainer has not taken."""
        return sum(sample.length for sample in self.samples())

    def missing_tokens(self) -> int:
        """`generated - delivered - in flight - discarded`: 0, always."""
        account = self.account
        return account.generated - account.delivered - self.in_flight_tokens - sum(account.discarded.values())

    def last_delta(self, sample: InFlightSample) -> int:
        """The number of the last delta with something of the sample; 0 if none."""
        return self._store.last_delta(sample)


def _add_work(given: Given, sample: InFlightSample, instance: Instance) -> None:
    request = sample.request
    prompts, work = given.setdefault(instance.name, ([], []))  # a prompt is sent once per frame
    if not any(prompt.request_id == request.number for prompt in reversed(prompts)):
        tokens = np.ascontiguousarray(request.group.prompt_ids, dtype="<i4").tobytes()
        sampling = {key: value for key, value in request.sampling.items() if key != STOP}
        prompts.append(Prompt(request_id=request.number, tokens=tokens, sampling=sampling))
    work.append(
        Assignment(
            row=sample.row,
            lease=sample.lease,
            key=sample.key,
            request_id=request.number,
            prior=sample.tokens()[0].astype("<i4").tobytes() if sample.length else b"",
            seed=seed_of(sample),
        )
    )
