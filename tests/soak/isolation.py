"""A part of this machine that the kernel takes away with the soak: processes, mounts, network and shared memory.

Invariants:
- *nothing outlives it*: when the first process in it ends, the kernel kills the others, and takes their mounts, name
  spaces and interfaces away; the first one is killed when whoever started it dies, by whatever signal;
- *no other is struck*: a process in it has no name for a process outside, so no kill can reach one;
- *it ends*: whoever started it kills it at its deadline.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = "GYRE_SOAK_FOLDER"
"""Set inside: the folder below /tmp that is the soak's."""

SHARED_MEMORY_GIB = 4
PAST_DEADLINE = 124
"""An exit status, as `timeout` gives it."""

ENDS_S = 30.0
"""For an interrupted soak to say what came of it."""

_INSIDE = f"""
ip link set lo up &&
mount -t tmpfs -o size={SHARED_MEMORY_GIB}g gyre-test /dev/shm &&
mount -t tmpfs -o size=1m gyre-test /run &&
mkdir /run/netns || exit 1
{{command}} &
wait $!
"""
"""What the first process inside does: a shell, because it reaps processes whose parents have died."""


def folder() -> Path | None:
    """The soak's folder, in a process inside; None outside."""
    name = os.environ.get(FOLDER)
    return Path(name) if name else None


def run_inside(command: Sequence[str], place: Path, *, within_s: float) -> int:
    """Run a command inside, with this folder as the soak's. Returns its exit status; `PAST_DEADLINE` if it was killed
    then."""
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork"]
    words += ["--kill-child", "--mount-proc", "bash", "-c", _INSIDE.format(command=shlex.join(command))]
    environment = {**os.environ, FOLDER: str(place)}
    with subprocess.Popen(words, env=environment) as process:
        try:
            return process.wait(within_s)
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"the soak did not end in {within_s:g} s, and is killed\n")
            return PAST_DEADLINE
        except KeyboardInterrupt:  # the terminal has interrupted those inside as well
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDS_S)
            return 128 + signal.SIGINT
        finally:
            process.kill()
