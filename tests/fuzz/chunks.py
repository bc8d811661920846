"""The weight plane's wire: what strangers and receivers ask of a chunk server, and what sources answer a receiver."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import socket
import threading
import time
from random import Random
from typing import Any

import numpy as np

from gyre.errors import Unauthorized
from gyre.weights.codecs.encoding import CODECS, Codec, decode, encode
from gyre.weights.transfer.chunk_transports import Source, TcpTransport, Want
from gyre.weights.transfer.fetch import Fetch, _Stream
from gyre.weights.transfer.mooncake import remote_memory
from gyre.weights.transfer.protocol import MAGIC, Abandoned, PeerConnection, Stalled, dial
from gyre.weights.transfer.receiver import Receiver
from gyre.weights.transfer.server import ChunkServer
from gyre.weights.transfer.swarm import SwarmPeer
from gyre.weights.version.arena import Arena
from gyre.weights.version.manifest import (
    TENSOR_FILE,
    FileSpec,
    TensorSpec,
    WeightManifest,
    WeightMismatch,
    describe,
)
from tests.fuzz.inputs import as_json, damaged, hostile, hostile_json, noise, twisted
from tests.fuzz.target import Broken, Target
from tests.machine import memory_folder

TOKEN = "only for this test"
CHUNK = 4 << 10
STALL_S = 5.0


def content(version: int) -> bytes:
    """Five chunks and a half of bfloat16 that look like weights."""
    values = np.random.default_rng(version).normal(0, 0.02, CHUNK * 11 // 4).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def manifest_of(version: int) -> WeightManifest:
    data = content(version)
    tensors = (TensorSpec("w", (len(data) // 2,), "bfloat16", 0, len(data)),)
    return describe(
        (FileSpec(TENSOR_FILE, len(data)),),
        [data],
        version=version,
        step=version,
        tensors=tensors,
        chunk_bytes=CHUNK,
    )


def publish(arena: Arena, version: int) -> WeightManifest:
    manifest = manifest_of(version)
    files = arena.stage(manifest.files, keep=None, chunk_bytes=CHUNK)
    files.view_of(0)[:] = content(version)
    arena.commit(manifest)
    return manifest


class Deaths:
    """Threads that end by an exception, which nobody would hear of."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._before = threading.excepthook
        threading.excepthook = self._heard

    def _heard(self, told: threading.ExceptHookArgs) -> None:
        self._said.append(f"{told.exc_type.__name__}: {told.exc_value}"[:500])

    def end(self) -> None:
        threading.excepthook = self._before

    def check(self) -> None:
        said, self._said = self._said, []
        if said:
            raise Broken(f"a thread died of {said[0]}")


class ChunkServers(Target):
    """A server of chunks: bytes before the proof of the token, and requests after it."""

    name = "chunk server"
    share = 0.02
    traced = False

    def start(self) -> None:
        self._deaths = Deaths()
        self._folder = contextlib.ExitStack()
        self._arena = Arena(self._folder.enter_context(memory_folder("fuzz")) / "arena", held=3)
        self._older, self._manifest = publish(self._arena, 1), publish(self._arena, 2)
        self._server = ChunkServer(self._arena, TOKEN, stall_s=STALL_S)
        self._server.origin_of = {self._manifest.checksum}
        self._good = self._dial()

    def stop(self) -> None:
        self._good.close()
        self._server.close()
        self._arena.close(remove=True)
        self._folder.close()
        self._deaths.end()

    def _dial(self) -> PeerConnection:
        return dial(self._server.address, TOKEN, stall_s=STALL_S)

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        knows = draw.randrange(4) > 0
        answered = self._ask(draw, sent) if knows else self._guess(draw, sent)
        self._deaths.check()
        if draw.randrange(8) == 0:
            self._serve_the_honest(draw)
        return answered

    def _guess(self, draw: Random, sent: list[bytes]) -> bool:
        """Who does not know the token gets what everybody gets, and nothing else."""
        sent.append(draw.choice((noise(draw, 200), draw.randbytes(64), MAGIC * 9, b"GET / HTTP/1.1\r\n\r\n")))
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=STALL_S) as link:
            got = exchange(link, sent[0])
        if len(got) > len(MAGIC) + 32:
            raise Broken("it answered who did not prove the token")
        return False

    def _ask(self, draw: Random, sent: list[bytes]) -> bool:
        connection = self._dial()
        with connection._link as link:
            for _ in range(draw.randrange(1, 5)):
                sent.append(self._request(draw))
            link.settimeout(STALL_S)
            link.setblocking(True)
            return bool(exchange(link, b"".join(sent)))

    def _request(self, draw: Random) -> bytes:
        good = {
            "op": draw.choice(("chunk", "chunk", "chunk", "have", "manifest")),
            "checksum": draw.choice((self._manifest.checksum, self._manifest.checksum, "")),
            "index": draw.randrange(6),
            "codec": draw.choice(CODECS),
            "base": draw.choice((self._older.checksum, "")),
            "insist": draw.random() < 0.7,
            "wait_s": 0.01,
            "relay": draw.choice(("", f"127.0.0.{draw.randrange(1, 9)}:7000")),
        }
        if draw.randrange(5) == 0:
            good["via"] = "memory"
        body = hostile_json(good, draw) if draw.randrange(4) else as_json(good)
        return framed(body, draw)

    def _serve_the_honest(self, draw: Random) -> None:
        index = draw.randrange(6)
        self._good.send_json(
            {"op": "chunk", "checksum": self._manifest.checksum, "index": index, "insist": True}
        )
        reply = self._good.receive_json(limit=1 << 20)
        chunk = self._manifest.chunks()[index]
        if reply.get("status") != "ok" or reply.get("nbytes") != chunk.nbytes:
            raise Broken(f"an honest receiver was answered {reply.get('status')!r}")
        data = bytearray(chunk.nbytes)
        self._good.receive_into(memoryview(data))
        if bytes(data) != content(2)[chunk.offset : chunk.offset + chunk.nbytes]:
            raise Broken("an honest receiver got other bytes")


def framed(body: bytes, draw: Random) -> bytes:
    """A frame of the weight plane, at times of another length than it says."""
    size = len(body)
    if draw.randrange(8) == 0:
        size = draw.choice(
            (0, 1, size + 1, size * 2, 1 << 16, (1 << 16) + 1, 1 << 26, (1 << 26) + 1, 2**32 - 1)
        )
    return size.to_bytes(4, "little") + body


def exchange(link: socket.socket, data: bytes) -> bytes:
    """Send all, say that nothing more comes, and read to the end."""
    got = bytearray()
    with contextlib.suppress(OSError):  # it may have hung up already
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
    until = time.monotonic() + 3 * STALL_S
    with contextlib.suppress(ConnectionError):
        while True:
            try:
                part = link.recv(1 << 16)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Broken("it holds a connection that has ended") from None
                continue
            if not part:
                break
            got += part
    return bytes(got)


class ChunkClients(Target):
    """A receiver, and what a source that knows the token answers it: chunks and lies about them."""

    name = "chunk client"
    share = 0.02
    traced = False

    def start(self) -> None:
        self._folder = contextlib.ExitStack()
        self._arena = Arena(self._folder.enter_context(memory_folder("fuzz")) / "arena", held=3)
        publish(self._arena, 1)
        self._manifest = manifest_of(2)
        self._staged = self._arena.stage_manifest(self._manifest, keep=1)
        self._receiver = Receiver(self._arena, TOKEN, address="127.0.0.1:1", seed=1, stall_s=STALL_S)
        self._listener = socket.create_server(("127.0.0.1", 0))

    def stop(self) -> None:
        self._listener.close()
        self._receiver.close()
        self._arena.close(remove=True)
        self._folder.close()

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        """One step of a fetch: as its threads do it, where nothing but Abandoned may come out."""
        self._staged.have.clear()
        self._receiver.random = random.Random(draw.randrange(1 << 30))
        fetch = Fetch(
            self._receiver, self._manifest, self._staged, lambda: [Source("127.0.0.1:9")], lambda: False
        )
        fetch._look_at_sources()
        chunk = draw.choice(self._staged.chunks)
        (peer,) = fetch._swarm.peers.values()
        want = Want(self._manifest, chunk, *self._way(draw, fetch, chunk))
        sent.append(self._answer(draw, want))
        transport = TcpTransport("127.0.0.1:9", TOKEN, stall_s=STALL_S)
        near = socket.create_connection(self._listener.getsockname())
        far, _ = self._listener.accept()
        transport._line = PeerConnection(near, stall_s=STALL_S)
        with far:
            sender = threading.Thread(target=_say, args=(far, sent[0]), daemon=True)
            sender.start()
            asks = draw.randrange(4) == 0
            good = (
                _ask(fetch, peer, transport)
                if asks
                else fetch._step(peer, chunk.index, transport, want, _Stream())
            )
            transport.close()
            sender.join(STALL_S)
        if not self._staged.have <= {chunk.index}:
            raise Broken("it has chunks that it did not ask for")
        if self._staged.have and not self._staged.is_right(chunk):
            raise Broken("it took other bytes than the manifest's")
        self._after(fetch, peer)
        return good

    def _way(self, draw: Random, fetch: Fetch, chunk: Any) -> tuple[Codec, int, str, memoryview | None]:
        codec = draw.choice(CODECS)
        base = fetch._base
        if codec != "delta" or base is None or base.manifest is None:
            return codec if codec != "delta" else "none", 2, "", None
        return codec, 2, base.manifest.checksum, base.view(chunk)

    def _answer(self, draw: Random, want: Want) -> bytes:
        chunk = want.chunk
        raw = content(2)[chunk.offset : chunk.offset + chunk.nbytes]
        codec = want.codec if draw.randrange(6) else draw.choice((*CODECS, "none-such"))
        usable = codec if codec in CODECS and (codec != "delta" or want.base_view is not None) else "none"
        data = bytes(encode(usable, raw, word=2, base=want.base_view))
        if draw.randrange(2):
            data = damaged(data, draw)
        good: dict[str, Any] = {
            "status": draw.choice(("ok", "ok", "ok", "busy", "missing", "elsewhere", "gone")),
            "codec": codec,
            "nbytes": len(data),
            "encode_s": 0.1,
            "has_base": True,
            "have": "3f",
            "given": "1",
            "holders": {"127.0.0.1:9": "3", "127.0.0.2:7000": "4"},
            "peers": ["127.0.0.2:7000"],
        }
        for key in ("have", "given"):
            if draw.randrange(4) == 0:
                good[key] = draw.choice(
                    ("-1", "-3f", "all", "", "f" * 5000, "0x3", "_", " 1", "1" + "0" * 100_000)
                )
        body = hostile_json(good, draw) if draw.randrange(2) else as_json(good)
        return framed(body, draw) + data

    def _after(self, fetch: Fetch, peer: SwarmPeer) -> None:
        """What it learned is still good for choosing whom to ask for what."""
        swarm = fetch._swarm
        if len(swarm.peers) > 200:
            raise Broken(f"it knows {len(swarm.peers)} peers after one answer")
        for later in (0.1, 1.0, 100.0):
            now = time.monotonic() + later
            for known in swarm.peers.values():
                known.heard(now)
            swarm.look(now)
            job = swarm.pick(fetch._needed, now, 1.0)
            if job is not None and not 0 <= job[1] < len(self._staged.chunks):
                raise Broken(f"it would ask for chunk {job[1]}")
            swarm.pick_ahead(peer, fetch._needed, now, 1.0)


def _ask(fetch: Fetch, peer: SwarmPeer, transport: TcpTransport) -> bool:
    """What a scout does."""
    try:
        fetch._ask_what(peer, transport)
    except Exception as error:
        fetch._failed(peer, error, None)
        return False
    return True


def _say(link: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)


class Handshakes(Target):
    """Who answers where a source should be: a receiver dials, and gets anything."""

    name = "weight handshake"
    share = 0.01
    traced = False

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))

    def stop(self) -> None:
        self._listener.close()

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        good = MAGIC + os.urandom(0) + draw.randbytes(32) + hashlib.sha256(b"no proof").digest()
        sent.append(draw.choice((noise(draw, 200), damaged(good, draw), good, good[: draw.randrange(90)])))
        answering = threading.Thread(target=self._answer, args=(sent[0],), daemon=True)
        answering.start()
        try:
            dial(f"127.0.0.1:{self._listener.getsockname()[1]}", TOKEN, stall_s=STALL_S)
        except (OSError, Stalled, Abandoned, Unauthorized):
            return False
        finally:
            answering.join(STALL_S)
        raise Broken("it believes who does not know the token")

    def _answer(self, data: bytes) -> None:
        link, _ = self._listener.accept()
        with link:
            _say(link, data)
            link.settimeout(STALL_S)
            with contextlib.suppress(OSError):
                while link.recv(1 << 12):
                    pass


class MemoryReplies(Target):
    """Where a source says that Mooncake finds a chunk: what is taken for true is given to a native engine."""

    name = "memory replies"
    _source = "10.0.0.7:9000"

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        nbytes = draw.choice((1, CHUNK, 1 << 30))
        good = {"peer": f"10.0.0.7:{draw.randrange(1, 2**16)}", "address": draw.randrange(1, 2**47)}
        reply = twisted({"status": "ok", **good}, draw, wide=True) if draw.random() < 0.9 else hostile(draw)
        sent.append(as_json(reply) if isinstance(reply, dict) else b"no mapping")
        if not isinstance(reply, dict):
            return False  # whoever reads replies takes mappings alone
        try:
            peer, address = remote_memory(reply, self._source, nbytes)
        except ConnectionAbortedError:
            return False
        host, _, port = peer.rpartition(":")
        if host != "10.0.0.7" or not 0 < int(port) < 2**16 or not 0 < address <= 2**64 - nbytes:
            raise Broken(f"the engine is told to read {nbytes} bytes from {peer} at {address}")
        return True


class ChunkCodecs(Target):
    """Encoded chunks: decoded into the chunk and nothing beyond, or a WeightMismatch."""

    name = "chunk codecs"
    share = 0.05

    def start(self) -> None:
        data, base = content(2)[: 1 << 13], bytearray(content(2)[: 1 << 13])
        base[::64] = bytes(len(base[::64]))
        self._base = bytes(base)
        self._size = len(data)
        self._good = {
            (codec, word): bytes(encode(codec, data, word=word, base=self._base))
            for codec in CODECS
            for word in (1, 2, 4)
        }

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        codec, word = draw.choice(list(self._good))
        data = self._good[codec, word]
        sent.append(draw.choice((damaged(data, draw), noise(draw, 300), data)))
        size = draw.choice((self._size, self._size, self._size - 1, 0, 7))
        room = bytearray(b"\xaa" * (size + 16))
        try:
            decode(codec, sent[0], memoryview(room)[:size], word=word, base=memoryview(self._base)[:size])
        except WeightMismatch:
            return False
        finally:
            if room[size:] != b"\xaa" * 16:
                raise Broken("it wrote beyond the chunk")
        return True


class Manifests(Target):
    """A manifest that a source answers with: one whose folder could be made, or a WeightMismatch."""

    name = "manifests"
    share = 0.1

    def start(self) -> None:
        self._good = manifest_of(2).to_dict()

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        plain = twisted(self._good, draw, wide=True) if draw.randrange(8) else hostile(draw, wide=True)
        if isinstance(plain, dict) and draw.randrange(2):
            with contextlib.suppress(Exception):  # as a liar does, who says the checksum of what he says
                plain["checksum"] = _own_checksum(plain)
        sent.append(as_json(plain))
        try:
            made = WeightManifest.from_dict(plain)
        except WeightMismatch:
            return False
        chunks = made.chunks()
        if sum(chunk.nbytes for chunk in chunks) != made.size_bytes:
            raise Broken("its chunks are not its files")
        if WeightManifest.from_dict(made.to_dict()) != made:
            raise Broken("it is another when it is passed on")
        f"v{made.version:08d}"
        hash(made)
        [os.fsencode(file.name) for file in made.files]
        return True


def _own_checksum(plain: dict[str, Any]) -> str:
    from gyre.weights.version.manifest import checksum_of

    files = [FileSpec(str(file["name"]), int(file["size_bytes"])) for file in plain["files"]]
    return checksum_of(files, plain["chunk_bytes"], [str(one) for one in plain["digests"]])
