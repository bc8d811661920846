"""Signals that come while something must not be cut short."""

from __future__ import annotations

import signal
import threading

import pytest

from gyre.api.terminal.signals import signals_held, signals_ignored


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
