"""Mooncake beside TCP: chosen where it is faster, done without where it fails. The engine is a double that copies
memory within the process; the last test is of the real one, where it can be imported."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

import pytest

from gyre.weights.choice import choose_transport
from gyre.weights.mooncake import MooncakeEngine, MooncakeMissing, load, memory_of, self_test
from gyre.weights.wire import Stalled
from tests.weights.plane import content


class Copying(MooncakeEngine):
    """Reads by copying memory; `fails_after` reads it is broken, and each takes `delay_s`."""

    def __init__(self, *, fails_after: int = 10**9, delay_s: float = 0.0) -> None:
        import threading

        class Registry:
            def register_memory(self, address, size):
                return 0

            def unregister_memory(self, address):
                return 0

        self._engine = Registry()
        self.protocol, self.address = "tcp", "127.0.0.1:1"
        self._registered = {}
        self._lock = threading.Lock()
        self.reads, self.fails_after, self.delay_s = 0, fails_after, delay_s

    def read(self, peer, theirs, ours, nbytes):
        self.reads += 1
        if self.reads > self.fails_after:
            raise Stalled("nothing moved")
        time.sleep(self.delay_s)
        ctypes.memmove(ours, theirs, nbytes)


def with_engine(party, **options):
    engine = Copying(**options)
    origin = party()
    origin.server.memory = memory_of(engine, origin.arena)
    return origin, engine


def test_chunks_are_read_from_memory_where_that_is_faster(party):
    origin, engine = with_engine(party)
    receiver = party(mooncake=engine, forced_codec="none", streams=1)
    receiver.receiver.rates["tcp"] = 1.0
    manifest = origin.publish(1)
    fetched = receiver.fetch(manifest, origin)
    assert engine.reads > 0
    assert fetched.way == "mooncake"
    assert "mooncake" in fetched.reason
    assert content(fetched.slot) == content(origin.arena.versions[1])


def test_where_it_is_slower_tcp_stays(party):
    origin, engine = with_engine(party, delay_s=0.3)
    receiver = party(mooncake=engine, forced_codec="none", streams=1)
    fetched = receiver.fetch(origin.publish(1), origin)
    assert engine.reads == 1  # it was measured
    assert fetched.way == "mooncake+tcp"
    assert content(fetched.slot) == content(origin.arena.versions[1])


def test_when_it_fails_tcp_goes_on_and_there_is_an_incident(party):
    origin, engine = with_engine(party, fails_after=3)
    receiver = party(mooncake=engine, forced_codec="none", streams=1)
    receiver.receiver.rates["tcp"] = 1.0
    fetched = receiver.fetch(origin.publish(1), origin)
    assert fetched.way == "mooncake+tcp"
    assert receiver.kinds() == {"transport_failed"}
    assert content(fetched.slot) == content(origin.arena.versions[1])


def test_a_source_without_it_is_asked_by_tcp(party):
    origin, receiver = party(), party(mooncake=Copying(), forced_codec="none")
    fetched = receiver.fetch(origin.publish(1), origin)
    assert fetched.way == "tcp"
    assert "Mooncake" in receiver.receiver.broken["mooncake"]


def test_the_origin_counts_what_is_read_from_its_memory(party):
    """Else each receiver would read everything from the origin."""
    origin, engine = with_engine(party)
    receivers = [party(mooncake=engine, forced_codec="none", seed=seed) for seed in range(3)]
    for receiver in receivers:
        receiver.receiver.rates["tcp"] = 1.0
    manifest = origin.publish(1)
    for receiver in receivers:
        receiver.fetch(manifest, origin)
    assert engine.reads <= 2 * len(manifest.digests)


@pytest.mark.parametrize(
    ("rates", "broken", "name"),
    [
        ({"tcp": None, "mooncake": None}, {}, "tcp"),
        ({"tcp": 1e9, "mooncake": None}, {}, "mooncake"),
        ({"tcp": 1e9, "mooncake": 1.05e9}, {}, "tcp"),
        ({"tcp": 1e9, "mooncake": 2e9}, {}, "mooncake"),
        ({"tcp": 1e9}, {"mooncake": "no libibverbs"}, "tcp"),
    ],
)
def test_the_choice_and_its_reason(rates, broken, name):
    choice = choose_transport(rates, broken)
    assert choice.name == name
    assert all(why in choice.reason for why in broken.values())


REAL = """
import os
from gyre.weights.mooncake import MooncakeEngine, self_test
self_test(MooncakeEngine())
print("right", flush=True)
os._exit(0)  # its threads outlive the interpreter
"""


def test_the_real_one_brings_the_right_bytes():
    try:
        load()
    except MooncakeMissing as error:
        pytest.skip(str(error))
    out = subprocess.run(
        [sys.executable, "-c", REAL],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert "right" in out.stdout, out.stderr[-2000:]


def test_where_it_cannot_be_imported_the_reason_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(MooncakeMissing, match="cannot be imported"):
        load()
    with pytest.raises(MooncakeMissing):
        self_test(MooncakeEngine())
