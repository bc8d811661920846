"""SIGINT and SIGTERM while something must not be cut short: held back until it has ended, or ignored for good.

Python gives signals to the main thread alone; in any other one both do nothing.
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
    """They come when the block has ended. A handler that the block sets where there was none before stays."""
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
    """For what ends by itself within seconds, and leaves something behind where it is cut short."""
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
