"""`python -m tests.soak --seconds 3600`: see the package."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.soak.account import Account, Watch, leftovers, report, shared_memory
from tests.soak.cluster import SoakCluster
from tests.soak.faults import Faults
from tests.soak.network import HEAD, NETWORK, bridge

MACHINES = 3
CALM_S = 60.0
"""The job's pace without faults is that of so many seconds, after its first steps."""

ENDS_S = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="A job under random faults.")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_S", "3600")))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=5.0, help="Mean seconds between two faults.")
    parser.add_argument(
        "--failing-steps", type=float, help="Instead of --pause: the share of steps in which a fault strikes."
    )
    parser.add_argument("--prompts", type=int, default=16, help="Of one step: how long it takes.")
    parser.add_argument(
        "--out", type=Path, help="A folder for the table (soak.md) and the figures (soak.json)."
    )
    options = parser.parse_args()
    before = shared_memory()
    with small_disk() as folder, bridge():
        account = soak(folder, options, random.Random(options.seed))
    account.left |= leftovers(folder, before)
    told = report(account, command=f"python -m tests.soak {' '.join(sys.argv[1:])}".rstrip())
    sys.stdout.write(told)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "soak.md").write_text(told)
        (options.out / "soak.json").write_text(json.dumps(account.plain(), indent=1) + "\n")
    return 0 if account.holds else 1


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of its own for the job's home, small enough to be filled in a second."""
    with tempfile.TemporaryDirectory(prefix="gs", dir="/tmp") as name:
        folder = Path(name)
        home = folder / "home"
        home.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(home)], check=True)
        os.environ["RAY_TMPDIR"] = name  # where Ray notes the address of a new cluster
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(home)], check=False)


def soak(folder: Path, options: argparse.Namespace, chance: random.Random) -> Account:
    from gyre.testing.processes import ProcessFaults
    from tests.kill.jobs import tiny_job

    home = folder / "home"
    account = Account()
    with SoakCluster(folder, head_cpus=8, cpus=4) as cluster:
        for _ in range(MACHINES):
            cluster.add()
        builder = tiny_job(
            steps=1_000_000,
            max_staleness=2,
            rollout_cpu=2,
            rollout_total=3,
            elastic={"min": 1, "max": 6, "auto": False},
            run={"prompts_per_step": options.prompts, "groups_per_firing": options.prompts // 4}
            | {"groups_per_micro_batch": options.prompts // 2},
            rollouts={"host": HEAD},
            failover={
                "silence_timeout_s": 10.0,
                "machine": {"max": 50, "window_s": 600},
                **{scope: {"max": 1_000, "window_s": 600} for scope in ("retry", "vertex", "region", "job")},
            },
        )
        builder = builder.node_num(1 + MACHINES).weights(transports=["tcp"], bind=NETWORK)
        handle = builder.spread("rollout").build().submit("soak", home_path=home)
        job = ProcessFaults(handle)
        job.reach_step(5)
        account.calm = pace(handle, CALM_S)
        faults = Faults(cluster, handle.status, home, home / "gyre.db", MACHINES, chance, say=say)
        watch = Watch(handle.status, account)
        watch.start()
        began, first = time.monotonic(), step_of(handle.status())
        try:
            for _ in occasions(handle, options, chance, until=began + options.seconds):
                faults.strike()
        finally:
            account.faulty_s = time.monotonic() - began
            account.faulty_steps = step_of(handle.status()) - first
            account.tallies = faults.tallies
            watch.stop()
        with contextlib.suppress(Exception):  # a job that has failed is in the account
            handle.stop("the soak is over")
        view = handle.wait(ENDS_S)
        account.end(handle, view)
        handle.close()
    return account


def occasions(
    handle: Any, options: argparse.Namespace, chance: random.Random, *, until: float
) -> Iterator[None]:
    """When a fault is to strike, while the job runs and `until` (monotonic) is not past."""
    at = step_of(handle.status())
    while time.monotonic() < until and not handle.status()["job"]["ended_at"]:
        if options.failing_steps is None:
            time.sleep(chance.expovariate(1.0 / options.pause))
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
    while True:
        ended, last = next_step(handle)
        if ended - began > seconds:
            return (last - first) / (ended - began)


def next_step(handle: Any) -> tuple[float, int]:
    """When the next step ended (monotonic), and its number."""
    before = step_of(handle.status())
    while (step := step_of(handle.status())) == before:
        time.sleep(0.05)
    return time.monotonic(), step


def step_of(view: dict[str, Any]) -> int:
    return int(max(view["job"]["step"], view["progress"].get("step") or 0))


def say(what: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {what}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    assert psutil.LINUX
    sys.exit(main())
