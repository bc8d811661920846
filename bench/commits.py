"""What a command costs at this commit, beside an older one: wall time, CPU and steps, in turns on one machine.

    python bench/commits.py [OLDER] [--newer COMMIT] [--command "..."] [--rounds N] [--python PATH] [--json FILE]
                            [--compile both|newer|neither]

Both commits are checked out into temporary folders, and their Gyre is compiled, as an installed one is, unless
`--compile` says otherwise: where Python may not write bytecode, each process then compiles it again. `COMMAND`,
where `{python}` is the interpreter and `{gyre}` the command line of the checkout, is what `make demo` runs unless it is
given; OLDER is the commit before this one. The two run in turns, older, newer, newer, older, ..., so that whatever
else the machine does hits both, each with an empty GYRE_HOME and its own checkout first on PYTHONPATH. They share this
interpreter, or have `--python`'s for the older one; what it has must meet what the commit's pyproject.toml wants.

`CPU` is user and system time of all that the command started, as the kernel counts it for a control group; without one
it is that of the processes that ended, which all come back to this one as their subreaper. It is what to compare on a
machine that does other work too. The rest is of the journal: `started` is from the start of the command to the job's
first event, `first weights` from there to the first published ones, with the warm start, `first step` from those to
the end of step 1, `a step` the mean of the others. Whose CPU it was is sampled, so a process's last moments are
lacking. Each cell is the median of the rounds, and a ratio has its least and greatest of the rounds' pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import re
import resource
import shlex
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent.parent

COMMAND = "{gyre} demo --json"

WITHIN_S = 1800.0
"""For one run: the deadline of the demo itself."""

LEAVE_S = 30.0
"""For what a command leaves behind, such as Ray's own processes, to end by itself before it is ended."""

LOOK_S = 0.25
"""Between two looks at the processes: few of them live for less, and a look takes some milliseconds."""

MEASURES = {
    "wall_s": "wall, s",
    "cpu_s": "CPU, s",
    "started_s": "started, s",
    "published_s": "first weights, s",
    "first_step_s": "first step, s",
    "a_step_s": "a step, s",
    "steps": "steps",
}

_PR_SET_CHILD_SUBREAPER = 36
"""Of linux/prctl.h."""


@dataclass
class Side:
    """A commit: its checkout, the interpreter that runs it, and what each round measured."""

    label: str
    commit: str
    subject: str
    folder: Path
    python: str
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def environment(self, home: Path) -> dict[str, str]:
        """Of a round: nothing but the checkout and the home differs between the two sides."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(("GYRE_", "RAY_"))}
        return others | {"PYTHONPATH": str(self.folder), "GYRE_HOME": str(home)}

    def arguments(self, command: str) -> list[str]:
        gyre = f"{shlex.quote(self.python)} -m gyre.api.cli"
        return shlex.split(command.replace("{gyre}", gyre).replace("{python}", shlex.quote(self.python)))


def git(*arguments: str) -> str:
    return subprocess.run(
        ("git", "-C", str(HERE), *arguments), check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


@contextlib.contextmanager
def checkout(label: str, commit: str, python: str, below: Path, *, compiled: bool) -> Iterator[Side]:
    """The commit in a folder of its own, which goes with the context."""
    folder = below / label
    name = git("rev-parse", "--short", "--verify", f"{commit}^{{commit}}")
    git("worktree", "add", "--detach", "--quiet", str(folder), name)
    try:
        side = Side(label, name, git("log", "-1", "--format=%s", name), folder, python)
        check(side)
        if compiled:
            subprocess.run((python, "-m", "compileall", "-q", str(folder / "gyre")), check=True, timeout=300)
        yield side
    finally:
        git("worktree", "remove", "--force", str(folder))


def check(side: Side) -> None:
    """Raises SystemExit if the interpreter imports another Gyre than the checkout's, or lacks what the commit wants."""
    if missing := missing_requirements(side):
        wants = ", ".join(missing)
        raise SystemExit(f"{side.commit} wants {wants}: give --python with an environment that has it.")
    found = subprocess.run(
        (side.python, "-c", "import gyre; print(gyre.__file__)"),
        env=side.environment(side.folder),
        cwd=side.folder.parent,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.strip()
    print(f"{side.label}: {side.commit} {side.subject}\n  {found}, by {side.python}", file=sys.stderr)
    if not Path(found).is_relative_to(side.folder):
        raise SystemExit(f"{side.python} imports {found}, which is not of the checkout {side.folder}.")


_LOOK_UP = """
import importlib.metadata as m, json, sys
found = {}
for name in json.load(sys.stdin):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


def missing_requirements(side: Side) -> list[str]:
    """What the commit's own dependencies, and torch, ask for and the interpreter's environment does not have."""
    from packaging.requirements import Requirement

    project = tomllib.loads((side.folder / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project.get("optional-dependencies", {}).get("torch", [])]
    wanted = [Requirement(text) for text in texts]
    found = json.loads(
        subprocess.run(
            (side.python, "-c", _LOOK_UP),
            input=json.dumps([one.name for one in wanted]),
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    )
    return [
        str(one)
        for one in wanted
        if (one.marker is None or one.marker.evaluate())
        and (one.name not in found or not one.specifier.contains(found[one.name], prereleases=True))
    ]


class Account:
    """Counts the CPU of what it starts, and ends what is left of that.

    Args:
        folder: of control groups where a new one can be made, or None.
    """

    def __init__(self, folder: Path | None) -> None:
        self._group = folder
        self._before = 0.0
        if folder is not None:
            self._group = folder / f"gyre-commits-{os.getpid()}"
            self._group.mkdir(exist_ok=True)

    @staticmethod
    def place() -> tuple[Path | None, str]:
        """Where a control group that counts CPU time can be made, and how the time is counted, in words."""
        first = Path("/sys/fs/cgroup/cpuacct")
        if os.access(first / "cpuacct.usage", os.R_OK) and os.access(first, os.W_OK):
            return first, "by a control group (cpuacct)"
        own = re.search(r"^0::(/.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        second = Path("/sys/fs/cgroup") / (own[1].lstrip("/") if own else "-")
        if os.access(second / "cpu.stat", os.R_OK) and os.access(second, os.W_OK):
            return second, "by a control group (version 2)"
        return None, "by what the subreaper waited for"

    def entering(self, arguments: Sequence[str]) -> list[str]:
        """The command line, begun inside the group."""
        if self._group is None:
            return list(arguments)
        enter = f'echo $$ > {shlex.quote(str(self._group / "cgroup.procs"))} && exec "$@"'
        return ["/bin/sh", "-c", enter, "sh", *arguments]

    def start(self) -> None:
        self._before = self._count()

    def seconds(self) -> float:
        """User and system time since `start`."""
        return self._count() - self._before

    def _count(self) -> float:
        if self._group is None:
            spent = resource.getrusage(resource.RUSAGE_CHILDREN)
            return spent.ru_utime + spent.ru_stime
        if (usage := self._group / "cpuacct.usage").exists():
            return int(usage.read_text()) / 1e9
        return int((self._group / "cpu.stat").read_text().split()[1]) / 1e6

    def close(self) -> None:
        if self._group is not None:
            self._group.rmdir()


class Sampled:
    """Whose CPU it was: the last that was seen of each process, by its name."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}

    def look(self) -> list[psutil.Process]:
        """Returns all processes that this one, their subreaper, has below it."""
        below: list[psutil.Process] = psutil.Process().children(recursive=True)
        for one in below:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                cpu, words = one.cpu_times(), one.cmdline()
                name = (
                    _name_of(words) if words else ""
                )  # one that has ended and is not yet waited for has none
                key = one.pid, one.create_time()
                self._seen[key] = name or self._seen.get(key, (one.name(), 0.0))[0], cpu.user + cpu.system
        return below

    def by_name(self, roles: dict[int, str]) -> dict[str, float]:
        """CPU seconds by names, the largest first; `roles` has the roles of processes that are a job's vertices."""
        total: dict[str, float] = defaultdict(float)
        for (pid, _), (name, seconds) in self._seen.items():
            total[roles.get(pid, name)] += seconds
        return {name: round(seconds, 2) for name, seconds in sorted(total.items(), key=lambda one: -one[1])}


def _name_of(words: list[str]) -> str:
    """Of a command line: the module of `python -m`, what a process calls itself, else its program."""
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return " ".join(Path(word).name for word in words[0].split(" ")[:2])


def become_subreaper() -> None:
    """What loses its parent has this process for one from now on, so that it is found, waited for and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reaped(child: subprocess.Popen[str]) -> None:
    """Wait for whatever has ended, which for a subreaper are not its own children alone."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # nobody is left
            return
        if pid == 0:
            return
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)


def run(side: Side, command: str, account: Account, home: Path) -> dict[str, Any]:
    """One run of the command, to its end and that of all it started. Raises SystemExit if it fails."""
    sampled = Sampled()
    account.start()
    began, began_at = time.monotonic(), time.time()
    log = home.with_suffix(".log")
    with log.open("w") as out:
        child = subprocess.Popen(
            account.entering(side.arguments(command)),
            cwd=home.parent,
            env=side.environment(home),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            while child.returncode is None and time.monotonic() < began + WITHIN_S:
                time.sleep(LOOK_S)
                sampled.look()
                reaped(child)
            wall_s = time.monotonic() - began
        finally:
            ended = end_all(child, sampled)
    if child.returncode != 0:
        raise SystemExit(f"{side.commit}: {command} failed ({child.returncode}):\n{log.read_text()[-4000:]}")
    rows = events(home)
    roles = {
        body["pid"]: body["vertex"].rpartition("-")[0] for kind, _, body in rows if kind == "VertexStarted"
    }
    row = {"wall_s": wall_s, "cpu_s": account.seconds(), **times(rows, began_at)}
    return row | {"ended": ended, "by_name": sampled.by_name(roles)}


def end_all(child: subprocess.Popen[str], sampled: Sampled) -> list[str]:
    """Returns who had to be ended: what a command starts beside itself has some time to end by itself. Raises
    SystemExit where somebody stays though killed."""
    left_at, ended = time.monotonic() + LEAVE_S, []
    while below := sampled.look():
        if time.monotonic() > left_at or child.returncode is None:
            for one in below:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    ended.append(one.name())
                    one.send_signal(signal.SIGKILL)
        if time.monotonic() > left_at + LEAVE_S:
            raise SystemExit(f"still there after SIGKILL: {', '.join(map(str, below))}")
        time.sleep(LOOK_S)
        reaped(child)
    return ended


def events(home: Path) -> list[tuple[str, float, dict[str, Any]]]:
    """Kind, time and body of what the journal says of the command's last job; none where it made no job."""
    database = home / "gyre.db"
    if not database.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as store:
        rows = store.execute(
            "SELECT kind, at, body FROM gyre_events WHERE job_id ="
            " (SELECT job_id FROM gyre_jobs ORDER BY created_at DESC LIMIT 1) ORDER BY seq"
        ).fetchall()
    return [(kind, at, json.loads(body)) for kind, at, body in rows]


def times(rows: Sequence[tuple[str, float, dict[str, Any]]], began_at: float) -> dict[str, float]:
    """The times of a job that began at `began_at`, by the clock of its journal's events."""
    first = {kind: at for kind, at, _ in reversed(rows)}
    steps = [at for kind, at, _ in rows if kind == "StepCompleted"]
    found: dict[str, float] = {"steps": len(steps)}
    if rows and "WeightsPublished" in first:
        found["started_s"] = rows[0][1] - began_at
        found["published_s"] = first["WeightsPublished"] - rows[0][1]
    if len(steps) > 1:
        found["first_step_s"] = steps[0] - first["WeightsPublished"]
        found["a_step_s"] = (steps[-1] - steps[0]) / (len(steps) - 1)
    return found


def middle(side: Side, measure: str) -> float | None:
    values = [row[measure] for row in side.rounds if measure in row]
    return statistics.median(values) if values else None


def compared(older: Side, newer: Side) -> list[dict[str, Any]]:
    """A row for each measure that both have: medians, and newer to older, with the spread over pairs of rounds."""
    rows = []
    for measure, title in MEASURES.items():
        before, after = middle(older, measure), middle(newer, measure)
        if before is None or after is None:
            continue
        pairs = [
            b[measure] / a[measure] for a, b in zip(older.rounds, newer.rounds, strict=True) if a[measure]
        ]
        row = {"": title, "older": before, "newer": after, "ratio": after / before if before else None}
        rows.append(row | {"least": min(pairs, default=None), "most": max(pairs, default=None)})
    return rows


def by_name(older: Side, newer: Side) -> list[tuple[str, float, float]]:
    """CPU seconds by the names of processes, means over the rounds; only those with a second."""
    sums: list[dict[str, float]] = [defaultdict(float), defaultdict(float)]
    for total, side in zip(sums, (older, newer), strict=True):
        for row in side.rounds:
            for name, seconds in row["by_name"].items():
                total[name] += seconds / len(side.rounds)
    rows = [(name, sums[0][name], sums[1][name]) for name in {**sums[0], **sums[1]}]
    return sorted((row for row in rows if max(row[1:]) >= 1), key=lambda row: -max(row[1:]))


def show(older: Side, newer: Side, counted: str) -> None:
    print(
        f"| {counted} | {older.commit} | {newer.commit} | ratio | least, most |\n| --- | --- | --- | --- | --- |"
    )
    for row in compared(older, newer):
        spread = (
            "– | –" if row["ratio"] is None else f"{row['ratio']:.2f} | {row['least']:.2f}, {row['most']:.2f}"
        )
        print(f"| {row['']} | {row['older']:.2f} | {row['newer']:.2f} | {spread} |")
    print(f"\n| CPU, s, of | {older.commit} | {newer.commit} |\n| --- | --- | --- |")
    for name, before, after in by_name(older, newer):
        print(f"| {name} | {before:.1f} | {after:.1f} |")
    for side in (older, newer):
        if left := sorted({name for row in side.rounds for name in row["ended"]}):
            print(f"\n{side.commit} left running: {', '.join(left)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("older", nargs="?", default="HEAD^")
    parser.add_argument("--newer", default="HEAD")
    parser.add_argument("--command", default=COMMAND)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="for the older commit")
    parser.add_argument("--compile", choices=("both", "newer", "neither"), default="both")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended then, too
    become_subreaper()
    place, counted = Account.place()
    account = Account(place)
    try:
        # Ray's sockets want a short path, and so must the folder be.
        with (
            tempfile.TemporaryDirectory(prefix="gb", dir="/tmp", ignore_cleanup_errors=True) as folder,
            checkout(
                "older", options.older, options.python, Path(folder), compiled=options.compile == "both"
            ) as older,
            checkout(
                "newer", options.newer, sys.executable, Path(folder), compiled=options.compile != "neither"
            ) as newer,
        ):
            for turn in range(options.rounds):
                for side in (older, newer) if turn % 2 == 0 else (newer, older):
                    home = Path(folder) / f"{side.label[0]}{turn}"
                    side.rounds.append(run(side, options.command, account, home))
                    told = {name: side.rounds[-1].get(name) for name in MEASURES}
                    print(f"round {turn + 1}, {side.label}: {told}", file=sys.stderr)
    finally:
        account.close()
    show(older, newer, f"CPU {counted}")
    if options.json:
        write(options.json, older, newer, options, counted)
    return 0


def write(path: Path, older: Side, newer: Side, options: argparse.Namespace, counted: str) -> None:
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
    data = {
        "command": options.command,
        "compiled": options.compile,
        "machine": machine,
        "counted": counted,
        "compared": compared(older, newer),
        "sides": [
            {"commit": side.commit, "subject": side.subject, "rounds": side.rounds} for side in (older, newer)
        ],
    }
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
