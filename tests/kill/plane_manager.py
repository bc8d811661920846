"""A rollout manager as a process of its own: `python plane_manager.py DIR TERM [sessions [RECOVERY]]`.

Where it listens stands in DIR/rollouts.json; what it tells goes to DIR/events.jsonl, a line each. With a RECOVERY of
sessions it knows conversations too, and dies where DIR/fault says so (`fault_points`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre.chat.plain import PlainRenderer
from gyre.rollouts.manager.rollout_manager import RolloutManager
from gyre.rollouts.manager.shell import HearsOfPlane
from gyre.rollouts.plane.settings import ManagerSettings, SessionSettings
from gyre.store import open_store
from gyre.workloads.tasks.arithmetic import CharTokenizer
from tests.kill.fault_points import FaultPoints, watch_snapshots

TOKEN = "secret"
SETTINGS = ManagerSettings(
    report_interval_s=0.1,
    silence_timeout_s=1.0,
    reconnect_grace_s=0.3,
    restart_grace_s=2.0,
    rebalance_every_s=0.5,
)

SESSIONS = SessionSettings(worker_silence_s=1.5, max_tokens=4000)

SILENCE_S = 5.0
"""An agent that lives asks a manager that was away for long only every 2 s, and must not be taken for one that died."""

ALPHABET = "0123456789[]:"
LETTERS = "".join(chr(0x4E00 + at) for at in range(496))
"""With three special tokens they are the 512 of the tiny model: what an agent reads is all that was drawn."""


def settings_of(directory: Path, kind: Sequence[str]) -> ManagerSettings:
    if kind[:1] != ["sessions"]:
        return SETTINGS
    if not kind[1:]:
        return replace(SETTINGS, sessions=SESSIONS)
    watch_snapshots(FaultPoints(directory))
    renderer = PlainRenderer(CharTokenizer(ALPHABET + LETTERS))
    return replace(
        SETTINGS, sessions=replace(SESSIONS, recovery=kind[1], renderer=renderer, worker_silence_s=SILENCE_S)
    )


async def serve(directory: Path, term: int, settings: ManagerSettings) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    endpoint = directory / "rollouts.json"
    port = 0
    with contextlib.suppress(OSError):
        port = int(json.loads(endpoint.read_text())["url"].rpartition(":")[2])

    class Owner(HearsOfPlane):
        def event(self, kind: str, fields: dict[str, Any]) -> None:
            with open(directory / "events.jsonl", "a") as file:
                file.write(json.dumps({"kind": kind, "term": term, **fields}) + "\n")

        def fail(self, error: BaseException) -> None:
            self.event("Fatal", {"error": repr(error)})
            stopped.set()

    with open_store(f"sqlite:///{directory}/gyre.db") as store:
        manager = RolloutManager(
            store.rollouts("job"), term=term, token=TOKEN, settings=settings, owner=Owner()
        )
        port = await manager.start("127.0.0.1", port)
        partial = endpoint.with_suffix(".new")
        told = {"url": f"http://127.0.0.1:{port}", "token": TOKEN, "pid": os.getpid(), "term": term}
        partial.write_text(json.dumps(told))
        partial.rename(endpoint)
        await stopped.wait()
        await manager.stop()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    asyncio.run(serve(place, int(sys.argv[2]), settings_of(place, sys.argv[3:])))
