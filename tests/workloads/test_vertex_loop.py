"""The loop that a vertex of the rollout plane runs beside its host."""

from __future__ import annotations

import gc
import threading

import pytest

from gyre.workloads.loop_thread import LoopThread


async def one() -> int:
    return 1


def test_what_a_loop_never_began_is_forgotten_without_a_warning() -> None:
    """A warning of it would fail whichever test comes next."""
    loop = LoopThread("test")
    assert loop.call(one(), 10.0) == 1
    called = threading.Event()

    def die() -> None:
        called.wait(10.0)
        raise SystemExit  # as where a test kills the vertex

    loop.loop.call_soon_threadsafe(die)
    threading.Timer(0.2, called.set).start()
    with pytest.raises(TimeoutError):
        loop.call(one(), 1.0)
    assert loop.loop.is_closed()
    with pytest.raises(RuntimeError):
        loop.call(one(), 1.0)
    gc.collect()
