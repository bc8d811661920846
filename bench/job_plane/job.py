"""The product's own job: `gyre run`, watched from outside, and what it did by its journal."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil
from job_plane.account import account
from job_plane.case import BENCH, Case, Row
from job_plane.kills import Attack
from job_plane.watch import Watch

ENDS_S = 20.0
"""For a graceful end; then a second Ctrl-C ends the job at once. A checkpoint of 4B would take longer."""

ATTACKED_ENDS_S = 5.0
"""The same for a job that was attacked, whose end is not measured: minutes on GPUs are dear."""

GONE_S = 20.0
"""From there until no process of the job is left."""

TOLD_EVERY_S = 2.0
"""Between two rows of a job that runs: reading all of it takes a tenth of a second, and more the longer it runs."""

PACKED_BYTES = 15 << 20


def job(
    case: Case,
    out: Path,
    label: str,
    changes: list[str],
    *,
    within_s: float,
    profile_at: int = 0,
    attack: Attack | None = None,
    tell: Callable[[Row], None] = lambda row: None,
) -> Row:
    """Run the job for at most `within_s`, or until the `attack` is over. What it left behind is in `out`, as LABEL_…
    `tell` gets the row of what happened so far, every time when something did."""
    folder = case.model()
    home = case.scratch / f"home_{os.getpid()}"  # short: there are sockets below it
    spec = case.scratch / f"{label}.yaml"
    spec.write_text(json.dumps(case.spec(folder)))  # JSON is YAML
    command = [sys.executable, "-m", "gyre.api.cli", "run", str(spec)]
    for change in changes:
        command += ["--set", change]
    began, stopped = time.time(), 0.0
    with (out / f"{label}.log").open("wb") as log, Watch(home, out, label, began, profile_at) as watch:
        process = subprocess.Popen(command, env=_environment(home), stdout=log, stderr=subprocess.STDOUT)
        if attack is not None:
            attack.start(home, watch, began)
        known, told_at = -1, 0.0
        try:
            while process.poll() is None and time.time() - began < within_s and not (attack and attack.over):
                time.sleep(0.2)
                if time.time() - told_at >= TOLD_EVERY_S and (there := len(watch.events())) > known:
                    known, told_at = there, time.time()
                    try:
                        tell(account(home, out, label, began=began, ended=told_at, stopped=0.0))
                    except (
                        Exception
                    ):  # the job is worth more than a row on the way; the last row raises the same
                        traceback.print_exc()
        finally:
            if attack is not None:
                attack.stop()
            if process.poll() is None:
                stopped = time.time()
            _end(process, ENDS_S if attack is None else ATTACKED_ENDS_S)
    ended = time.time()
    left = _end_what_is_left(home)
    for file in home.glob("jobs/*/logs/*"):
        (out / f"{label}_{file.name}").write_bytes(file.read_bytes()[-200_000:])
    row: Row = {"returncode": process.returncode, "wall_s": round(ended - began, 1), "settings": changes}
    if left:
        row["left_behind"] = left
    if stopped:
        row["interrupted_s"] = round(stopped - began, 1)
    row |= account(home, out, label, began=began, ended=ended, stopped=stopped)
    _keep_journal(home, out / f"{label}_journal.db")
    shutil.rmtree(home, ignore_errors=True)  # its checkpoints have 16 bytes a parameter
    return row


def _environment(home: Path) -> dict[str, str]:
    path = os.pathsep.join([str(BENCH.parent), str(BENCH), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"GYRE_HOME": str(home), "PYTHONPATH": path.rstrip(os.pathsep)}


def _end(process: subprocess.Popen[bytes], gracefully_s: float) -> None:
    """As a user ends a job who is in a hurry."""
    for within_s in (gracefully_s, ENDS_S):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(within_s)
    if process.poll() is None:
        process.kill()
        process.wait()


def _end_what_is_left(home: Path) -> list[str]:
    """Processes of this job that outlive it, which nobody should: the next case wants their GPUs."""
    deadline = time.monotonic() + GONE_S
    while (found := _of_home(home)) and time.monotonic() < deadline:
        time.sleep(0.5)
    told = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            told.append(" ".join(process.cmdline())[:200])
            process.kill()
    return told


def _of_home(home: Path) -> list[psutil.Process]:
    """The processes that were started with this home, of which each run has its own."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("GYRE_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _keep_journal(home: Path, kept: Path) -> None:
    """The job's database without its samples, which are most of it; the numbers of its steps stay."""
    from sqlalchemy import LargeBinary

    from gyre.store import tables

    if not (home / "gyre.db").exists():
        return
    kept.unlink(missing_ok=True)
    with (
        contextlib.closing(sqlite3.connect(home / "gyre.db")) as whole,
        contextlib.closing(sqlite3.connect(kept, isolation_level=None)) as copy,
    ):
        whole.backup(copy)
        for table in set(tables.metadata.sorted_tables) - {tables.series}:
            for column in table.columns:
                if isinstance(column.type, LargeBinary):
                    copy.execute(
                        f"UPDATE {table.name} SET {column.name} = x'' WHERE {column.name} IS NOT NULL"
                    )
        copy.execute("VACUUM")


def pack(details: Path, label: str, file: Path, most_bytes: int = PACKED_BYTES) -> list[str]:
    """Write what a part left in `details` into a zip file, the smallest first, and return what had no room."""
    left_out = []
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        files = [one for one in details.glob(f"{label}*") if one.is_file()]
        for one in sorted(files, key=lambda one: one.stat().st_size):
            if file.stat().st_size + one.stat().st_size // COMPRESSED_BY > most_bytes:
                left_out.append(one.name)
                continue
            packed.write(one, one.name)
    return left_out


COMPRESSED_BY = 4
"""By at least so much are logs and journals compressed: events are JSON with the same keys."""
