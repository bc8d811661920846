"""A process of bench/weights.py: one JSON line for each JSON line that it gets.

serve   publishes random weights of `size_mb` and serves them, by TLS with `encrypt`, rounded with `rounding` fp8;
        `publish` publishes again
train   the same with the weights of a small decoder that `train` really trains
fetch   fetches manifests, again and again, so that its pages are those of the versions before
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

from gyre.weights.publisher import Publisher
from gyre.weights.transfer.chunk_transports import Source, TcpTransport
from gyre.weights.transfer.encryption import Encryption
from gyre.weights.transfer.receiver import Receiver
from gyre.weights.transfer.server import ChunkServer
from gyre.weights.version.arena import Arena
from gyre.weights.version.manifest import FileSpec, WeightManifest, layout_of

TOKEN = "bench"
BLOCK = 1 << 20
MATRIX = 2048
VOCABULARY = 512

BURST_S = 0.05
"""What a link may make up for when the machine was busy elsewhere."""


class Link:
    """All threads of this process share it. Without a rate it carries what the machine does."""

    def __init__(self) -> None:
        self.bytes_s = 0.0
        self._due = 0.0
        self._lock = threading.Lock()

    def set(self, server: ChunkServer, bytes_s: float) -> None:
        """From the next connections on. A server without a rate is as jobs have it: it paces nothing."""
        self.bytes_s = bytes_s
        server._pace = self if bytes_s else None

    def __call__(self, moved: int) -> None:
        with self._lock:
            self._due = max(self._due, time.monotonic() - BURST_S) + moved / self.bytes_s
            wait_s = self._due - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


class Serve:
    def __init__(self, options: dict[str, Any]) -> None:
        self.up = Link()
        self.arena = Arena(Path(options["folder"]))
        self.server = ChunkServer(
            self.arena, TOKEN, encryption=Encryption() if options.get("encrypt") else None
        )
        self.rounding = options.get("rounding", "none")
        self.publisher = Publisher(self.arena, self.server)
        self.version = 0
        self.tensors = self.weights(options)
        self.layout, self.tensors = layout_of(self.tensors, floats="bfloat16")
        if options.get("spare"):
            self.arena.make_ready([FileSpec("model.safetensors", self.layout.size_bytes)])

    def weights(self, options: dict[str, Any]) -> dict[str, Any]:
        import torch

        torch.set_num_threads(1)
        count = max(1, options["size_mb"] * (1 << 20) // (2 * MATRIX * MATRIX))
        generator = torch.Generator().manual_seed(0)
        return {f"w{at}": torch.randn(MATRIX, MATRIX, generator=generator) * 0.02 for at in range(count)}

    def change(self) -> None:
        for tensor in self.tensors.values():
            tensor.view(-1)[:8] += 1e-3

    def publish(self) -> dict[str, Any]:
        self.version += 1
        self.change()
        began, cpu = time.monotonic(), time.process_time()
        publication = self.publisher.begin(self.version, self.version, self.layout, rounding=self.rounding)
        for name, tensor in self.tensors.items():
            publication.put(name, tensor)
        free_s = time.monotonic() - began
        manifest = publication.finish().result(60)
        return {
            "manifest": manifest.to_dict(),
            "address": self.server.address,
            "path": str(self.arena.versions[self.version].path),
            "size_bytes": manifest.size_bytes,
            "trainer_s": free_s,
            "committed_s": time.monotonic() - began,
            "cpu_s": time.process_time() - cpu,
            "arena_bytes": self.arena.size_bytes(),
            **_held(),
        }

    def link(self, bytes_s: float) -> dict[str, Any]:
        self.up.set(self.server, bytes_s)
        return {}

    def spent(self) -> dict[str, Any]:
        return {"cpu_s": time.process_time(), "sent_bytes": self.server.sent_bytes}


class Train(Serve):
    def weights(self, options: dict[str, Any]) -> dict[str, Any]:
        import torch

        from gyre.models.architecture import Architecture
        from gyre.models.modules import Decoder

        torch.set_num_threads(1)
        config = Architecture.qwen3(
            vocab=VOCABULARY, layers=6, hidden=512, heads=8, kv_heads=2, mlp=1408, max_positions=128
        )
        self.model = Decoder(config, seed=0)
        self.generator = torch.Generator().manual_seed(0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        return dict(self.model.named_parameters())

    def change(self) -> None:
        pass  # `train` does

    def train(self, steps: int, rate: float) -> dict[str, Any]:
        """`steps` of AdamW on sequences that go up by a constant; `changed` is the part of bfloat16 words that differ
        afterwards."""
        import torch

        before = self._words()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(steps):
            start, step = (
                torch.randint(low, high, (2, 1), generator=self.generator)
                for low, high in ((0, VOCABULARY), (1, 7))
            )
            tokens = (start + torch.arange(64) * step) % VOCABULARY
            logits = self.model(tokens)[:, :-1].reshape(-1, VOCABULARY)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": float(loss.detach()), "changed": float((self._words() != before).float().mean())}

    def _words(self) -> Any:
        import torch

        flat = torch.cat([tensor.detach().view(-1) for tensor in self.tensors.values()])
        return flat.to(torch.bfloat16).view(torch.int16)


class Fetch:
    def __init__(self, options: dict[str, Any]) -> None:
        self.arena = Arena(Path(options["folder"]))
        self.down, self.up = Link(), Link()
        self.server = ChunkServer(self.arena, TOKEN)
        self.relay = options.get("relay", True)
        self.address = self.server.address if self.relay else ""
        self.receiver = Receiver(
            self.arena,
            TOKEN,
            server=self.server if self.relay else None,
            address=self.address,
            streams=options["streams"],
            codecs=tuple(options.get("codecs", ["none"])),
            remote=self.transport,
            encryption=Encryption() if options.get("encrypt") else None,
            **({"forced_codec": options["codec"]} if options.get("codec") else {}),
        )
        self.version = 0

    def transport(self, address: str, abandoned: Any) -> TcpTransport:
        if not self.down.bytes_s:
            return self.receiver._tcp(address, abandoned)  # as jobs have it
        return TcpTransport(address, TOKEN, relay=self.address, abandoned=abandoned, pace=self.down)

    def fetch(
        self, manifest: dict[str, Any], address: str, path: str = "", again: bool = False
    ) -> dict[str, Any]:
        """With `again` it is fetched under a new number, though it is here."""
        self.version += 1
        told = WeightManifest.from_dict(manifest)
        if again:
            told = dataclasses.replace(told, version=self.version)
        before = self.server.sent_bytes
        began, cpu = time.monotonic(), time.process_time()
        fetched = self.receiver.fetch(told, lambda: [Source(address, path)])
        return {
            "seconds": time.monotonic() - began,
            "cpu_s": time.process_time() - cpu,
            "wire_bytes": fetched.wire_bytes,
            "sent_bytes": self.server.sent_bytes - before,
            "way": fetched.way,
            "codecs": fetched.codecs,
            "reason": fetched.reason,
            "arena_bytes": self.arena.size_bytes(),
            **_held(),
        }

    def link(self, bytes_s: float) -> dict[str, Any]:
        self.down.bytes_s = bytes_s
        self.up.set(self.server, bytes_s)
        return {}

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

    def check(self) -> dict[str, Any]:
        """One checksum over all of it, as it lies in memory."""
        import xxhash

        began, cpu = time.monotonic(), time.process_time()
        xxhash.xxh3_64_hexdigest(self.memory)
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


def _held() -> dict[str, int]:
    """Anonymous memory alone: the pages of the arena are counted by the arena."""
    with open("/proc/self/status") as status:
        kept = dict(line.split(":", 1) for line in status)
    return {
        "rss_bytes": int(kept["RssAnon"].split()[0]) * 1024,
        "threads": int(kept["Threads"]),
        "files": len(os.listdir("/proc/self/fd")),
    }


def main() -> None:
    roles = {"serve": Serve, "train": Train, "fetch": Fetch, "socket": Plain}
    peer = roles[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        what, options = json.loads(line)
        print(json.dumps(getattr(peer, what)(**options)), flush=True)


if __name__ == "__main__":
    main()
