"""The product's own job: `gyre run`, watched from outside, and what it did by its journal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from job_plane.account import account
from job_plane.case import BENCH, Case, Row
from job_plane.kills import Kills
from job_plane.watch import Watch

ENDS_WITHIN_S = 60.0


def job(
    case: Case,
    out: Path,
    label: str,
    changes: list[str],
    *,
    within_s: float,
    profile_at: int = 0,
    kills: Kills | None = None,
) -> Row:
    """Run the job for at most `within_s`, or until `kills` are over. What it left behind is in `out`, as LABEL_…"""
    folder = case.model()
    home = case.scratch / f"home_{os.getpid()}"  # short: there are sockets below it
    spec = case.scratch / f"{label}.yaml"
    spec.write_text(json.dumps(case.spec(folder)))  # JSON is YAML
    path = os.pathsep.join([str(BENCH.parent), str(BENCH), os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    command = [sys.executable, "-m", "gyre.api.cli", "run", str(spec)]
    for change in changes:
        command += ["--set", change]
    began = time.time()
    with (out / f"{label}.log").open("wb") as log, Watch(home, out, label, began, profile_at) as watch:
        process = subprocess.Popen(
            command,
            env=os.environ | {"GYRE_HOME": str(home), "PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        if kills is not None:
            kills.start(home, watch, began)
        stopped = 0.0
        try:
            while process.poll() is None and time.time() - began < within_s and not (kills and kills.over):
                time.sleep(0.2)
        finally:
            if kills is not None:
                kills.stop()
            if process.poll() is None:
                stopped = time.time()
                process.send_signal(signal.SIGINT)
            try:
                process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    ended = time.time()
    for file in home.glob("jobs/*/logs/*"):
        (out / f"{label}_{file.name}").write_bytes(file.read_bytes()[-200_000:])
    row: Row = {"returncode": process.returncode, "wall_s": round(ended - began, 1), "settings": changes}
    if stopped:
        row["interrupted_s"] = round(stopped - began, 1)
    return row | account(home, out, label, began=began, ended=ended, stopped=stopped)
