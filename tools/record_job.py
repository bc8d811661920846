"""Make `tests/ui/recorded.tar.gz`: a small home of Gyre in which a job has ended, for the tests of the page.

    python tools/record_job.py tests/ui/recorded.tar.gz

The job is `gyre demo --chaos`, with few steps: each kind of process is killed, so every view of the page has something
to show. What the archive holds is what a user's GYRE_HOME holds: the database, the samples, the logs and the metrics of
the job; checkpoints and weights are left out.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

STEPS = 24
"""Enough for each entry of the demo's plan of kills to have steps of its own."""
LONGEST_S = 900.0
LOG_BYTES = 32 << 10
"""Of the end of each log."""
LEFT_OUT = ("checkpoints", "weights", "weight_dirs", "ray", "tls", "rollouts.json")


def main() -> int:
    target = Path(sys.argv[1])
    home = Path(tempfile.gettempdir()) / "gyre-recorded"  # its path is in the journal: it should tell nothing
    shutil.rmtree(home, ignore_errors=True)
    environment = {**os.environ, "GYRE_HOME": str(home)}
    try:
        command = [sys.executable, "-m", "gyre.api.cli", "demo", "--chaos", "--steps", str(STEPS)]
        done = subprocess.run(command, env=environment, timeout=LONGEST_S, check=False)
        if done.returncode:
            return done.returncode
        _pack(home, target)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(f"{target}: {target.stat().st_size:,} bytes")
    return 0


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
