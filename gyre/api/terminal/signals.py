"""Blocks in which SIGINT and SIGTERM are held back until the block has ended, are ignored, end the process at once, or
are noted, so that none is lost.

Python delivers signals to the main thread alone; in other threads these blocks do nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_ENDING = (signal.SIGINT, signal.SIGTERM)

INTERRUPTED = 130
TERMINATED = 143
"""Exit codes of a process that SIGINT or SIGTERM ended: 128 and the signal's number, as a shell has it."""


@contextmanager
def ended_at_once(said: str = "") -> Iterator[None]:
    """A signal ends the process where it stands, with `said` on stderr: for a block that imports, and has nothing to
    clean up. An exception in the middle of an import could come out as any error, or not at all. What is ignored stays
    so."""
    if not _in_main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        if said:
            os.write(2, f"{said}\n".encode())
        os._exit(INTERRUPTED if number == signal.SIGINT else TERMINATED)

    before = {n: handler for n in _ENDING if (handler := signal.getsignal(n)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupts:
    raised: KeyboardInterrupt | None = None
    """What the last signal's handler raised, whatever became of it."""


@contextmanager
def interrupts_noted() -> Iterator[Interrupts]:
    """What the handlers of SIGINT and SIGTERM raise within the block is noted."""
    noted = Interrupts()
    if not _in_main_thread():
        yield noted
        return
    before = {number: handler for number in _ENDING if callable(handler := signal.getsignal(number))}

    def note(number: int, frame: FrameType | None) -> None:
        try:
            before[signal.Signals(number)](number, frame)
        except KeyboardInterrupt as interrupt:
            noted.raised = interrupt
            raise

    for number in before:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """An interrupt within the block is raised at its end where it was lost, or came out as another error: for a block
    that imports. Python drops an exception in a callback of the interpreter's, and libraries replace one that comes
    while they load."""
    with interrupts_noted() as noted:
        try:
            yield
        except Exception as error:
            if noted.raised is not None:
                raise type(noted.raised) from error
            raise
    if noted.raised is not None:
        raise type(noted.raised)


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
