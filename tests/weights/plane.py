"""Publishers and receivers of one process, with weights of a megabyte or so in small chunks."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from gyre.weights.publisher import Publisher
from gyre.weights.transfer.chunk_transports import Source
from gyre.weights.transfer.receiver import Receiver
from gyre.weights.transfer.server import ChunkServer
from gyre.weights.version.arena import Arena
from gyre.weights.version.manifest import layout_of

TOKEN = "only for this test"
CHUNK = 64 << 10
MEASURED = {"layers": 32}
"""Of `publish`: four chunks of a size that counts when a link or a transport is measured, at `MEASURED_BYTES` each."""


def weights(
    version: int, *, layers: int = 8, size: int = 256, changed: float = 1.0
) -> dict[str, torch.Tensor]:
    """Two versions differ in about `changed` of their values."""
    generator = torch.Generator().manual_seed(7)
    state = {
        f"layers.{at}.weight": torch.randn(size, size, generator=generator) * 0.02 for at in range(layers)
    }
    state["norm.weight"] = torch.ones(31)
    other = torch.Generator().manual_seed(version)
    for name, tensor in state.items():
        mask = torch.rand(tensor.shape, generator=other) < changed
        state[name] = torch.where(mask, tensor * (1 + version / 100), tensor)
    return state


class Elsewhere:
    """A receiver on another machine than all sources, who may pull from these; from all with an address, where none
    are named."""

    def __init__(self, *sources: Source) -> None:
        self._sources = sources

    def may_pull(self, source: Source) -> bool:
        return source in self._sources if self._sources else bool(source.address)

    def is_here(self, source: Source) -> bool:
        return False


class WeightPeer:
    """An arena with a server, that publishes or receives."""

    def __init__(self, root: Path, *, relay: bool = True, **options) -> None:
        self.arena = Arena(root)
        server_options = {key: options.pop(key) for key in ("networks", "pace") if key in options}
        encryption = options.get("encryption")
        self.server = ChunkServer(
            self.arena, options.pop("token", TOKEN), stall_s=1.0, encryption=encryption, **server_options
        )
        self.address = f"127.0.0.1:{self.server.port}"
        self.incidents: list[tuple[str, dict]] = []
        self.publisher = Publisher(self.arena, self.server, chunk_bytes=options.pop("chunk_bytes", CHUNK))
        self.receiver = Receiver(
            self.arena,
            options.pop("receiver_token", TOKEN),
            server=self.server if relay else None,
            address=self.address if relay else "",
            listener=self,
            **{"stall_s": 20.0, "give_up_s": 40.0, "seed": 0, **options},
        )

    def publish(self, version: int, **options):
        rounding = options.pop("rounding", "none")
        layout, own = layout_of(weights(version, **options), floats="bfloat16")
        return self.publisher.publish(
            version,
            version,
            layout,
            own.items(),
            files={"config.json": b'{"model_type": "qwen3"}'},
            rounding=rounding,
        )

    @property
    def source(self) -> Source:
        return Source(self.address)

    def fetch(self, manifest, *peers, **options):
        return self.receiver.fetch(manifest, lambda: [peer.source for peer in peers], **options)

    def incident(self, kind: str, evidence: dict) -> None:
        self.incidents.append((kind, evidence))

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.incidents}

    def close(self) -> None:
        self.receiver.close()
        self.server.close()
        self.arena.close(remove=True)


def content(files) -> bytes:
    return b"".join((files.path / file.name).read_bytes() for file in files.specs)


def until(condition, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)
