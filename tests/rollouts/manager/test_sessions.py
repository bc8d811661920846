"""What is sent to a peer arrives in order, at once where the peer reads."""

from __future__ import annotations

import asyncio

from gyre.rollouts.manager.connections import AT_ONCE_BYTES, Connection
from gyre.rollouts.protocol.codec import decode
from gyre.rollouts.protocol.frames import Ack, Reject
from tests.waits import GENEROUS_S


class PeerConnection(asyncio.WriteTransport):
    """A transport and its WebSocket: `stuck` bytes of what was written are still there."""

    def __init__(self) -> None:
        self.stuck = 0
        self.written: list[bytes] = []
        self.room = asyncio.Event()
        self.room.set()
        self.gone = False

    def get_write_buffer_size(self) -> int:
        return self.stuck

    async def send_bytes(self, data: bytes, compress: int | None = None) -> None:
        if self.gone:
            raise ConnectionResetError
        self.written.append(data)
        await self.room.wait()

    async def close(self) -> bool:  # type: ignore[override]
        return True

    @property
    def seqs(self) -> list[int]:
        return [frame.seq if isinstance(frame := decode(data), Ack) else -1 for data in self.written]


def peer_on(line: PeerConnection) -> Connection:
    return Connection(line, "a peer", line)  # type: ignore[arg-type]


async def test_a_small_frame_is_written_by_who_sends_it() -> None:
    line = PeerConnection()
    peer = peer_on(line)
    peer.send(Ack(seq=1))
    peer.send(Ack(seq=2))
    assert line.seqs == [1, 2]
    assert peer.waiting_bytes == 0


async def test_whatever_waits_keeps_its_place() -> None:
    line = PeerConnection()
    peer = peer_on(line)
    writer = asyncio.create_task(peer.write())
    peer.send(Ack(seq=1))
    line.stuck = 1  # it does not read
    peer.send(Ack(seq=2))
    line.stuck = 0  # it does again, but one waits already
    peer.send(Ack(seq=3))
    assert line.seqs == [1]
    peer.send(Reject(code="x", message="y" * AT_ONCE_BYTES))
    peer.send(Ack(seq=4))
    peer.close()
    await asyncio.wait_for(writer, GENEROUS_S)
    assert line.seqs == [1, 2, 3, -1, 4]


async def test_a_frame_for_which_the_transport_wants_to_wait_is_written_once() -> None:
    line = PeerConnection()
    peer = peer_on(line)
    line.room.clear()
    peer.send(Ack(seq=1))
    line.stuck = 100
    line.room.set()
    writer = asyncio.create_task(peer.write())
    peer.send(Ack(seq=2))
    peer.close()
    await asyncio.wait_for(writer, GENEROUS_S)
    assert line.seqs == [1, 2]


async def test_who_is_gone_harms_nobody() -> None:
    line = PeerConnection()
    line.gone = True
    peer_on(line).send(Ack(seq=1))
    assert line.written == []
