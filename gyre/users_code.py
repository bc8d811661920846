"""Which frames of a traceback are Gyre's, and which are the user's own: neither Gyre's, Python's, nor a library's."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path

_GYRE = os.path.dirname(os.path.abspath(__file__)) + os.sep

OWN_PACKAGES = ("gyre", "gyre_dlrover")
"""Packages whose failures are Gyre's unless the user's code raised them. `gyre_verl` is none of them: what fails in its
workers, verl raised."""

_PYTHON = tuple(f"{sysconfig.get_path(key)}/" for key in ("stdlib", "platstdlib"))

_FRAME = re.compile(r'^  File "([^"]*)", line \d+')


def is_gyres(file: str) -> bool:
    """Whether a frame's file is Gyre's, or the import machinery's."""
    if file.startswith("<frozen ") or file.endswith("/importlib/__init__.py"):
        return True
    path = os.path.abspath(file)
    return path.startswith(_GYRE) or any(f"{os.sep}{name}{os.sep}" in path for name in OWN_PACKAGES[1:])


def is_gyres_module(module: str) -> bool:
    """Whether a module, by its dotted name, is Gyre's."""
    return module.partition(".")[0] in OWN_PACKAGES


def is_users(file: str) -> bool:
    """Whether a frame's file is the user's own, and no library's."""
    if is_gyres(file) or {"site-packages", "dist-packages"} & set(Path(file).parts):
        return False
    return not file.startswith(_PYTHON)


def said_where(error: BaseException) -> str:
    """`file.py, line 3: KeyError: 'k'`: the exception, after the innermost line of the user's own that led to it."""
    where = ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}, line {error.lineno}: "
    else:
        others = [
            frame for frame in traceback.extract_tb(error.__traceback__) if not is_gyres(frame.filename)
        ]
        frames = [frame for frame in others if is_users(frame.filename)] or others
        where = f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
    return f"{where}{words_of(error)}".rstrip(".")


def words_of(error: BaseException) -> str:
    """`KeyError: 'k'`, on one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}".rstrip(": ")


def users_traceback(text: str) -> str:
    """A traceback's text without Gyre's frames."""
    kept: list[str] = []
    gyres = False
    for line in text.splitlines():
        if found := _FRAME.match(line):
            gyres = is_gyres(found[1])
        elif not line.startswith("    "):
            gyres = False
        if not gyres:
            kept.append(line)
    return "\n".join(kept)
