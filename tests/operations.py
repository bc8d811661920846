"""How much work a call does: lines executed, which are the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


def lines_of(call: Callable[[], object], *modules: ModuleType) -> int:
    """The lines of these modules that run during the call, on this thread. A loop within one line counts each turn."""
    files = {module.__file__ for module in modules}
    count = 0

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return on_line

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        return on_line if frame.f_code.co_filename in files else None

    before = sys.gettrace()  # coverage has one
    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
