"""Ctrl-C while a job's command is only being loaded: 130 and a sentence at most, wherever it comes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEFORE_ALL = "interrupted before anything was started"
BEFORE_THE_JOB = "interrupted before the job was running; nothing of it is left"

NO_RAY = "127.0.0.1:1"
"""Where nothing listens: a command that missed the interrupt ends soon, and with another code."""

INTERRUPTED_DEMO = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupt:
    at, lost_in = {at!r}, {lost_in!r}
    def find_spec(self, name, path=None, target=None):
        if name == self.at:
            self.at = None
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                if self.lost_in == "":
                    raise
                if self.lost_in != "nothing":
                    raise ImportError(self.lost_in) from None
sys.meta_path.insert(0, Interrupt())
sys.argv = ["gyre", "demo"]
from gyre.api.__main__ import main
main()
"""


def run(tmp_path: Path, at: str, lost_in: str = "") -> subprocess.CompletedProcess[str]:
    """`gyre demo`, interrupted when it imports `at`; the KeyboardInterrupt comes out as an ImportError that says
    `lost_in`, or as "nothing" at all."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "GYRE_"))}
    return subprocess.run(
        [sys.executable, "-c", INTERRUPTED_DEMO.format(at=at, lost_in=lost_in)],
        capture_output=True,
        text=True,
        timeout=110,
        env={
            **kept,
            "GYRE_HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "RAY_ADDRESS": NO_RAY,
        },
    )


@pytest.mark.many_cases(quick=4)
@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("gyre.api.cli", ""),
        ("click", ""),
        ("gyre.api.cli.jobs", ""),
        ("gyre.api.submit", BEFORE_ALL),
        ("ray", BEFORE_ALL),
        ("ray._raylet", BEFORE_ALL),
        ("torch", BEFORE_THE_JOB),
    ],
)
def test_an_interrupt_of_an_import_ends_the_command(tmp_path: Path, at: str, said: str) -> None:
    done = run(tmp_path, at)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert done.stderr.strip().splitlines()[-1:] == ([said] if said else [])


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("lost_in", ["nothing", "a part of this library is missing"])
@pytest.mark.parametrize(("at", "said"), [("click", ""), ("ray", BEFORE_ALL), ("torch", BEFORE_THE_JOB)])
def test_an_interrupt_that_an_import_would_lose_is_heard(
    tmp_path: Path, at: str, said: str, lost_in: str
) -> None:
    """At the latest when the classes of the job are imported, before Ray starts."""
    done = run(tmp_path, at, lost_in)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip().splitlines()[-1:] == ([said] if said else [])
