"""Which installed packages can be imported: what `doctor` calls ok it has imported, in a process of its own, so that
one that crashes or hangs takes nothing along.

This module must not know what a package is for.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from gyre.engines.guarded import Guarded

WITHIN_S = 180.0
"""For all of them: torch, Ray and Megatron take ten seconds from a warm disk, and a minute from a cold one."""

_CHILD = """
import importlib, json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what packages print is not for us
for name in sys.argv[1:]:
    print(json.dumps([name, None]), file=out, flush=True)
    try:
        importlib.import_module(name)
        said = ""
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps([name, said]), file=out, flush=True)
os._exit(0)  # some packages hang at the end
"""


def import_errors(modules: Sequence[str], within_s: float = WITHIN_S) -> dict[str, str]:
    """Why each module cannot be imported; "" where it can."""
    found: dict[str, str] = {}
    while left := [one for one in modules if one not in found]:
        with tempfile.TemporaryFile("w+") as output:
            child = [sys.executable, "-c", _CHILD, *left]
            process = Guarded(child, stdout=output, stderr=subprocess.DEVNULL)
            in_time = process.wait(within_s)
            code = process.end()
            output.seek(0)
            said = output.read()
        ended = f"its import ended the process with status {code}"
        if not in_time:
            ended = f"its import did not end within {within_s:g} s"
        told: dict[str, str | None] = {}
        for line in said.splitlines():
            with contextlib.suppress(ValueError):  # the last line of a process that died
                name, error = json.loads(line)
                told[name] = error
        found |= {name: ended if error is None else error for name, error in told.items()}
        if not told:  # not even the first began
            found[left[0]] = ended
    return found
