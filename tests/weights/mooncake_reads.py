"""One side of bare reads with the real Mooncake, in a process of its own.

python mooncake_reads.py serve HOST                        a line of JSON: where its memory is; lives until stdin ends
python mooncake_reads.py read HOST PEER ADDRESS COUNT      a line after the first of so many reads, and one at the end
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

NBYTES = 64 << 20


def main(what: str, host: str, *words: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import numpy as np
    import xxhash

    from gyre.weights.transfer.mooncake import MooncakeEngine
    from gyre.weights.transfer.protocol import Stalled

    engine = MooncakeEngine(host)
    if what == "serve":
        memory = np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)
        told = {
            "peer": engine.address,
            "address": engine.register(memory),
            "digest": xxhash.xxh3_64_hexdigest(memory),
        }
        print(json.dumps(told), flush=True)
        sys.stdin.read()
    else:
        peer, address, count = words
        memory = np.zeros(NBYTES, np.uint8)
        own = engine.register(memory)
        error = ""
        try:
            for number in range(int(count)):
                engine.read(peer, int(address), own, NBYTES)
                if number == 0:
                    print(json.dumps({"began": True}), flush=True)
        except (OSError, Stalled) as raised:
            error = type(raised).__name__
        print(json.dumps({"error": error, "digest": xxhash.xxh3_64_hexdigest(memory)}), flush=True)
    os._exit(0)  # Mooncake's threads outlive the interpreter


if __name__ == "__main__":
    main(*sys.argv[1:])
