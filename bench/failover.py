"""How fast a job is back after each kind of death, on a real Ray cluster of this machine.

    python bench/failover.py [--repeat 5] [--case NAME] [--json FILE] [--markdown FILE]

Each row kills (or stops) one thing in the middle of a small GRPO job. *detected* is from the signal to the event in
the journal; *running* to the replacement's `setup()` having returned (for the master: to its first answer);
*training* to the first optimizer step that ends after the replacement runs, so it contains up to one step.
*steps redone* is what the actor trained again from its checkpoint. Every job must end with the weights of the
undisturbed one, else the row says so.

The baseline of the same run is what starting the whole job again costs on the warm cluster: submit to the first
optimizer step, which is what a job pays per failure if its control plane restarts everything; the steps done until
then are lost besides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gyre.api.handle import JobHandle
from gyre.api.home import home
from gyre.api.ray_session import connect, disconnect
from gyre.testing.processes import ProcessFaults
from tests.kill.jobs import tiny_job

STEPS = 30
"""Enough for a stopped vertex to be found and replaced while the others go on."""

AT_STEP = 7
"""Past the checkpoint of step 5, so that two steps have to be redone."""

CASES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("rollout vertex", "kill", ("rollout-0",)),
    ("reward vertex", "kill", ("reward-0",)),
    ("actor rank (gang of 2)", "kill", ("actor-1",)),
    ("trainer controller", "kill", ("trainer-0",)),
    ("master", "kill", ("master",)),
    ("trainer and master", "kill", ("trainer-0", "master")),
    ("rollout vertex, SIGSTOP", "stop", ("rollout-0",)),
    ("actor rank, SIGSTOP", "stop", ("actor-0",)),
)


@dataclass
class Row:
    what: str
    detected_s: list[float] = field(default_factory=list)
    running_s: list[float] = field(default_factory=list)
    training_s: list[float] = field(default_factory=list)
    redone: list[int] = field(default_factory=list)
    same_weights: bool = True


def submit(place: Path) -> JobHandle:
    return tiny_job(steps=STEPS).build().submit(f"bench-{uuid.uuid4().hex[:8]}", home_path=place)


def undisturbed(place: Path) -> tuple[str, float]:
    """The digest to compare with, and submit to first step."""
    started = time.time()
    handle = submit(place)
    view = handle.wait(300)
    first = next(e for e in handle.events() if e["kind"] == "StepCompleted")
    handle.close()
    return view["job"]["result"]["digest"], first["at"] - started


def attack(place: Path, how: str, names: Sequence[str], row: Row, digest: str) -> None:
    handle = submit(place)
    faults = ProcessFaults(handle, look_s=0.02)
    faults.reach_step(AT_STEP)
    struck_at = time.time()
    victims = faults.kill(*names) if how == "kill" else [faults.stop(name) for name in names]
    running = 0.0
    for victim in victims:
        faults.replaced(victim)
        running = max(running, time.time() - struck_at)
    view = handle.wait(300)
    events = [event for event in handle.events() if event["at"] > struck_at]
    lost = [e["at"] for e in events if e["kind"] in ("VertexLost", "MasterStarted")]
    row.detected_s.append(max(lost) - struck_at)
    started = [e["at"] for e in events if e["kind"] in ("VertexStarted", "MasterStarted")]
    back = max(started)
    row.running_s.append(back - struck_at if "master" not in names else running)
    steps = [e for e in events if e["kind"] == "StepCompleted"]
    after = next((e["at"] for e in steps if e["at"] >= back), None)
    if after is not None:
        row.training_s.append(after - struck_at)
    if any(name.startswith("actor") for name in names) and steps:
        row.redone.append(max(0, steps[0]["body"]["step"] - 1 - 5))
    row.same_weights &= view["job"]["result"]["digest"] == digest
    handle.close()


def show(values: Sequence[float]) -> str:
    if not values:
        return "–"
    middle = statistics.median(values)
    return f"{middle:.2f} ({min(values):.2f}–{max(values):.2f})"


def table(rows: Sequence[Row], restart: Sequence[float]) -> list[tuple[str, ...]]:
    out = [("what dies", "detected s", "running s", "training s", "steps redone", "same weights")]
    for row in rows:
        redone = str(max(row.redone)) if row.redone else "0"
        out.append(
            (
                row.what,
                show(row.detected_s),
                show(row.running_s),
                show(row.training_s),
                redone,
                "yes" if row.same_weights else "NO",
            )
        )
    out.append(("baseline: the whole job started again", "", "", show(restart), "all", ""))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--case", choices=[what for what, _, _ in CASES], help="this one alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    cases = [case for case in CASES if options.case in (None, case[0])]
    rows = [Row(what) for what, _, _ in cases]
    restart: list[float] = []
    with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder:
        place = Path(folder)
        connect(None, start_local=True, place=home(place))
        undisturbed(place)  # the first job also warms the page cache
        for turn in range(options.repeat):
            digest, first_step_s = undisturbed(place)
            restart.append(first_step_s)
            for row, (_, how, names) in zip(rows, cases, strict=True):
                attack(place, how, names, row, digest)
            print(f"round {turn + 1} of {options.repeat}", file=sys.stderr)
        disconnect()
    lines = table(rows, restart)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
    if options.json:
        data: dict[str, Any] = {
            "command": f"python bench/failover.py --repeat {options.repeat}",
            "machine": machine,
            "median (min–max) over repeats, in seconds": [
                dict(zip(lines[0], line, strict=True)) for line in lines[1:]
            ],
            "raw": [vars(row) for row in rows],
            "restart_s": restart,
        }
        options.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    if options.markdown:
        text = ["| " + " | ".join(line) + " |" for line in lines]
        text.insert(1, "|" + " --- |" * len(lines[0]))
        options.markdown.write_text("\n".join(text) + "\n")
    return 0 if all(row.same_weights for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
