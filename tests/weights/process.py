"""A peer in a process of its own, that can be killed or stopped.

python process.py publish FOLDER VERSION HELD_AFTER      then "PORT MANIFEST" on stdout; lives until stdin ends
python process.py receive FOLDER MANIFEST_FILE RELAY ADDRESS...   prints "port N", then the fetch's figures
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELD_AT_MOST_S = 100.0


def held(after: int, go: Callable[[], bool]):
    """A link that carries so many bytes, and no more before `go()`: what a test does to a transfer finds it unfinished,
    however slow the test or fast the machine is."""
    carried = 0

    def pace(nbytes: int) -> None:
        nonlocal carried
        carried += nbytes
        until = time.monotonic() + HELD_AT_MOST_S
        while carried > after and not go() and time.monotonic() < until:
            time.sleep(0.005)

    return pace


def slow(bytes_per_s: float):
    state = {"due": time.monotonic()}

    def pace(sent: int) -> None:
        state["due"] = max(state["due"], time.monotonic() - 0.05) + sent / bytes_per_s
        time.sleep(max(0.0, state["due"] - time.monotonic()))

    return pace


class Child:
    def __init__(self, *words: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process has ended with {self.process.wait(10)}"
        return line.strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(30)


def main(what: str, folder: str, *words: str) -> None:
    sys.path.insert(0, str(ROOT))
    from gyre.weights.transfer.chunk_transports import Source
    from gyre.weights.version.manifest import WeightManifest
    from tests.weights.plane import WeightPeer

    if what == "publish":
        version, after = words
        pace = held(int(after), Path(f"{folder}.go").exists) if int(after) else None
        peer = WeightPeer(Path(folder), pace=pace)
        manifest = peer.publish(int(version))
        print(peer.server.port, json.dumps(manifest.to_dict()), flush=True)
        sys.stdin.read()
        return
    text, relay, *addresses = words
    manifest = WeightManifest.from_dict(json.loads(Path(text).read_text()))
    peer = WeightPeer(Path(folder), relay=relay == "relay")
    print("port", peer.server.port, flush=True)
    fetched = peer.receiver.fetch(manifest, lambda: [Source(address) for address in addresses])
    print(json.dumps({"resumed": fetched.resumed, "wire_bytes": fetched.wire_bytes}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
