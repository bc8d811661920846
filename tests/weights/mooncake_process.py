"""A peer in a process of its own, with the real Mooncake, as a job's settings make it.

python mooncake_process.py publish FOLDER SETTINGS [SIZE]               then a line of JSON; lives until stdin ends
python mooncake_process.py receive FOLDER SETTINGS ADDRESSES CHECKSUM   then a line when it begins,
                                                                        and one at its end
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZE = 2000


class Heard:
    def __init__(self) -> None:
        self.incidents: list[str] = []

    def incident(self, kind: str, evidence: dict[str, Any]) -> None:
        self.incidents.append(f"{kind} {evidence}")


def main(what: str, folder: str, settings: str, *words: str) -> None:
    sys.path.insert(0, str(ROOT))
    import torch

    from gyre.config import WeightsSpec
    from gyre.rollouts.weight_peer import WeightPeer
    from gyre.weights.publisher import Publisher
    from gyre.weights.transfer.chunk_transports import Source
    from gyre.weights.version.manifest import layout_of

    spec = WeightsSpec.model_validate_json(settings)
    peer = WeightPeer(Path(folder), what, "only for this test", spec, url="http://127.0.0.1:1")
    if what == "publish":
        size = int(words[0]) if words else SIZE
        values = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        layout, own = layout_of({"layers.0.weight": values})
        publisher = Publisher(peer.arena, peer.server, chunk_bytes=spec.chunk_bytes)
        manifest = publisher.publish(1, 1, layout, own.items(), files={"config.json": b"{}"})
        told = {"address": peer.server.address, "checksum": manifest.checksum}
        print(json.dumps(told), flush=True)
        sys.stdin.read()
    else:
        addresses, checksum = words
        heard = Heard()
        receiver = peer.receiver(give_up_s=20.0, listener=heard)
        sources = [Source(address) for address in addresses.split(",")]
        manifest = receiver.manifest_of(1, checksum, lambda: sources)
        began, spent = time.monotonic(), time.process_time()
        print(json.dumps({"began": True}), flush=True)
        fetched = receiver.fetch(manifest, lambda: sources)
        told = {
            "way": fetched.way,
            "reason": fetched.reason,
            "wire_bytes": fetched.wire_bytes,
            "size_bytes": manifest.size_bytes,
            "seconds": time.monotonic() - began,
            "cpu_s": time.process_time() - spent,
            "right": all(fetched.files.is_right(chunk) for chunk in fetched.files.chunks),
            "heard": heard.incidents,
        }
        peer.settle()
        print(json.dumps(told), flush=True)
    peer.close()
    os._exit(0)  # Mooncake's threads outlive the interpreter


if __name__ == "__main__":
    main(*sys.argv[1:])
