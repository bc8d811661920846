"""Prints into a log file whose disk is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gyre.logs.output import LossyFile
from tests.machine import fill

PRINTS = """
import sys, logging, warnings
from pathlib import Path
from gyre.logs.output import redirect_output
redirect_output(Path(sys.argv[1]))
try:
    for _ in range(3000):
        print("x" * 4000)
        print("y" * 10, flush=True, file=sys.stderr)
        sys.stdout.buffer.write(b"z"); sys.stdout.flush()
    logging.getLogger().error("said")
    warnings.warn("warned")
except BaseException as error:
    Path(sys.argv[2]).write_text(repr(error))
else:
    Path(sys.argv[2]).write_text("ok")
"""


def _run(log: Path, told: Path) -> str:
    subprocess.run([sys.executable, "-c", PRINTS, str(log), str(told)], check=False, timeout=60)
    return told.read_text()


def test_a_print_that_finds_no_room_raises_nothing(small_mount: Path, tmp_path: Path) -> None:
    log = small_mount / "logs" / "a.log"
    assert _run(log, tmp_path / "told") == "ok"
    assert log.stat().st_size > 100_000


def test_a_log_that_cannot_be_made_ends_nothing(small_mount: Path, tmp_path: Path) -> None:
    fill(small_mount / "ballast")
    assert _run(small_mount / "logs" / "a.log", tmp_path / "told") == "ok"


def test_when_there_is_room_again_the_log_says_what_is_missing(small_mount: Path) -> None:
    descriptor = os.open(small_mount / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    file = LossyFile(descriptor)
    ballast = small_mount / "ballast"
    fill(ballast)
    assert file.write(b"lost" * 2000) > 0
    assert file.write(b"lost" * 2000) == 8000
    ballast.unlink()
    file.write(b"kept")
    os.close(descriptor)
    written = (small_mount / "log").read_bytes()
    assert written.endswith(b"kept")
    assert b"bytes were not written: the disk had no room]" in written
