"""Which frames of a traceback are the user's own: not Gyre's, Python's, or an installed package's."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

_GYRE = str(Path(__file__).resolve().parents[2])
_OTHERS = tuple(
    f"{folder}/" for folder in (_GYRE, *{sysconfig.get_path(key) for key in ("stdlib", "platstdlib")})
)

_FRAME = re.compile(r'^  File "([^"]*)", line \d+')


def is_users(file: str) -> bool:
    """Whether a frame's file is the user's own."""
    if file.startswith(("<frozen ", *_OTHERS)):
        return False
    return not {"site-packages", "dist-packages"} & set(Path(file).parts)


def said_where(error: BaseException) -> str:
    """`file.py, line 3: KeyError: 'k'`: the exception, after the innermost line of the user's own that led to it."""
    where = ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}, line {error.lineno}: "
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
        where = f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{where}{type(error).__name__}: {text}".rstrip(": .")


def users_traceback(text: str) -> str:
    """A traceback's text without the frames that are not the user's."""
    kept: list[str] = []
    users = True
    for line in text.splitlines():
        if found := _FRAME.match(line):
            users = is_users(found[1])
        elif not line.startswith("    "):
            users = True
        if users:
            kept.append(line)
    return "\n".join(kept)
