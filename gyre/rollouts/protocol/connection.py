"""The connection to the rollout manager, as an agent and a trainer have it: it is dialled, and comes back by itself.

    dial ──▶ first frame ──▶ welcome ──▶ frames both ways ──▶ broken, silent or refused ──▶ pause ──▶ dial …

Invariants:
- *it comes back*: whatever breaks the connection, the manager is dialled again, at the address that is known then;
  only a refusal that will not change ends it, and `stop`;
- *silence is an end*: a manager that says nothing and answers no ping is dialled anew, and so is one that takes the
  connection and does not welcome;
- *a peer can vanish*: both ends send a WebSocket ping when nothing came for `HEARTBEAT_S`, and give the connection up
  when nothing comes for half of that again. The operating system gives it up earlier where it has data to send and no
  acknowledgement comes;
- *nothing before the welcome*: until the manager has welcomed this end, nothing but the first frame is sent.

This module must not know what the frames bring about.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import socket as sockets
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from gyre.clock import Clock
from gyre.errors import GyreError
from gyre.rollouts.protocol.codec import MAX_FRAME_BYTES, decode, encode
from gyre.rollouts.protocol.endpoint import Endpoint
from gyre.rollouts.protocol.fields import refuse
from gyre.rollouts.protocol.frames import Frame, Reject
from gyre.rollouts.protocol.progress import GenerationProgress

HEARTBEAT_S = 12.0
"""Silence after which a ping is sent. Half of it more is what a peer may take to answer: a process that is garbage
collecting, compiling or short of a core answers late, and is not gone."""

UNACKNOWLEDGED_S = 15.0
"""How long the peer's machine may leave data unacknowledged."""


def watch_acknowledgements(sock: Any, within_s: float = UNACKNOWLEDGED_S) -> None:
    """Have the operating system break a connection when data was not acknowledged for so long.
    Nothing is done where the system has no such option, or the socket is none of TCP."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None and sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, int(within_s * 1000))


CONNECT_WITHIN_S = 5.0

CLOSE_WITHIN_S = 1.0
"""What the manager may take to answer the end of a connection."""


class Refused(GyreError):
    """The manager will not work with this end, or is not to be trusted. `details["reason"]` is the code."""

    code = "rollouts.refused"


class Dialler(Protocol):
    """Who has the connection. A GyreError that `welcomed` or `received` raises is a refusal too."""

    def first_frame(self) -> Frame:
        """What this end says first."""

    def welcomed(self, frame: Any, url: str, token: str) -> None:
        """The manager's answer to that; `url` and `token` are those that it was dialled with."""

    async def talk(self) -> None:
        """Runs as a task from the welcome until the connection ends."""

    def received(self, frame: Frame | GenerationProgress) -> None:
        """Every frame after the welcome."""

    def refused(self, error: GyreError) -> bool:
        """Whether to dial again."""


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    heartbeat_s: float = HEARTBEAT_S
    welcome_within_s: float = 30.0
    """From the dial to the manager's welcome."""
    redial_first_s: float = 0.1
    """Pause before the manager is dialled again, doubled each time."""
    redial_max_s: float = 1.0
    """Shorter than the manager's `restart_grace_s`."""
    put_off_max_s: float = 15.0
    """The same after a refusal that does not stand."""


class ManagerConnection:
    """Runs from `run` to `stop`, on one event loop. `welcome` is the kind of frame that answers the owner's first."""

    def __init__(
        self,
        endpoint: Endpoint,
        route: str,
        owner: Dialler,
        *,
        welcome: type[Frame],
        settings: ConnectionSettings | None = None,
        clock: Clock = time,
    ) -> None:
        self.settings = settings or ConnectionSettings()
        self._endpoint = endpoint
        self._route = route
        self._owner = owner
        self._welcome = welcome
        self._clock = clock
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._stopped = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def is_up(self) -> bool:
        """The manager has welcomed this end, and the connection stands as far as anybody knows."""
        return self._socket is not None

    async def run(self) -> None:
        """Dial until `stop`, or until a refusal ends it."""
        try:
            await self._keep_connected()
        finally:
            if self._background:  # the last words, and the end of the connection
                await asyncio.wait(self._background, timeout=CLOSE_WITHIN_S)
                for task in self._background:
                    task.cancel()

    async def _keep_connected(self) -> None:
        pause_s = self.settings.redial_first_s
        while not self._stopped.is_set():
            began, put_off = self._clock.monotonic(), False
            try:
                await self._once()
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass  # away or gone: it is dialled again
            except GyreError as error:
                if not self._owner.refused(error):
                    return
                put_off = True
            if self._clock.monotonic() - began > self.settings.redial_max_s:
                pause_s = self.settings.redial_first_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopped.wait()
            longest_s = self.settings.put_off_max_s if put_off else self.settings.redial_max_s
            pause_s = min(longest_s, 2 * pause_s)

    def stop(self) -> None:
        """Close the connection after what was sent, and dial no more."""
        self._stopped.set()
        if self._socket is not None:
            self._keep(self._socket.close())

    async def send(self, frame: Frame | GenerationProgress) -> None:
        """Raises ConnectionError or aiohttp.ClientError where the connection is gone; whoever reads it notices too."""
        if self._socket is None:
            raise ConnectionResetError("the rollout manager is not connected")
        await self._socket.send_bytes(encode(frame))

    def send_soon(self, frame: Frame) -> None:
        """Send it over this connection if there is one, in order; nobody hears of it where it breaks."""
        if self._socket is not None and not self._socket.closed:
            self._keep(_send_quietly(self._socket, encode(frame)))

    def _keep(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- one connection -----------------------------------------------------------------------------

    async def _once(self) -> None:
        where = self._endpoint.where()
        if where is None:
            return
        url, token = where
        headers = {"Authorization": f"Bearer {token}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_WITHIN_S)
        async with (
            asyncio.timeout(self.settings.welcome_within_s) as due,
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
        ):
            socket = await self._dial(session, url)
            link = socket.get_extra_info("socket")
            if link is not None:
                watch_acknowledgements(link)
            try:
                async with socket:
                    await socket.send_bytes(encode(self._owner.first_frame()))
                    await self._read(socket, url, token, due)
            finally:
                if link is not None and socket.close_code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE:
                    _shut_down(link)  # what was not sent keeps nobody waiting

    async def _dial(self, session: aiohttp.ClientSession, url: str) -> aiohttp.ClientWebSocketResponse:
        try:
            return await session.ws_connect(
                f"{url.rstrip('/')}/v1/{self._route}",
                max_msg_size=MAX_FRAME_BYTES,
                compress=0,
                heartbeat=self.settings.heartbeat_s,
                ssl=self._endpoint.trust() or True,
            )
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as error:
            raise Refused(
                f"The rollout manager at {url} is not who it should be: {error}.",
                hint="Give what to trust with --ca, and the address by the name that its certificate has.",
                details={"reason": "certificate"},
            ) from None
        except aiohttp.WSServerHandshakeError as error:
            if error.status not in (401, 403):
                raise
            said = _described(error.headers)
            raise Refused(
                f"The rollout manager at {url} does not accept the token{': ' + said if said else '.'}",
                hint="Give a join token of the job: `gyre token create` makes one.",
                details={"reason": "unauthorised"},
            ) from None

    async def _read(
        self, socket: aiohttp.ClientWebSocketResponse, url: str, token: str, due: asyncio.Timeout
    ) -> None:
        talking: asyncio.Task[None] | None = None
        try:
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    return  # an error: it broke, or it was silent
                frame = decode(message.data)
                if isinstance(frame, Reject):
                    raise Refused(frame.message, details={"reason": frame.code})
                if talking is not None:
                    self._owner.received(frame)
                elif isinstance(frame, self._welcome):
                    due.reschedule(None)
                    self._socket = socket
                    self._owner.welcomed(frame, url, token)
                    talking = asyncio.create_task(self._talk_over(socket))
                else:
                    raise refuse("unexpected", f"{type(frame).__name__} came before {self._welcome.__name__}")
        finally:
            self._socket = None
            if talking is not None:
                talking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await talking

    async def _talk_over(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            await self._owner.talk()
        except (ConnectionError, aiohttp.ClientError):
            pass  # the reading side notices, and the manager is dialled again
        except BaseException:
            self._keep(socket.close())  # nobody would talk over it any more
            raise


def _described(headers: Mapping[str, str] | None) -> str:
    """The manager's sentence about the token, from the header that RFC 6750 has for it."""
    challenge = (headers or {}).get("WWW-Authenticate", "")
    found = re.search(r'error_description="([^"]{1,300})"', challenge)
    return found[1] if found else ""


def _shut_down(link: Any) -> None:
    """`link` is a transport's socket. By another descriptor of it, for uvloop's cannot be shut down themselves."""
    with contextlib.suppress(OSError), link.dup() as twin:  # closed already
        twin.shutdown(sockets.SHUT_RDWR)


async def _send_quietly(socket: aiohttp.ClientWebSocketResponse, data: bytes) -> None:
    with contextlib.suppress(ConnectionError, RuntimeError, aiohttp.ClientError):
        await socket.send_bytes(data)
