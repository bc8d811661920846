"""What a DLRover job asks for and Gyre has no use for: told once, by a warning that can be filtered."""

from __future__ import annotations

import os
import sys
import warnings

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class HasNoMeaning(UserWarning):
    """Something of a DLRover job changes nothing here. The text says why."""


def has_no_meaning(what: str, why: str) -> None:
    """Warn the line of the user's that called this package."""
    depth = 1
    frame = sys._getframe(depth)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_HERE):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(f"{what} changes nothing in Gyre: {why}.", HasNoMeaning, stacklevel=depth + 1)
