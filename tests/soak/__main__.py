"""`python -m tests.soak --seconds 3600`: see the package."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from gyre.errors import JobFailed
from tests.machine import SmallDisk, owned_folder, sweep
from tests.soak import isolation
from tests.soak.account import Account, Watch, leftovers, report, shared_memory
from tests.soak.cluster import SoakCluster
from tests.soak.faults import Faults, step_of
from tests.soak.job import soak_job
from tests.soak.network import bridge

MACHINES = 3
DISK_KB = 2 << 20
"""Of the file system that holds the job's home."""

FIRST_STEPS = 200
"""After so many the policy has learned to give long answers."""

CALM_S = 60.0
"""The job's pace without faults is that of so many seconds, after its first steps."""

BEGINS_S = 600.0
"""For the cluster and the job's first steps, on a machine that is busy otherwise; and for one step without faults."""

ENDS_S = 300.0
"""For the job to end after it was stopped, and for its ledger to be read."""

SPARED = (0.25, 0.85)
"""The parts of the soak between which master, manager and trainer are not struck, so that their memory can be judged.
Before and after they are struck like the others."""


def main() -> int:
    options = parsed(sys.argv[1:])
    inside = isolation.folder()
    if inside is not None:
        return soak_inside(inside, options)
    for path in sweep():
        say(f"removed {path} of a soak or a test that was killed")
    most_s = BEGINS_S + 2 * CALM_S + options.seconds + ENDS_S + BEGINS_S
    with owned_folder("soak") as folder:
        command = [sys.executable, "-m", "tests.soak", *sys.argv[1:]]
        return isolation.run_inside(command, folder, within_s=most_s)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="A job under random faults.")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_S", "3600")))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=15.0, help="Mean seconds between two faults.")
    parser.add_argument(
        "--failing-steps", type=float, help="Instead of --pause: the share of steps in which a fault strikes."
    )
    parser.add_argument("--prompts", type=int, default=8, help="Of one step: how long it takes.")
    parser.add_argument(
        "--out", type=Path, help="A folder for the table (soak.md) and the figures (soak.json)."
    )
    return parser.parse_args(arguments)


def soak_inside(folder: Path, options: argparse.Namespace) -> int:
    before = shared_memory()
    home = folder / "home"
    home.mkdir()
    os.environ["RAY_TMPDIR"] = str(folder)  # where Ray notes the address of a new cluster
    disk = SmallDisk(home, DISK_KB)
    try:
        with bridge():
            account = soak(folder, disk, options, random.Random(options.seed))
        account.left |= leftovers(folder, before)
    finally:
        disk.close()
    told = report(account, command=f"python -m tests.soak {' '.join(sys.argv[1:])}".rstrip())
    sys.stdout.write(told)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "soak.md").write_text(told)
        (options.out / "soak.json").write_text(json.dumps(account.plain(), indent=1) + "\n")
    return 0 if account.holds else 1


def soak(folder: Path, disk: SmallDisk, options: argparse.Namespace, chance: random.Random) -> Account:
    from gyre.testing.processes import ProcessFaults

    home = disk.path
    account = Account()
    with SoakCluster(folder, head_cpus=8, cpus=4) as cluster:
        for _ in range(MACHINES):
            cluster.add()
        job = soak_job(prompts=options.prompts, machines=MACHINES)
        handle = job.build().submit("soak", home_path=home)
        ProcessFaults(handle).reach_step(FIRST_STEPS, timeout_s=BEGINS_S)
        account.calm = pace(handle, CALM_S)
        faults = Faults(cluster, handle.status, disk, DISK_KB, home / "gyre.db", MACHINES, chance, say=say)
        watch = Watch(handle.status, account)
        watch.start()
        began, first = time.monotonic(), step_of(handle.status())
        try:
            for _ in occasions(handle, options, chance, until=began + options.seconds):
                passed = (time.monotonic() - began) / options.seconds
                faults.sparing = SPARED[0] <= passed < SPARED[1]
                faults.strike()
        finally:
            account.faulty_s = time.monotonic() - began
            account.faulty_steps = step_of(handle.status()) - first
            account.tallies = faults.tallies
            watch.stop()
        with contextlib.suppress(Exception):  # a job that has failed is in the account
            handle.stop("the soak is over")
        with contextlib.suppress(JobFailed):  # what was measured until then is told all the same
            handle.wait(ENDS_S)
        account.end(handle, handle.status())
        handle.close()
    return account


def occasions(
    handle: Any, options: argparse.Namespace, chance: random.Random, *, until: float
) -> Iterator[None]:
    """When a fault is to strike, while the job runs and `until` (monotonic) is not past."""
    at = step_of(handle.status())
    while time.monotonic() < until and not handle.status()["job"]["ended_at"]:
        if options.failing_steps is None:
            pause_s = chance.expovariate(1.0 / options.pause)
            time.sleep(min(pause_s, max(until - time.monotonic(), 0.0)))
            if time.monotonic() < until:
                yield
            continue
        time.sleep(0.2)
        before, at = at, step_of(handle.status())
        # The steps that end while a fault lasts are not counted twice: the next one is drawn anew.
        if at > before and chance.random() < options.failing_steps * (at - before):
            yield
            at = step_of(handle.status())


def pace(handle: Any, seconds: float) -> float:
    """Steps a second, from the end of one to the end of another that comes after these seconds."""
    began, first = next_step(handle)
    ended, last = began, first
    while ended - began <= seconds:
        ended, last = next_step(handle)
    return (last - first) / (ended - began)


def next_step(handle: Any) -> tuple[float, int]:
    """When the next step ended (monotonic), and its number. Raises TimeoutError if none comes."""
    before, deadline = step_of(handle.status()), time.monotonic() + BEGINS_S
    while (step := step_of(handle.status())) == before:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step came after step {before} in {BEGINS_S:g} s, without any fault")
        time.sleep(0.05)
    return time.monotonic(), step


def say(what: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {what}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    assert psutil.LINUX
    sys.exit(main())
