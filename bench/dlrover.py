"""A job of DLRover's unified API under DLRover and under Gyre: how fast it is up, and what each kind of death costs.

    python bench/dlrover.py [--repeat 3] [--only rollout …] [--sides dlrover …] [--dry-run] [--json F] [--markdown F]

The job (`bench/dlrover_job`) is the same text for both but for `gyre_dlrover`, which is
`dlrover.python.unified` for DLRover: a trainer calls two rollouts and the two ranks of an actor's process group, step
after step. DLRover runs in the environment that `make dlrover` makes. Each run has a process of its own that starts a
Ray cluster and then submits; runs of the sides alternate. `gyre role` is Gyre with `failover_exec_strategy=2`, which
DLRover 0.6.1 does not have.

    up           from `submit` until all five workers have made their entrypoints
    one call     of a rollout by the trainer, which does nothing: the median of a hundred
    stall        seconds without a step after the signal: all gaps beyond a second, or, without one, until the next step
    steps again  those that were made more than once
    goes on      in how many runs the job ended well; a job without a step for `--patience-s` has not
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "bench" / "dlrover_job"
OWN = ROOT / "integrations" / "gyre-dlrover"
PYTHONS = {"dlrover": ROOT / ".venv-dlrover" / "bin" / "python", "gyre": Path(sys.executable)}

SIDES = ("dlrover", "gyre", "gyre role")
VICTIMS = {"rollout": "ROLLOUT-1", "actor": "ACTOR-1", "trainer": "TRAINER-0", "master": "master"}
MASTERS = {"dlrover": "ray::PrimeMaster", "gyre": "ray::MasterActor"}

GAP_S = 1.0
LOOK_S = 0.02
UP_WITHIN_S = 300.0


@dataclass
class Run:
    side: str
    victim: str
    load: float
    """Of the machine, before the run."""
    load_after: float = 0.0
    up_s: float | None = None
    call_ms: float | None = None
    stall_s: float | None = None
    again: int = 0
    begun_anew: int = 0
    """How often the trainer began after the signal."""
    goes_on: bool = False
    why: str = ""


class Notes:
    """What the job's processes have written down."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[list[str]]:
        text = self._path.read_text() if self._path.exists() else ""
        return [line.split() for line in text.splitlines()]

    def of(self, kind: str) -> list[list[str]]:
        return [[line[0], *line[2:]] for line in self.lines() if line[1] == kind]

    def steps(self) -> list[tuple[float, int]]:
        return [(float(at), int(step)) for at, step in self.of("step")]


def copied(folder: Path, side: str) -> None:
    """The job's package under its side's name."""
    package = folder / JOB.name
    shutil.copytree(JOB, package, ignore=shutil.ignore_patterns("__pycache__"))
    if side == "dlrover":
        for module in package.glob("*.py"):
            module.write_text(re.sub(r"\bgyre_dlrover\b", "dlrover.python.unified", module.read_text()))


@contextlib.contextmanager
def submitted(side: str, folder: Path, config: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    system = side.partition(" ")[0]
    copied(folder, system)
    options: dict[str, Any] = {"failover_exec_strategy": 2} if side == "gyre role" else {}
    told = {"ray": str(folder / "r"), "config": config, "submit": options}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTHONPATH"))}
    paths = [str(folder), *([str(ROOT), str(OWN)] if system == "gyre" else [])]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [str(PYTHONS[system]), "-m", f"{JOB.name}.submit", json.dumps(told)],
            cwd=folder,
            env=kept | {"PYTHONPATH": os.pathsep.join(paths), "GYRE_HOME": str(folder / "home")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            below: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and Ray's processes with it
                below = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
            for one in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(below, 10.0)


def find(victim: str, side: str, process: subprocess.Popen[bytes], notes: Notes) -> int:
    """The process that is to die."""
    if victim == "master":
        title = MASTERS[side.partition(" ")[0]]
        for one in psutil.Process(process.pid).children(recursive=True):
            try:
                if any(word.startswith(title) for word in one.cmdline()):
                    return one.pid
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue  # ended meanwhile
        raise SystemExit(f"no process of {side} is titled {title}")
    return next(int(pid) for _, name, pid in notes.of("begins")[::-1] if name == VICTIMS[victim])


def until(process: subprocess.Popen[bytes], is_so: Any, within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come")
        time.sleep(LOOK_S)


def run(side: str, victim: str, asked: argparse.Namespace) -> Run:
    made = Run(side, victim, os.getloadavg()[0])
    folder = Path(tempfile.mkdtemp(prefix="gb", dir="/tmp"))  # short, for Ray's sockets
    notes = Notes(folder / "notes")
    config = {"notes": str(folder / "notes"), "steps": asked.steps, "generate_s": asked.generate_s}
    try:
        with submitted(side, folder, config) as process:
            until(process, lambda: len(notes.steps()) > asked.at_step, UP_WITHIN_S, f"step {asked.at_step}")
            submits = float(notes.of("submits")[0][0])
            made.up_s = max(float(at) for at, *_ in notes.of("begins")[:5]) - submits
            made.call_ms = float(notes.of("call_s")[0][1]) * 1e3
            begun = len(notes.of("begins"))
            struck = time.time()
            os.kill(find(victim, side, process, notes), signal.SIGKILL)
            while process.poll() is None and not notes.of("returns"):
                last = max([struck, *(at for at, _ in notes.steps())])
                if time.time() - last > asked.patience_s:
                    made.why = f"no step for {asked.patience_s:g} s"
                    break
                time.sleep(LOOK_S)
        steps = notes.steps()
        made.begun_anew = sum(name == "TRAINER-0" for _, name, _ in notes.of("begins")[begun:])
        made.again = len(steps) - len({step for _, step in steps})
        returned = notes.of("returns")
        made.goes_on = (
            bool(returned) and returned[0][1] == "0" and len({step for _, step in steps}) == asked.steps
        )
        if made.goes_on:
            times = [struck, *(at for at, _ in steps if at > struck)]
            waits = [later - before for before, later in itertools.pairwise(times)]
            made.stall_s = sum(wait for wait in waits if wait > GAP_S) or waits[0]
    except TimeoutError as late:
        made.why = str(late)
    if not made.goes_on:
        output = (folder / "output").read_text(errors="replace").strip().splitlines()
        made.why = made.why or (output[-1][:200] if output else "it ended without a word")
    shutil.rmtree(folder, ignore_errors=True)
    made.load_after = os.getloadavg()[0]
    return made


# -- what comes out -----------------------------------------------------------------------------------


def shown(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def table(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    sides = [side for side in SIDES if any(one.side == side for one in runs)]
    out = [("what is measured", *sides)]
    by_side = {side: [one for one in runs if one.side == side] for side in sides}
    counts = (f" (n={len(ups)})" if ups else "" for ups in (_of(by_side[side], "up_s") for side in sides))
    ups = [shown(_of(by_side[side], "up_s")) for side in sides]
    out.append(("up, s", *(up + count for up, count in zip(ups, counts, strict=True))))
    out.append(("one call, ms", *(shown(_of(by_side[side], "call_ms")) for side in sides)))
    for victim in VICTIMS:
        of = {side: [one for one in by_side[side] if one.victim == victim] for side in sides}
        if any(of.values()):
            out.append((f"{victim} dies: stall, s", *(shown(_of(of[side], "stall_s")) for side in sides)))
            again = [shown_counts([one.again for one in of[side] if one.goes_on]) for side in sides]
            out.append((f"{victim} dies: steps again", *again))
            anew = [shown_counts([one.begun_anew for one in of[side]]) for side in sides]
            out.append((f"{victim} dies: trainer begins anew", *anew))
            went = [f"{sum(one.goes_on for one in of[side])} of {len(of[side])}" for side in sides]
            out.append((f"{victim} dies: goes on", *went))
    return out


def _of(runs: Sequence[Run], field: str) -> list[float]:
    return [value for one in runs if (value := getattr(one, field)) is not None]


def shown_counts(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in sorted(values)) or "–"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--at-step", type=int, default=10, help="the step at which somebody dies")
    parser.add_argument("--generate-s", type=float, default=0.1)
    parser.add_argument("--patience-s", type=float, default=120.0)
    parser.add_argument(
        "--most-load", type=float, default=5.0, help="of the machine; a run under more does not count"
    )
    parser.add_argument("--quiet-within-s", type=float, default=600.0, help="how long a run waits for that")
    parser.add_argument(
        "--go-on", action="store_true", help="add what is missing to the runs of the --json file"
    )
    parser.add_argument("--dry-run", action="store_true", help="one short run of Gyre, to see that it runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    if asked.dry_run:
        asked.repeat, asked.only, asked.sides, asked.steps, asked.at_step = (
            1,
            ["rollout"],
            ["gyre role"],
            6,
            2,
        )
    if "dlrover" in asked.sides and not PYTHONS["dlrover"].exists():
        print(
            "DLRover's environment is not there, so Gyre runs alone: `make dlrover` makes it.",
            file=sys.stderr,
        )
        asked.sides = [side for side in asked.sides if side != "dlrover"]
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that nothing is left running
    runs: list[Run] = []
    if asked.go_on:
        runs += [Run(**one) for one in json.loads(asked.json.read_text())["runs"]]
    for turn in range(asked.repeat):
        for victim in asked.only:
            for side in asked.sides:
                if sum((one.side, one.victim) == (side, victim) for one in counted(runs, asked)) > turn:
                    continue
                wait_for_quiet(asked)
                runs.append(run(side, victim, asked))
                print(json.dumps(asdict(runs[-1])), flush=True)
                write(asked, runs)
    write(asked, runs)
    for row in table(counted(runs, asked)):
        print("  ".join(f"{cell:34}" for cell in row))
    return 0


def counted(runs: Sequence[Run], asked: argparse.Namespace) -> list[Run]:
    """The runs during which the machine did little else. Those of a dry run count whatever it did."""
    return [one for one in runs if asked.dry_run or max(one.load, one.load_after) <= asked.most_load]


def wait_for_quiet(asked: argparse.Namespace) -> None:
    deadline = time.monotonic() + (0.0 if asked.dry_run else asked.quiet_within_s)
    while os.getloadavg()[0] > min(3.0, asked.most_load) and time.monotonic() < deadline:
        time.sleep(1.0)


def write(asked: argparse.Namespace, runs: Sequence[Run]) -> None:
    """After every run, for a long bench may be cut off."""
    command = " ".join(["python", "bench/dlrover.py", *sys.argv[1:]])
    machine = {"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
    if asked.json:
        told = {"command": command, "machine": machine, "runs": [asdict(one) for one in runs]}
        asked.json.write_text(json.dumps(told, indent=1) + "\n")
    if asked.markdown:
        quiet = counted(runs, asked)
        loads = [load for one in quiet for load in (one.load, one.load_after)]
        rows = table(quiet)
        lines = [
            f"`{command}` on {machine['cores']} cores, {machine['system']}, Python {machine['python']}.",
            f"The load before and after a run was {shown(loads)}; {len(runs) - len(quiet)} runs under more than "
            f"{asked.most_load:g} are left out.",
            "Median (least to most), of the runs in which the job went on.",
            "",
            *("| " + " | ".join(row) + " |" for row in [rows[0], ("---",) * len(rows[0]), *rows[1:]]),
        ]
        asked.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
