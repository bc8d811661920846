"""What verl 0.9 does when a server dies with samples in flight: over servers of its own, and over a fleet.

    make verl
    python bench/verl_alone.py [--repeat 3] [--json FILE] [--markdown FILE]

verl's own GRPO, with two FSDP2 ranks on CPUs, asks for 8 groups of 4 samples of 200 tokens a step: one batch ahead of
training, or none. After its first step one of two servers is killed (SIGKILL) while samples run on it. *verl alone* is
verl's own `main_ppo` in the mode `separate_async`: its server manager, router, client, agent loops, replay buffer and
sync of weights. Its servers need GPUs, so a class of `gyre_verl.testing.servers` stands for them, registered where
verl's own are: it draws random tokens at a steady pace, and weights go by a file in place of NCCL. *verl over a fleet*
is the same trainer with `gyre-verl`, and a fleet of two real instances on the same CPUs; one is killed.

*given up* are groups that verl gave up, each with another prompt in its place; *struck* are those of them that ran on
the dead server when it was killed, and *thrown away* is what all samples of these had generated, on either server. A
run that makes no step for a minute after the kill is stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gyre.api.home import home
from gyre.api.ray_session import connect, disconnect
from gyre.rollouts.protocol.endpoint import read_endpoint
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import ENDS_WITHIN_S, Shared
from tests.e2e.fleets import Fleet, fleet_on
from tests.e2e.verl_job import Followed, alone, make_place, over_fleet, stop

STEPS = 4
SERVERS = 2
RUNNING = 4
"""Samples that are to run on the server that is killed."""

WITHIN_S = 420.0
"""For a run: verl takes a minute or two of a small machine to start, and one that hangs is a result too."""

NO_STEP_S = 60.0
"""For a step after the kill, which takes seconds."""

FAILED = re.compile(r"Error in _run_prompt for uid=(\S+)")
DIED = re.compile(r"(ActorDiedError|ActorUnavailableError|RayActorError)")


@dataclass
class Run:
    over: str
    running: int = 0
    """Samples on the killed server."""
    struck: int = 0
    given_up: int = 0
    thrown_away: int = 0
    moved: int = 0
    kept: int = 0
    """Tokens with which samples went on elsewhere."""
    steps: int = 0
    ended: str = ""
    ended_after_s: float = 0.0
    where: list[str] = field(default_factory=list)
    """verl's own frames of the error that ended it."""


@contextlib.contextmanager
def watched(process: subprocess.Popen[str]) -> Iterator[None]:
    """A run that hangs is stopped, so that its output ends."""
    timer = threading.Timer(WITHIN_S, stop, [process])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        stop(process)


def told_by(folder: Path) -> list[dict[str, Any]]:
    """What the servers wrote, in the order of time."""
    lines = []
    for file in sorted(folder.glob("server-*.jsonl")):
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line of a server that was killed
                lines.append(json.loads(line))
    return sorted(lines, key=lambda one: one["at"])


def running_on(told: Sequence[dict[str, Any]], server: int) -> dict[str, dict[str, Any]]:
    """The last word on each sample that runs there, by its request."""
    last = {one["request"]: one for one in told if one["server"] == server and "request" in one}
    return {request: one for request, one in last.items() if "end" not in one}


def struck_server(folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """The server to kill, once enough samples are well under way there."""
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        told = told_by(folder)
        for server in range(SERVERS):
            found = running_on(told, server)
            if sum(one["tokens"] > 0 for one in found.values()) >= RUNNING:
                return server, found
        time.sleep(0.02)
    raise TimeoutError("no samples run after the first step")


def follow_on(followed: Followed, process: subprocess.Popen[str]) -> bool:
    """Read on to the end; returns whether the run was stopped because it made no step."""
    stopped = threading.Event()

    def give_up() -> None:
        stopped.set()
        stop(process)

    assert process.stdout is not None
    timer = threading.Timer(NO_STEP_S, give_up)
    timer.start()
    for line in process.stdout:
        followed.lines.append(line)
        if re.search(r"step:\d+ ", line):
            timer.cancel()
            timer = threading.Timer(NO_STEP_S, give_up)
            timer.start()
    timer.cancel()
    return stopped.is_set()


def verl_alone(place: Path, ahead: int) -> Run:
    run, told = Run(f"verl alone, {ahead} batch{'' if ahead == 1 else 'es'} ahead"), place / "told"
    told.mkdir()
    process = alone(place, str(place / "r"), STEPS, servers=SERVERS, told=told, ahead=ahead)
    followed = Followed(process)
    with watched(process):
        followed.until(r"step:1 ")
        victim, _ = struck_server(told)
        (pid,) = [one["pid"] for one in told_by(told) if one["server"] == victim and "pid" in one]
        os.kill(pid, signal.SIGKILL)
        struck_at = time.time()
        is_stopped = follow_on(followed, process)
        run.ended_after_s = time.time() - struck_at
        code = process.wait()
    lost = running_on([one for one in told_by(told) if one["at"] <= struck_at], victim)
    prompts = {one["prompt"] for one in lost.values()}
    samples: dict[str, int] = {}
    began: dict[str, float] = {}
    for one in told_by(told):
        if one.get("prompt") in prompts:
            began.setdefault(one["request"], one["at"])
            if began[one["request"]] <= struck_at:
                samples[one["request"]] = one["tokens"]
    run.running, run.struck, run.thrown_away = len(lost), len(prompts), sum(samples.values())
    run.given_up = len({match[1] for line in followed.lines if (match := FAILED.search(line))})
    run.steps = len(followed.steps())
    errors = [found[1] for line in followed.lines[-200:] if (found := DIED.search(line))]
    run.ended = "made all steps" if code == 0 else f"ends with {errors[-1] if errors else f'code {code}'}"
    if is_stopped:
        run.ended = "makes no step, and was stopped"
    frames = [
        re.sub(r"^.*site-packages/", "", line).strip() for line in followed.lines[-200:] if "/verl/" in line
    ]
    run.where = frames[-8:] if code and not is_stopped else []
    return run


def status_of(fleet: Fleet) -> dict[str, Any]:
    """The rollout manager's."""
    found = read_endpoint(home(fleet.shared.home).job_directory(fleet.handle.job_id))
    assert found is not None
    asked = urllib.request.Request(f"{found[0]}/v1/status", headers={"Authorization": f"Bearer {found[1]}"})
    with urllib.request.urlopen(asked, timeout=WITHIN_S) as reply:
        told: dict[str, Any] = json.loads(reply.read())
        return told


def struck_instance(fleet: Fleet) -> tuple[str, int]:
    """The instance to kill, once enough samples run there, and how many do."""
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        for one in status_of(fleet)["instances"]:
            if one["running"] >= RUNNING:
                return str(one["instance"]), int(one["running"])
        time.sleep(0.02)
    raise TimeoutError("no samples run after the first step")


def verl_over_a_fleet(place: Path, shared: Shared) -> Run:
    run = Run("verl over a fleet")
    with fleet_on(shared, place / "model", f"bench-{place.name[-6:]}", place) as fleet:
        faults = ProcessFaults(fleet.handle)
        process = over_fleet(place, str(place / "v"), STEPS, url=fleet.url, key=fleet.key)
        followed = Followed(process)
        with watched(process):
            followed.until(r"step:1 ")
            name, run.running = struck_instance(fleet)
            struck_at = time.time()
            (victim,) = faults.kill(name)
            assert process.stdout is not None
            followed.lines += process.stdout
            run.ended_after_s = time.time() - struck_at
            code = process.wait()
        faults.replaced(victim, timeout_s=ENDS_WITHIN_S)
        for event in fleet.handle.events():
            body = event["body"]
            left = body["details"] if body.get("what") == "InstanceLeft" else {}
            if event["at"] >= struck_at and left.get("instance") == name:
                run.moved, run.kept = int(left["moved"]), int(left["tokens"])
                break
        run.thrown_away = sum(status_of(fleet)["account"]["discarded"].values())
    run.given_up = len({match[1] for line in followed.lines if (match := FAILED.search(line))})
    run.steps = len(followed.steps())
    run.ended = "made all steps" if code == 0 else f"ends with code {code}"
    return run


def table(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    out = [
        (
            "",
            "samples on the dead server",
            "groups struck",
            "tokens thrown away",
            "groups given up in all",
            "samples (tokens) that went on elsewhere",
            f"steps of {STEPS}",
            "the run",
        )
    ]
    for run in runs:
        own = run.over.startswith("verl alone")
        out.append(
            (
                run.over,
                str(run.running),
                str(run.struck) if own else "0",
                str(run.thrown_away),
                str(run.given_up),
                f"{run.moved} ({run.kept})",
                str(run.steps),
                f"{run.ended}, {run.ended_after_s:.0f} s after the kill",
            )
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=("alone", "fleet"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    runs = []
    for turn in range(options.repeat):
        for ahead in (0, 1) if options.only != "fleet" else ():
            with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder:
                runs.append(verl_alone(make_place(Path(folder)), ahead))
        if options.only != "alone":
            with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder:
                place = make_place(Path(folder))
                address = connect("local", start_local=True, place=home(place))
                try:
                    runs.append(verl_over_a_fleet(place, Shared(address, place)))
                finally:
                    disconnect()
        print(f"round {turn + 1} of {options.repeat}: {runs[-1]}", file=sys.stderr)
    runs.sort(key=lambda one: one.over)
    lines = table(runs)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if options.json:
        data = {
            "command": f"python bench/verl_alone.py --repeat {options.repeat}",
            "machine": {
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "system": platform.platform(),
            },
            "runs": [vars(run) for run in runs],
        }
        options.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    if options.markdown:
        text = ["| " + " | ".join(line) + " |" for line in lines]
        text.insert(1, "|" + " --- |" * len(lines[0]))
        options.markdown.write_text("\n".join(text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
