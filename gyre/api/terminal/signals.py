"""Blocks in which SIGINT and SIGTERM are held back until the block has ended, or ignored.

Python delivers signals to the main thread alone; in other threads these blocks do nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals are delivered when the block has ended. A handler that the block sets stays if there was none before."""
    if not _in_main_thread():
        yield
        return
    came: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, hold) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not signal.SIG_DFL or signal.getsignal(number) is hold:
                signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Signals are ignored, for a block that ends by itself within seconds and would leave something behind if cut
    short."""
    if not _in_main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
