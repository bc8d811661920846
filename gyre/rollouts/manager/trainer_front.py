"""The trainer's way in: one WebSocket, and what its frames need that the machine does not do.

This module must not know what frames bring about.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from aiohttp import WSMsgType, web

from gyre.rollouts.manager.connections import Connection
from gyre.rollouts.manager.front import Front
from gyre.rollouts.manager.sockets import connected, first_frame, websocket
from gyre.rollouts.plane.events import PeerRefused
from gyre.rollouts.plane.trainer import TrainerDialled, TrainerGone, TrainerRequester, TrainerSent
from gyre.rollouts.protocol.codec import unpack
from gyre.rollouts.protocol.fields import FrameError, refuse
from gyre.rollouts.protocol.frames import Frame, Publish
from gyre.rollouts.protocol.progress import Report
from gyre.weights.version.arena import is_folder
from gyre.weights.version.manifest import MANIFEST, WeightMismatch
from gyre.weights.version.model_folder import ModelFolder


class TrainerFront(Front):
    requester = TrainerRequester

    @property
    def connection(self) -> Connection | None:
        """Of the trainer that is attached."""
        trainer = next(one for one in self.plane.requesters if isinstance(one, TrainerRequester))
        return cast("Connection | None", trainer.peer)

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/trainer", self._trainer)]

    def connections(self) -> list[Connection]:
        return [self.connection] if self.connection is not None else []

    async def _trainer(self, request: web.Request) -> web.StreamResponse:
        self.callers.only_ours(request, "attach as the trainer")
        settings = self.plane.settings
        socket = await websocket(request, self.plane)
        trainer = Connection(
            socket, "the trainer", request.transport, settings.send_timeout_s, source=self.shell
        )
        async with connected(trainer):
            try:
                self.shell.handle(TrainerDialled(trainer, await first_frame(socket, settings)))
                async for message in socket:
                    if message.type is WSMsgType.BINARY and self.connection is trainer:
                        await self.received(trainer, unpack(message.data))
            except FrameError as error:
                self.shell.handle(PeerRefused(trainer, error))
            finally:
                self.shell.handle(TrainerGone(trainer))
        return socket

    async def received(self, trainer: Connection, frame: Frame | Report) -> None:
        """Raises FrameError for what a trainer does not send, or what cannot be."""
        model = ""
        if isinstance(frame, Publish) and frame.version > self.plane.versions.newest:
            model = await asyncio.to_thread(model_of, frame)
        self.shell.handle(TrainerSent(trainer, frame, model))


def model_of(frame: Publish) -> str:
    """The model's fingerprint, read from the version's folder if that is on this machine. A manifest of 90,000 tensors
    takes a second to read: do not call it on an event loop. Raises FrameError if the folder has another version than
    the trainer says."""
    if frame.sources and not (frame.path and is_folder(frame.path)):
        return frame.model
    try:
        folder = ModelFolder.read(Path(frame.path))
    except WeightMismatch as error:
        raise refuse("weights", str(error)) from None
    if folder.checksum != frame.checksum:
        raise refuse(
            "checksum",
            f"{frame.path}/{MANIFEST} says {folder.checksum}, the trainer published {frame.checksum}",
        )
    return folder.fingerprint()
