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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from gyre.errors import Fenced, GyreError
from gyre.rollouts.frames import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Attach,
    Attached,
    Done,
    Frame,
    FrameError,
    Publish,
    Reject,
    Request,
    Taken,
    decode,
    encode,
)
from gyre.rollouts.samples import Group, pack_groups, unpack_groups

REDIAL_S = 0.1
"""Between two dials: a manager that was killed is back in a second or two, and training waits for it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A group that was asked for, and how."""

    purpose: str
    group: Group
    n: int
    sampling: dict[str, Any]
    seed: int
    min_version: int
    pinned: bool


class RolloutClient:
    """`endpoint()` gives (URL, token), or None while unknown. `on_groups(purpose, groups)` and `on_error(error)` are
    called on the client's thread: Fenced where a newer trainer has attached."""

    def __init__(
        self,
        endpoint: Callable[[], tuple[str, str] | None],
        *,
        term: int,
        on_groups: Callable[[str, list[Group]], None],
        on_error: Callable[[GyreError], None],
    ) -> None:
        self._endpoint = endpoint
        self._term = term
        self._on_groups = on_groups
        self._on_error = on_error
        self._asked: dict[tuple[str, int], Asked] = {}
        self._published: Publish | None = None
        self._outbox: list[Frame] = []
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._wake = asyncio.Event()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="gyre-rollout-client", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._socket is not None

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
        """Ask for `n` samples of each group. Thread-safe; returns at once."""
        asked = [Asked(purpose, group, n, sampling, seed, min_version, pinned) for group in groups]
        with self._lock:
            self._asked.update({(purpose, one.group.id): one for one in asked})
            self._outbox += _requests(asked)
        self._nudge()

    def taken(self, purpose: str, ids: Sequence[int]) -> None:
        """These groups are in the trainer's own ledger, or are not wanted any more."""
        with self._lock:
            for group_id in ids:
                self._asked.pop((purpose, group_id), None)
            self._outbox.append(Taken(purpose=purpose, ids=list(ids)))
        self._nudge()

    def publish(self, version: int, checksum: str, path: Path) -> None:
        """A policy version, in a folder that the manager can read and that stays until two newer ones are there."""
        with self._lock:
            self._published = Publish(version=version, checksum=checksum, path=str(path))
            self._outbox.append(self._published)
        self._nudge()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._wake.set)
        self._thread.join(timeout=5.0)

    # -- the client's thread ------------------------------------------------------------------------

    def _nudge(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed: nothing is sent any more
            self._loop.call_soon_threadsafe(self._wake.set)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._stay())
        finally:
            self._loop.close()

    async def _stay(self) -> None:
        while not self._closing:
            try:
                await self._session()
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass  # away or gone: it is dialled again
            except GyreError as error:
                self._on_error(error)
                if isinstance(error, Fenced):
                    return
            if not self._closing:
                await asyncio.sleep(REDIAL_S)

    async def _session(self) -> None:
        where = self._endpoint()
        if where is None:
            return
        url, token = where
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.ws_connect(
                f"{url.rstrip('/')}/v1/trainer", max_msg_size=MAX_FRAME_BYTES, compress=0
            ) as socket,
        ):
            await socket.send_bytes(encode(Attach(protocol=PROTOCOL, term=self._term)))
            writer: asyncio.Task[None] | None = None
            try:
                async for message in socket:
                    if message.type is not aiohttp.WSMsgType.BINARY:
                        return
                    frame = decode(message.data)
                    if isinstance(frame, Attached):
                        self._again()
                        self._socket = socket
                        writer = asyncio.create_task(self._write(socket))
                    elif isinstance(frame, Done):
                        self._groups_came(frame)
                    elif isinstance(frame, Reject):
                        if frame.code == "fenced":
                            raise Fenced(frame.message)
                        raise FrameError(frame.message, details={"reason": frame.code})
            finally:
                self._socket = None
                if writer is not None:
                    writer.cancel()

    def _again(self) -> None:
        """A new connection: the policy first, then everything that is not answered."""
        with self._lock:
            taken = [frame for frame in self._outbox if isinstance(frame, Taken)]
            published = [self._published] if self._published is not None else []
            self._outbox = [*published, *taken, *_requests(list(self._asked.values()))]
        self._wake.set()

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            with self._lock:
                frames, self._outbox = self._outbox, []
            for at, frame in enumerate(frames):
                try:
                    await socket.send_bytes(encode(frame))
                except (ConnectionError, RuntimeError, aiohttp.ClientError):
                    with self._lock:
                        self._outbox = [*frames[at:], *self._outbox]
                    return
            await self._wake.wait()
            self._wake.clear()
            if self._closing:
                await socket.close()
                return

    def _groups_came(self, frame: Done) -> None:
        groups = unpack_groups(frame.groups)
        with self._lock:
            for group in groups:
                self._asked.pop((frame.purpose, group.id), None)
        self._on_groups(frame.purpose, groups)


def _requests(asked: Sequence[Asked]) -> list[Frame]:
    """As few frames as there are different ways of asking."""
    ways: dict[tuple[Any, ...], list[Asked]] = {}
    for one in asked:
        key = (one.purpose, one.n, repr(one.sampling), one.seed, one.min_version, one.pinned)
        ways.setdefault(key, []).append(one)
    return [
        Request(
            purpose=some[0].purpose,
            groups=pack_groups([one.group for one in some]),
            n=some[0].n,
            sampling=some[0].sampling,
            seed=some[0].seed,
            min_version=some[0].min_version,
            pinned=some[0].pinned,
        )
        for some in ways.values()
    ]
