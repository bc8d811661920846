"""The trainer's side of the rollout plane: ask for groups, get them when they are whole, publish policies.

The connection lives on a thread of its own and comes back by itself. What was asked for and not answered is asked
again after each reconnect, which is harmless: purpose and group id name a request.

Invariants:
- *asked until answered*: a request is forgotten when its group came;
- *delivered until taken*: a group may come more than once, until `taken` told that it is in the trainer's ledger.

This module must not know about Ray, graphs or training.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from gyre.errors import Fenced, GyreError, Unauthorized
from gyre.rollouts.protocol.codec import checked
from gyre.rollouts.protocol.connection import ConnectionSettings, ManagerConnection, Refused
from gyre.rollouts.protocol.endpoint import Endpoint
from gyre.rollouts.protocol.fields import FrameError, check_sampling, refuse
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Attach,
    Attached,
    DevicesReturned,
    Done,
    Failed,
    Finished,
    FinishedSample,
    Frame,
    GroupsStored,
    LendDevices,
    Publish,
    ReclaimDevices,
    Request,
    SampleCounts,
    TrainerStatus,
    WindowStatus,
)
from gyre.rollouts.protocol.progress import GenerationProgress
from gyre.rollouts.samples import (
    Group,
    GroupRequest,
    Sample,
    SampleKey,
    pack_groups,
    unpack_groups,
    unscored,
)

TLS_CLOSES_S = 0.25
"""aiohttp leaves the end of a TLS connection to the loop, and tells nobody when it is over."""

REDIAL_MAX_S = 0.2
"""Longest pause between two dials: a manager that was killed is back in a second or two, and training waits for it."""

LONGEST_SAMPLE_TOKENS = 4 << 20
"""A sample of so many tokens, ids and log-probs, fills half of a frame."""

PORTION_TOKENS = 1 << 20
"""Most prompt tokens in one Request frame, far below the frame limit."""

MOST_TAKEN = 4096
"""Groups that are named again to the next manager as taken. One dies with what it has not committed, of a tenth of a
second as a rule, and of minutes while its store is away: so many groups are taken in an hour of most jobs."""


class CannotGenerate(GyreError):
    """A sample of the groups `details["ids"]` of `details["purpose"]` failed wherever it was tried."""

    code = "rollouts.cannot_generate"


class HearsOfRollouts:
    """Who asks for groups, and is told what comes, on the client's thread. Overrides what it wants to hear."""

    def groups_delivered(self, purpose: str, groups: list[Group]) -> None:
        """These groups are whole."""

    def failed(self, error: GyreError) -> None:
        """Fenced where a newer trainer has attached, CannotGenerate for groups that nobody can, Unauthorized once for
        each token that is not accepted, another one where the connection failed."""

    def samples_finished(self, purpose: str, samples: dict[SampleKey, Sample]) -> None:
        """These samples have ended, and not yet their groups: they have tokens and ends alone (`unscored`)."""

    def window_changed(self, frame: DevicesReturned | WindowStatus) -> None:
        """The plane has lent devices, or gives them back."""

    def counted(self, frame: SampleCounts) -> None:
        """The answer to a pulse."""


class RolloutClient:
    """The connection of the trainer `owner` to the rollout manager at `endpoint`."""

    def __init__(
        self,
        endpoint: Endpoint,
        owner: HearsOfRollouts,
        *,
        term: int,
        samples_ahead: bool = False,
        connection: ConnectionSettings | None = None,
    ) -> None:
        """`samples_ahead` if samples are wanted before their groups are whole."""
        self._owner = owner
        self._term = term
        self._samples_ahead = samples_ahead
        self._lent: LendDevices | ReclaimDevices | None = None
        """Devices that the plane has, or is to give back."""
        self._asked: dict[tuple[str, int], GroupRequest] = {}
        self._taken: dict[tuple[str, int], None] = {}
        """Those taken last, which were not asked for again: the manager may have died before it had that in its
        ledger."""
        self._published: dict[int, Publish] = {}
        """The newest, and those before it that a pinned request still needs."""
        self._begun: Group | None = None
        """A group received in part; the next frame continues it."""
        self._unauthorised: tuple[str, str] | None = None
        """The address and token of the last manager that did not accept the token."""
        self._outbox: list[Frame] = []
        self._wake = asyncio.Event()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._endpoint = endpoint
        self._connection = ManagerConnection(
            endpoint,
            "trainer",
            self,
            welcome=Attached,
            settings=connection or ConnectionSettings(redial_max_s=REDIAL_MAX_S),
        )
        self._thread = threading.Thread(target=self._run, name="gyre-rollout-client", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._connection.is_up

    def request(
        self,
        purpose: str,
        groups: Sequence[Group],
        *,
        n: int,
        sampling: dict[str, Any],
        seed: int,
        min_version: int,
        pinned: bool = False,
    ) -> None:
        """Ask for `n` samples of each group. Thread-safe; returns at once. Raises FrameError where it cannot be
        asked."""
        check_sampling(sampling)
        longest = sampling.get("max_new_tokens")
        if isinstance(longest, int) and longest > LONGEST_SAMPLE_TOKENS:
            raise refuse(
                "too_long",
                f"max_new_tokens is {longest}; a sample has at most {LONGEST_SAMPLE_TOKENS} tokens",
            )
        if isinstance(longest, int):
            for group in groups:
                try:
                    group.token_limit(longest)
                except ValueError as error:
                    raise refuse("invalid", f"{error}; the data set brings it") from None
        asked = [GroupRequest(purpose, group, n, sampling, seed, min_version, pinned) for group in groups]
        frames = _requests(asked)
        with self._lock:
            for one in asked:
                self._asked[purpose, one.group.id] = one
                self._taken.pop((purpose, one.group.id), None)
            self._outbox += frames
        self._nudge()

    def taken(self, purpose: str, ids: Sequence[int]) -> None:
        """These groups are in the trainer's own ledger, or are not wanted any more."""
        with self._lock:
            for group_id in ids:
                self._asked.pop((purpose, group_id), None)
                self._taken[purpose, group_id] = None
            while len(self._taken) > MOST_TAKEN:
                del self._taken[next(iter(self._taken))]
            self._outbox.append(GroupsStored(purpose=purpose, ids=list(ids)))
        self._nudge()

    def publish(
        self, version: int, checksum: str, path: Path, *, sources: Sequence[str] = (), model: str = ""
    ) -> None:
        """A policy version in a folder that stays until two newer ones are there, and at `sources` (host:port).
        `model` is its fingerprint, for a manager that cannot read the folder."""
        with self._lock:
            frame = Publish(
                version=version, checksum=checksum, path=str(path), sources=list(sources), model=model
            )
            needed = {one.min_version for one in self._asked.values() if one.pinned}
            self._published = {old: it for old, it in self._published.items() if old in needed} | {
                version: frame
            }
            self._outbox.append(frame)
        self._nudge()

    def pulse(self, pulse: TrainerStatus) -> None:
        """How the trainer fares. Of those that wait for a connection only the newest is sent."""
        with self._lock:
            self._outbox = [frame for frame in self._outbox if not isinstance(frame, TrainerStatus)]
            if self.connected:
                self._outbox.append(pulse)
        self._nudge()

    def lend(self, frame: LendDevices | ReclaimDevices) -> bool:
        """Lend the trainer's devices, or ask for them. False where no manager is connected; one that comes hears it
        again. What it answers goes to `window_changed`, on the client's thread."""
        with self._lock:
            if not self.connected:
                return False
            self._lent = frame
            self._outbox.append(frame)
        self._nudge()
        return True

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._connection.stop)
        self._thread.join(timeout=5.0)

    # -- the client's thread ------------------------------------------------------------------------

    def _nudge(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed: nothing is sent any more
            self._loop.call_soon_threadsafe(self._wake.set)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._connection.run())
            if self._endpoint.trust() is not None:
                self._loop.run_until_complete(asyncio.sleep(TLS_CLOSES_S))
        except (
            Exception
        ) as error:  # a defect: without this thread the trainer would wait for samples for ever
            traceback.print_exc()
            self._owner.failed(GyreError(f"The connection to the rollout manager broke: {error!r}."))
        finally:
            self._loop.close()

    def first_frame(self) -> Attach:
        return Attach(protocol=PROTOCOL, term=self._term, samples_ahead=self._samples_ahead)

    def refused(self, error: GyreError) -> bool:
        reason = error.details.get("reason") if isinstance(error, Refused) else None
        if reason == "fenced":
            self._owner.failed(Fenced(error.message))
            return False
        if reason == "unauthorised":
            where = self._endpoint.where()
            if where is not None and where != self._unauthorised:
                self._unauthorised = where
                self._owner.failed(Unauthorized(error.message))
        elif reason == "certificate":
            pass  # of a manager that is being replaced; the next one writes its own beside its address
        else:
            refused = isinstance(error, Refused)
            self._owner.failed(FrameError(error.message, details=error.details) if refused else error)
        return True

    def received(self, frame: Frame | GenerationProgress) -> None:
        if isinstance(frame, Done):
            self._groups_came(frame)
        elif isinstance(frame, Failed):
            details = {"purpose": frame.purpose, "ids": list(frame.ids)}
            self._owner.failed(CannotGenerate(frame.message, details=details))
        elif isinstance(frame, Finished):
            if self._samples_ahead:
                self._owner.samples_finished(frame.purpose, dict(map(_finished, frame.samples)))
        elif isinstance(frame, DevicesReturned | WindowStatus):
            self._window_changed(frame)
        elif isinstance(frame, SampleCounts):
            self._owner.counted(frame)

    def welcomed(self, frame: Attached, url: str, token: str) -> None:
        """A new connection: what was taken, everything that is not answered, then the policies. A pinned request goes
        before them, so that no newer policy overtakes it."""
        self._begun = None
        with self._lock:
            taken = [
                GroupsStored(purpose=purpose, ids=[group_id for _, group_id in some])
                for purpose, some in groupby(self._taken, key=itemgetter(0))
            ]
            taken += [frame for frame in self._outbox if isinstance(frame, GroupsStored)]
            published = [frame for _, frame in sorted(self._published.items())]
            lent = [self._lent] if self._lent is not None else []
            self._outbox = [*taken, *_requests(list(self._asked.values())), *published, *lent]
        self._wake.set()

    async def talk(self) -> None:
        while True:
            with self._lock:
                frames, self._outbox = self._outbox, []
            for at, frame in enumerate(frames):
                try:
                    await self._connection.send(frame)
                except (ConnectionError, RuntimeError, aiohttp.ClientError):
                    with self._lock:
                        self._outbox = [*frames[at:], *self._outbox]
                    return
            await self._wake.wait()
            self._wake.clear()

    def _window_changed(self, frame: DevicesReturned | WindowStatus) -> None:
        if isinstance(frame, DevicesReturned):
            with self._lock:
                if self._lent is not None and self._lent.window == frame.window:
                    self._lent = None
        self._owner.window_changed(frame)

    def _groups_came(self, frame: Done) -> None:
        try:
            groups = unpack_groups(frame.groups)
        except ValueError as error:
            raise refuse("invalid", f"done.groups: {error}") from None
        if not groups or any(type(group.id) is not int for group in groups):
            raise refuse("invalid", "done.groups: none, or one without a number")
        if (begun := self._begun) is not None:
            begun.samples += groups[0].samples
            groups[0], self._begun = begun, None
        if frame.more:
            self._begun = groups.pop()
        with self._lock:
            for group in groups:
                self._asked.pop((frame.purpose, group.id), None)
        self._owner.groups_delivered(frame.purpose, groups)


def _finished(told: FinishedSample) -> tuple[SampleKey, Sample]:
    try:
        token_ids = np.frombuffer(told.tokens, "<i4").astype(np.int32)
    except ValueError as error:
        raise refuse("invalid", f"finished.tokens: {error}") from None
    return (told.group, told.index), unscored(token_ids, told.finish)


def _requests(asked: Sequence[GroupRequest]) -> list[Frame]:
    """As few frames as there are different ways of asking."""
    ways: dict[tuple[Any, ...], list[GroupRequest]] = {}
    for one in asked:
        key = (one.purpose, one.n, repr(one.sampling), one.seed, one.min_version, one.pinned)
        ways.setdefault(key, []).append(one)
    return [
        checked(
            Request,
            purpose=some[0].purpose,
            groups=pack_groups([one.group for one in portion]),
            n=some[0].n,
            sampling=some[0].sampling,
            seed=some[0].seed,
            min_version=some[0].min_version,
            pinned=some[0].pinned,
        )
        for some in ways.values()
        for portion in _portions(some)
    ]


def _portions(asked: Sequence[GroupRequest]) -> Iterator[list[GroupRequest]]:
    portion: list[GroupRequest] = []
    tokens = 0
    for one in asked:
        portion.append(one)
        tokens += len(one.group.prompt_ids) + 64
        if tokens >= PORTION_TOKENS:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion
