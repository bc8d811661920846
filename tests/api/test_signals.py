"""Signals that come while something must not be cut short."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from gyre.api.terminal.foreground import Terminated, terminable
from gyre.api.terminal.signals import (
    ended_at_once,
    interrupts_kept,
    interrupts_noted,
    signals_held,
    signals_ignored,
)


def test_held_signals_come_when_the_block_has_ended() -> None:
    reached = []

    def interrupted() -> None:
        with signals_held():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_signals_never_come() -> None:
    with signals_ignored():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_set_meanwhile_stays_only_where_there_was_none() -> None:
    def mine(*_: object) -> None: ...

    def theirs(*_: object) -> None: ...

    first = signal.getsignal(signal.SIGTERM)
    try:
        for before, after in ((mine, mine), (signal.SIG_DFL, theirs)):
            signal.signal(signal.SIGTERM, before)
            with signals_held():
                signal.signal(signal.SIGTERM, theirs)
            assert signal.getsignal(signal.SIGTERM) is after
    finally:
        signal.signal(signal.SIGTERM, first)


def test_in_another_thread_nothing_is_touched() -> None:
    seen = []

    def look() -> None:
        with signals_held(), signals_ignored():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


class Lost:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_is_kept() -> None:
    reached = []

    def interrupted() -> None:
        with interrupts_kept():
            Lost()
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_comes_out_as_another_error_is_an_interrupt() -> None:
    def load() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("a part of this library is missing") from None

    with pytest.raises(KeyboardInterrupt) as caught, interrupts_kept():
        load()
    assert isinstance(caught.value.__cause__, ImportError)


def test_another_error_is_what_it_is_and_a_block_without_an_interrupt_ends_as_usual() -> None:
    with interrupts_kept():
        pass
    with pytest.raises(ImportError), interrupts_kept():
        raise ImportError("a part of this library is missing")


def test_blocks_that_note_interrupts_nest_and_each_notes_what_was_raised() -> None:
    with interrupts_noted() as outer, terminable():
        with pytest.raises(Terminated), interrupts_noted() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert type(inner.raised) is Terminated
        assert outer.raised is None, "whoever set a handler since then has its own"
        with pytest.raises(KeyboardInterrupt), interrupts_noted():
            signal.raise_signal(signal.SIGINT)
        assert type(outer.raised) is KeyboardInterrupt


@pytest.mark.parametrize(("signalled", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_block_that_a_signal_ends_at_once_runs_no_further_and_cleans_up_nothing(
    signalled: str, code: int
) -> None:
    script = (
        "import signal\n"
        "from gyre.api.terminal.signals import ended_at_once\n"
        "try:\n"
        "    with ended_at_once('interrupted'):\n"
        f"        signal.raise_signal(signal.{signalled})\n"
        "finally:\n"
        "    print('cleaned up')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "interrupted\n")


def test_an_ignored_signal_ends_nothing_at_once() -> None:
    with signals_ignored():
        with ended_at_once():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


ENDED_BY_A_LIBRARY = """
import atexit, ctypes, sys
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
sys.argv = ["gyre", *{arguments!r}]
from gyre.api.__main__ import main
atexit.register(print, "what Python does at its end is done")
main()
"""


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["no-such-verb"], 2)])
def test_a_librarys_destructors_do_not_change_the_commands_code(arguments: list[str], code: int) -> None:
    script = ENDED_BY_A_LIBRARY.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1] == "what Python does at its end is done"
