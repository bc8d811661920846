"""A process of bench/weights.py: one JSON line for each JSON line that it gets.

serve   publishes random weights of `size_mb` and serves them; `publish` publishes again
fetch   fetches a manifest, again and again under new numbers, so that its pages are those of the versions before
socket  the ceiling: `streams` plain blocking sockets, `send` and `recv_into` by 1 MiB of shared memory that was touched
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from gyre.weights.arena import Arena
from gyre.weights.manifest import Layout, WeightManifest
from gyre.weights.publisher import Publisher
from gyre.weights.receiver import Receiver
from gyre.weights.server import ChunkServer
from gyre.weights.transport import Source, TcpTransport

TOKEN = "bench"
BLOCK = 1 << 20
MATRIX = 2048

BURST_S = 0.25
"""What a link may make up for when the machine was busy elsewhere."""


def pace_of(bytes_per_s: float) -> Any:
    """A link that all threads of this process share."""
    if not bytes_per_s:
        return None
    lock, state = threading.Lock(), {"due": time.monotonic()}

    def pace(moved: int) -> None:
        with lock:
            state["due"] = max(state["due"], time.monotonic() - BURST_S) + moved / bytes_per_s
            wait_s = state["due"] - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)

    return pace


class Serve:
    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(1)
        self.arena = Arena(Path(options["folder"]))
        self.server = ChunkServer(self.arena, TOKEN, pace=pace_of(options.get("link", 0)))
        self.publisher = Publisher(self.arena, self.server)
        count = max(1, options["size_mb"] * (1 << 20) // (2 * MATRIX * MATRIX))
        self.layout = Layout.plan({f"w{at}": ("bfloat16", (MATRIX, MATRIX)) for at in range(count)})
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            f"w{at}": torch.randn(MATRIX, MATRIX, generator=generator) * 0.02 for at in range(count)
        }
        if options.get("spare"):
            from gyre.weights.manifest import FileSpec

            self.arena.reserve([FileSpec("model.safetensors", self.layout.size_bytes)])
        self.version = 0

    def publish(self) -> dict[str, Any]:
        self.version += 1
        for tensor in self.tensors.values():
            tensor.view(-1)[:8] += 1e-3
        began, cpu = time.monotonic(), time.process_time()
        publication = self.publisher.begin(self.version, self.version, self.layout)
        for name, tensor in self.tensors.items():
            publication.put(name, tensor)
        free_s = time.monotonic() - began
        manifest = publication.finish().result()
        return {
            "manifest": manifest.to_dict(),
            "port": self.server.port,
            "trainer_s": free_s,
            "committed_s": time.monotonic() - began,
            "cpu_s": time.process_time() - cpu,
            "arena_bytes": self.arena.size_bytes(),
            "rss_bytes": _rss(),
        }

    def spent(self) -> dict[str, Any]:
        return {"cpu_s": time.process_time(), "sent_bytes": self.server.sent_bytes}


class Fetch:
    def __init__(self, options: dict[str, Any]) -> None:
        self.arena = Arena(Path(options["folder"]))
        self.pace_in, pace_out = pace_of(options.get("link", 0)), pace_of(options.get("link", 0))
        self.server = ChunkServer(self.arena, TOKEN, pace=pace_out)
        self.address = f"127.0.0.1:{self.server.port}"
        relay = options.get("relay", True)
        self.receiver = Receiver(
            self.arena,
            TOKEN,
            server=self.server if relay else None,
            address=self.address if relay else "",
            streams=options["streams"],
            codecs=tuple(options.get("codecs", ["none"])),
            remote=self.transport,
        )
        self.relay = relay
        self.version = 0

    def transport(self, address: str, abandoned: Any) -> TcpTransport:
        return TcpTransport(
            address,
            TOKEN,
            relay=self.address if self.relay else "",
            abandoned=abandoned,
            pace=self.pace_in,
        )

    def fetch(
        self, manifest: dict[str, Any], address: str, path: str = "", fresh: bool = True
    ) -> dict[str, Any]:
        self.version += 1
        told = WeightManifest.from_dict(manifest)
        if fresh:
            told = dataclasses.replace(told, version=self.version)
        began, cpu = time.monotonic(), time.process_time()
        fetched = self.receiver.fetch(told, lambda: [Source(address, path)])
        return {
            "seconds": time.monotonic() - began,
            "cpu_s": time.process_time() - cpu,
            "wire_bytes": fetched.wire_bytes,
            "way": fetched.way,
            "codecs": fetched.codecs,
            "by": fetched.by,
            "reason": fetched.reason,
            "rss_bytes": _rss(),
            "arena_bytes": self.arena.size_bytes(),
        }

    def spent(self) -> dict[str, Any]:
        return {"cpu_s": time.process_time(), "sent_bytes": self.server.sent_bytes}


class Plain:
    """Both ends of plain sockets: the sender listens, the receiver dials `port`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.size = options["size_mb"] << 20
        with tempfile.NamedTemporaryFile(dir=options["folder"]) as file:
            os.posix_fallocate(file.fileno(), 0, self.size)
            self.memory = memoryview(mmap.mmap(file.fileno(), self.size, mmap.MAP_SHARED | mmap.MAP_POPULATE))
        self.listener = socket.create_server(("127.0.0.1", 0))

    def port(self) -> dict[str, Any]:
        return {"port": self.listener.getsockname()[1]}

    def send(self, streams: int) -> dict[str, Any]:
        links = [self.listener.accept()[0] for _ in range(streams)]
        cpu = time.process_time()
        _each(links, lambda link, part: _send(link, self.part(part, streams)))
        return {"cpu_s": time.process_time() - cpu}

    def receive(self, streams: int, port: int) -> dict[str, Any]:
        links = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
        began, cpu = time.monotonic(), time.process_time()
        _each(links, lambda link, part: _receive(link, self.part(part, streams)))
        return {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu}

    def part(self, number: int, streams: int) -> memoryview:
        step = self.size // streams
        return self.memory[number * step : (number + 1) * step]


def _send(link: socket.socket, view: memoryview) -> None:
    for at in range(0, len(view), BLOCK):
        link.sendall(view[at : at + BLOCK])
    link.recv(1)


def _receive(link: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        at += link.recv_into(view[at : at + BLOCK])
    link.close()


def _each(links: list[socket.socket], work: Any) -> None:
    threads = [threading.Thread(target=work, args=(link, part)) for part, link in enumerate(links)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _rss() -> int:
    """Anonymous memory alone: the pages of the arena are counted by the arena."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    roles = {"serve": Serve, "fetch": Fetch, "socket": Plain}
    party = roles[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        what, options = json.loads(line)
        print(json.dumps(getattr(party, what)(**options)), flush=True)


if __name__ == "__main__":
    main()
