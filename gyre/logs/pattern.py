"""Regular expressions of users, at a bounded cost.

Python's `re` may take for ever over a short line, and holds the interpreter's lock meanwhile: in the master's process
that would end the job. So an expression that can do that is looked for by a process of its own, which the kernel ends
when it has used `CPU_S` (`gyre.logs.pattern_process`). (The timeout of the package `regex` is for matching alone: its
compiler takes 7 GB for `(?:(?:(?:a{500}){500}){500}){500}`.)

This module must not know what a log is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gyre.errors import ConfigError

CPU_S = 2
WAIT_S = 10.0
"""A machine that is busy gives its seconds of a core late."""
MEMORY_BYTES = 1 << 30
PATTERN_CHARS = 1000
LINE_CHARS = 4096
"""Of a line's beginning, in which the expression is looked for."""

Finds = Callable[[Sequence[str]], list[bool]]
"""Tells of each line whether the expression is found in it. Raises ConfigError past its time."""


def matcher(pattern: str) -> Finds:
    """Raises ConfigError for what is no regular expression."""
    if len(pattern) > PATTERN_CHARS:
        raise ConfigError(f"grep: the expression is longer than {PATTERN_CHARS} characters.")
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"grep: {pattern!r} is no regular expression: {error}.",
            hint=f"To find the text itself: {re.escape(pattern)}",
        ) from None
    if not set("*+?{|(") & set(pattern):  # without repeats and choices every line costs about its length

        def directly(lines: Sequence[str]) -> list[bool]:
            return [compiled.search(line, 0, LINE_CHARS) is not None for line in lines]

        return directly

    def apart(lines: Sequence[str]) -> list[bool]:
        return _apart(pattern, lines) if lines else []

    return apart


def _apart(pattern: str, lines: Sequence[str]) -> list[bool]:
    asked = json.dumps([pattern, [line[:LINE_CHARS] for line in lines]])
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("pattern_process.py"))]
    command += [str(CPU_S), str(MEMORY_BYTES)]
    try:
        done = subprocess.run(command, input=asked.encode(), capture_output=True, timeout=WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _too_slow(pattern) from None
    if done.returncode != 0:
        raise _too_slow(pattern)
    found: list[bool] = json.loads(done.stdout)
    return found


def _too_slow(pattern: str) -> ConfigError:
    return ConfigError(
        f"grep: {pattern!r} takes more than {CPU_S} s: too long for these lines.",
        hint="Leave out repeats within repeats, as in (a+)+, or look at less: --since, --level.",
    )
