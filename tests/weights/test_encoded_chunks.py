"""The cache of encoded chunks: each is made once, and what nobody will ask for again goes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gyre.weights.codecs.encoding import encode
from gyre.weights.transfer.server import ENTRY_BYTES, EncodedChunks

KEY = ("target", 0, "planes", "")
WITHIN_S = 20.0


def test_many_who_ask_at_once_have_it_made_once() -> None:
    cache, made, asked = EncodedChunks(), [], threading.Barrier(8)

    def make() -> bytes:
        made.append(1)
        return b"x"

    def ask() -> bytes | None:
        asked.wait(WITHIN_S)
        return cache.get(KEY, make)

    with ThreadPoolExecutor(8) as pool:
        assert {one.result(WITHIN_S) for one in [pool.submit(ask) for _ in range(8)]} == {b"x"}
    assert made == [1]
    assert not cache._making


def test_where_making_fails_the_next_tries_and_nothing_is_left() -> None:
    cache, begun, go = EncodedChunks(), threading.Event(), threading.Event()

    def fail() -> bytes:
        begun.set()
        assert go.wait(WITHIN_S)
        raise OSError("the version is gone")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, KEY, fail)
        assert begun.wait(WITHIN_S)
        second = pool.submit(cache.get, KEY, lambda: b"made")
        go.set()
        with pytest.raises(OSError, match="gone"):
            first.result(WITHIN_S)
        assert second.result(WITHIN_S) == b"made"
    with pytest.raises(ZeroDivisionError):
        cache.get(("target", 1, "planes", ""), lambda: b"x" * (1 // 0))
    assert not cache._making


def test_what_is_not_worth_encoding_is_remembered_for_so_many_chunks_alone() -> None:
    cache = EncodedChunks(limit_bytes=100 * ENTRY_BYTES)
    for index in range(10_000):
        assert cache.get(("target", index, "planes", ""), lambda: None) is None
    assert len(cache._held) == 100
    assert cache.get(("target", 9_999, "planes", ""), lambda: b"asked anew") is None


def test_chunks_of_forgotten_versions_go_and_deltas_stay() -> None:
    cache = EncodedChunks()
    before, after = np.zeros(64, np.uint8).data, np.ones(64, np.uint8).data
    cache.put(("old", 0, "delta", "older"), bytes(encode("delta", after, word=2, base=before)))
    cache.put(("old", 0, "planes", ""), b"chunk")
    cache.put(("new", 0, "planes", ""), b"chunk")
    cache.forget({"new"})
    assert list(cache._held) == [("new", 0, "planes", "")]
    assert cache._size == ENTRY_BYTES + len(b"chunk")
    assert cache.steps.path("older", "old", 0, 1 << 20) is not None
