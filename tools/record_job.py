"""Make `tests/ui/recorded.tar.gz`: a small home of Gyre in which jobs have ended, for the tests of the page.

    python tools/record_job.py tests/ui/recorded.tar.gz

The first job is `gyre demo --chaos`, with few steps: each kind of process is killed, so every view of the page has
something to show. The others are the job of `gyre init`, each ended in another way; a job's name says in which. What
the archive holds is what a user's GYRE_HOME holds: the database, the samples, the logs and the metrics of the jobs;
checkpoints and weights are left out.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

STEPS = 24
"""Enough for each entry of the demo's plan of kills to have steps of its own."""
LONGEST_S = 900.0
LOG_BYTES = 32 << 10
"""Of the end of each log."""
LEFT_OUT = ("checkpoints", "weights", "weight_dirs", "ray", "tls", "rollouts.json")

GYRE = [sys.executable, "-m", "gyre.api.cli"]
ENDS_AT = 12
"""The step after which a job is ended from outside: an evaluation has been, and the next has not."""
BUG = '''
CALLS = 0


def has_a_bug(prompt, completion, meta):
    """The score, until a row seems to lack its answer."""
    global CALLS
    CALLS += 1
    return score(prompt, completion, meta if CALLS < 2_000 else {})
'''
"""The job's reward function after some 8 steps of 256 samples."""


def main() -> int:
    target = Path(sys.argv[1])
    home = Path(tempfile.gettempdir()) / "gyre-recorded"  # its path is in the journal: it should tell nothing
    shutil.rmtree(home, ignore_errors=True)
    os.environ["GYRE_HOME"] = str(home)
    try:
        command = [*GYRE, "demo", "--chaos", "--steps", str(STEPS)]
        done = subprocess.run(command, timeout=LONGEST_S, check=False)
        if done.returncode:
            return done.returncode
        folder = home.with_name("gyre-recorded-job")
        subprocess.run([*GYRE, "init", "--force", str(folder)], check=True)
        with (folder / "reward.py").open("a") as reward:
            reward.write(BUG)
        for name, end in ENDINGS.items():
            _record(name, end, home, folder)
        _pack(home, target)
    finally:
        _kill(_processes(home))
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(home.with_name("gyre-recorded-job"), ignore_errors=True)
    print(f"{target}: {target.stat().st_size:,} bytes")
    return 0


def _record(
    name: str, end: Callable[[subprocess.Popen[bytes], Path], None], home: Path, folder: Path
) -> None:
    settings = ["run.steps=20" if name == "finished" else "run.steps=400"]
    if name == "failed":
        settings.append("config.reward.function=reward.py:has_a_bug")
    command = [*GYRE, "run", "job.yaml", "--name", name]
    for setting in settings:
        command += ["--set", setting]
    run = subprocess.Popen(command, cwd=folder)
    end(run, home)
    run.wait(LONGEST_S)
    _kill(_processes(home))  # of a job that was killed in part


def _by_itself(run: subprocess.Popen[bytes], home: Path) -> None:
    run.wait(LONGEST_S)


def _by_ctrl_c(run: subprocess.Popen[bytes], home: Path) -> None:
    _wait_for_steps(run, home, "stopped")
    run.send_signal(signal.SIGINT)


def _with_all_its_processes(run: subprocess.Popen[bytes], home: Path) -> None:
    _wait_for_steps(run, home, "killed")
    _kill(_processes(home))


def _with_its_cluster(run: subprocess.Popen[bytes], home: Path) -> None:
    _wait_for_steps(run, home, "cluster")
    _kill([one for one in _processes(home) if one.pid != run.pid])


ENDINGS = {
    "finished": _by_itself,
    "failed": _by_itself,
    "stopped": _by_ctrl_c,
    "killed": _with_all_its_processes,
    "cluster": _with_its_cluster,
}
"""A job's name, and how it ends: `failed` by its reward function, `cluster` by all but `gyre run` being killed."""


def _wait_for_steps(run: subprocess.Popen[bytes], home: Path, name: str) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not any(
        file.read_bytes().count(b"\n") >= ENDS_AT for file in home.glob(f"jobs/{name}-*/metrics.jsonl")
    ):
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{name} made no {ENDS_AT} steps")
        time.sleep(0.1)


def _processes(home: Path) -> list[psutil.Process]:
    """All that were started with this home, but this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("GYRE_HOME") == str(home):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or is somebody else's
            continue
    return found


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:  # its parent's death was its own
            continue
    psutil.wait_procs(processes, timeout=30)


def _pack(home: Path, target: Path) -> None:
    with sqlite3.connect(home / "gyre.db") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.execute("VACUUM")
    for log in home.glob("jobs/*/logs/*.log"):
        log.write_bytes(log.read_bytes()[-LOG_BYTES:])
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:gz") as archive:
        archive.add(home / "gyre.db", "gyre.db")
        for path in sorted(home.glob("jobs/**/*")):
            below = path.relative_to(home)
            if path.is_file() and not set(below.parts) & set(LEFT_OUT):
                archive.add(path, str(below), filter=_plain)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the name and number of who recorded it."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    sys.exit(main())
