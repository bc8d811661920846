"""A job on a small disk that fills and empties at random moments, while its processes are killed at random.

    python -m tests.kill.full_disk SEED

The disk, a tmpfs of its own, holds GYRE_HOME and Ray's folder. Everything is over, and unmounted, when this ends; the
exit status says whether the job made every step, lost no prompt and trained none twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from gyre.api.home import home
from gyre.api.job_replay import replay_job
from gyre.api.ray_session import connect, disconnect
from gyre.rollouts.trainer.sample_ledger import account_of
from gyre.store import open_store
from gyre.testing.processes import ProcessFaults
from tests.kill.gate import Gate
from tests.kill.jobs import tiny_job
from tests.machine import fill, small_disk

SIZE_MIB = 64
STEPS = 20
ROUNDS = 3
ENDS_WITHIN_S = 150.0
VICTIMS = (
    "rollout-0",
    "rollout-1",
    "reward-0",
    "actor-0",
    "actor-1",
    "trainer-0",
    "rollout_manager-0",
    "master",
)


def main(seed: int) -> None:
    began = time.monotonic()
    with small_disk(SIZE_MIB << 10) as small:
        disk = small.path
        connect("local", start_local=True, place=home(disk))
        try:
            seen = run(disk, random.Random(seed))
        finally:
            disconnect()
    print(f"seed {seed}: {seen}, {time.monotonic() - began:.0f} s", flush=True)


def run(disk: Path, chance: random.Random) -> str:
    handle = (
        tiny_job(
            STEPS,
            reward="PrintingReward",
            config={"gated": True},
            failover={"vertex": {"max": 4, "window_s": 600}, "job": {"max": 1, "window_s": 600}},
        )
        .build()
        .submit("disk", home_path=disk)
    )
    faults, gate = ProcessFaults(handle), Gate(home(disk).job_directory(handle.job_id))
    said: set[str] = set()
    watching = threading.Event()
    watcher = threading.Thread(target=_watch, args=(handle, said, watching), daemon=True)
    killed = []
    try:
        gate.open_to(4)
        faults.reach_step(2)
        watcher.start()
        gate.open_to(1_000_000)
        for _ in range(ROUNDS):
            time.sleep(chance.uniform(0.0, 1.5))
            fill(disk / "ballast", leave_bytes=chance.choice([0, 0, 1 << 12, 1 << 20]))
            for _ in range(chance.randint(1, 2)):
                time.sleep(chance.uniform(0.0, 2.0))
                name = chance.choice(VICTIMS)
                if _kill(handle, name):
                    killed.append(name)
            time.sleep(chance.uniform(0.5, 4.0))
            (disk / "ballast").unlink()
            time.sleep(chance.uniform(1.0, 4.0))
        view = handle.wait(ENDS_WITHIN_S)
    finally:
        watching.set()
        (disk / "ballast").unlink(missing_ok=True)
    job = view["job"]
    assert job["phase"] == "succeeded", (job, view["incidents"], killed)
    result = job["result"]
    assert (result["steps"], result["prompts_lost"], result["trained_twice"]) == (STEPS, 0, 0), result
    with open_store(handle.store_url) as store:
        account = account_of(store.ledger(handle.job_id))
        assert account.lost == account.trained_twice == ()
        assert account.trained == account.drawn == STEPS * 16
        assert replay_job(store, handle.job_id).differences == []
    assert "disk_full" in said, said
    handle.close()
    return f"killed {', '.join(killed)}; {len(view['incidents'])} incidents"


def _kill(handle: Any, name: str) -> bool:
    """False where it has no process now."""
    view = handle.status()
    pid = view["master"]["pid"] if name == "master" else 0
    for vertex in view["vertices"]:
        if vertex["id"] == name and vertex["phase"] == "running":
            pid = vertex["pid"]
    try:
        os.kill(pid, signal.SIGKILL) if pid else None
    except ProcessLookupError:
        return False
    return bool(pid)


def _watch(handle: Any, said: set[str], ended: threading.Event) -> None:
    while not ended.wait(0.3):
        with contextlib.suppress(Exception):  # the master may be away
            said.add(handle.status()["job"]["reason"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
