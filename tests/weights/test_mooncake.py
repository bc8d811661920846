"""Mooncake beside TCP: chosen where it is faster, done without where it fails. The engine is a double that copies
memory within the process; the last tests are of the real one, where it can be imported."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre.weights.codecs.adaptive import CodecChoice, choose_transport
from gyre.weights.codecs.link_rate import MEASURED_BYTES
from gyre.weights.transfer.fetch import WeightsUnreachable
from gyre.weights.transfer.mooncake import (
    PROGRESS_S,
    MooncakeEngine,
    MooncakeMissing,
    load,
    memory_of,
    remote_memory,
    self_test,
)
from gyre.weights.transfer.protocol import Stalled
from tests.machine import memory_folder
from tests.waits import GENEROUS_S
from tests.weights.plane import CHUNK, MEASURED, content

NO_CODEC = CodecChoice("none", "nothing else can be used")


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


def with_engine(peer, *, chunk_bytes=CHUNK, **options):
    engine = Copying(**options)
    origin = peer(chunk_bytes=chunk_bytes)
    origin.server.memory = memory_of(engine, origin.arena)
    return origin, engine


def test_chunks_are_read_from_memory_where_that_is_faster(peer):
    origin, engine = with_engine(peer, chunk_bytes=MEASURED_BYTES)
    receiver = peer(mooncake=engine, forced_codec="none", streams=1)
    receiver.receiver.rates["tcp"] = 1.0
    manifest = origin.publish(1, **MEASURED)
    fetched = receiver.fetch(manifest, origin)
    assert engine.reads > 0
    assert fetched.way == "mooncake"
    assert "mooncake" in fetched.reason
    assert content(fetched.files) == content(origin.arena.versions[1])


def test_where_it_is_slower_tcp_stays(peer):
    origin, engine = with_engine(peer, chunk_bytes=MEASURED_BYTES, delay_s=0.3)
    receiver = peer(mooncake=engine, forced_codec="none", streams=1)
    fetched = receiver.fetch(origin.publish(1, **MEASURED), origin)
    assert engine.reads <= 3  # it was measured; the file of 22 bytes and the rest of the other are no measure
    assert fetched.way == "mooncake+tcp"
    assert content(fetched.files) == content(origin.arena.versions[1])


def test_when_it_fails_tcp_goes_on_and_there_is_an_incident(peer):
    origin, engine = with_engine(peer, fails_after=3)
    receiver = peer(mooncake=engine, forced_codec="none", streams=1)
    receiver.receiver.rates["tcp"] = 1.0
    fetched = receiver.fetch(origin.publish(1), origin)
    assert fetched.way == "mooncake+tcp"
    assert receiver.kinds() == {"transport_failed"}
    assert content(fetched.files) == content(origin.arena.versions[1])


def test_a_source_without_it_is_asked_by_tcp(peer):
    origin, receiver = peer(chunk_bytes=MEASURED_BYTES), peer(mooncake=Copying(), forced_codec="none")
    fetched = receiver.fetch(origin.publish(1, **MEASURED), origin)
    assert fetched.way == "tcp"
    assert f"mooncake not from {origin.address}" in fetched.reason
    assert receiver.receiver.broken == {}


def test_a_source_that_dies_does_not_speak_against_mooncake(peer):
    """Nor does a relay that has none: the others are read from memory all the same."""
    able, engine = with_engine(peer)
    gone, plain = peer(), peer()
    for one in (able, gone, plain):
        manifest = one.publish(1)
    gone.server.close()
    receiver = peer(mooncake=engine, forced_codec="none", streams=2, transports=["mooncake", "tcp"])
    fetched = receiver.fetch(manifest, gone, plain, able)
    assert "mooncake" in fetched.way
    assert receiver.receiver.broken == {}
    assert receiver.kinds() == {"source_lost"}
    assert engine.reads > 0


def test_a_codec_for_a_source_without_it_does_not_take_the_others_from_it(peer):
    """On a link so slow that codecs are worth it, where one has memory that Mooncake reads and one has not."""
    able, engine = with_engine(peer)
    plain = peer()
    for one in (able, plain):
        manifest = one.publish(1)
    receiver = peer(mooncake=engine, transports=["mooncake", "tcp"], streams=2)
    choice = CodecChoice("planes", "slow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "gyre.weights.transfer.fetch.choose_codec", lambda able, *_: choice if able else NO_CODEC
        )
        fetched = receiver.fetch(manifest, able, plain)
    assert set(fetched.codecs) == {"none", "planes"}
    assert fetched.way == "mooncake+tcp"
    assert able.server.sent_bytes == 0
    assert fetched.by[able.address] > 0


SAID = {"peer": "10.0.0.7:15000", "address": 1 << 40}

LIES = {
    "another machine": {"peer": "10.0.0.8:15000"},
    "a name": {"peer": "elsewhere:15000"},
    "nobody": {"peer": None},
    "no port": {"peer": "10.0.0.7"},
    "port 0": {"peer": "10.0.0.7:0"},
    "port 65536": {"peer": "10.0.0.7:65536"},
    "digits of another script": {"peer": "10.0.0.7:\u0661\u0665"},
    "no address": {"address": None},
    "true": {"address": True},
    "a float": {"address": float(1 << 40)},
    "address 0": {"address": 0},
    "below 0": {"address": -1},
    "over the end": {"address": 2**64 - CHUNK + 1},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_source_is_not_believed_that_its_memory_is_where_it_cannot_be(lie):
    """The native engine dials whom it is told to, and takes any number for an address."""
    assert remote_memory(SAID, "10.0.0.7:9000", CHUNK) == ("10.0.0.7:15000", 1 << 40)
    with pytest.raises(ConnectionAbortedError):
        remote_memory(SAID | lie, "10.0.0.7:9000", CHUNK)


def test_memory_at_an_ipv6_address_is_believed_of_its_own_machine_alone():
    said = {"peer": "[fd00::7]:15000", "address": 1 << 40}
    assert remote_memory(said, "[fd00::7]:9000", CHUNK) == ("[fd00::7]:15000", 1 << 40)
    for other in ("[fd00::8]:9000", "10.0.0.7:9000"):
        with pytest.raises(ConnectionAbortedError, match="another machine"):
            remote_memory(said, other, CHUNK)


def test_whoever_names_another_machine_is_not_read_from(peer):
    liar, engine = with_engine(peer)
    honest = liar.server.memory
    liar.server.memory = lambda files, chunk: honest(files, chunk) | {"peer": "10.0.0.8:15000"}
    able, _ = with_engine(peer)
    for one in (liar, able):
        manifest = one.publish(1)
    receiver = peer(mooncake=engine, transports=["mooncake"], streams=1)
    fetched = receiver.fetch(manifest, liar, able)
    assert content(fetched.files) == content(able.arena.versions[1])
    assert set(fetched.by) == {able.address}


def test_mooncake_alone_is_never_replaced(peer):
    origin, engine = with_engine(peer, fails_after=3)
    receiver = peer(mooncake=engine, transports=["mooncake"], streams=1, give_up_s=0.5)
    with pytest.raises(WeightsUnreachable):
        receiver.fetch(origin.publish(1), origin)
    assert origin.server.sent_bytes == 0
    engine.fails_after = 10**9
    fetched = receiver.fetch(origin.publish(1), origin)
    assert fetched.way == "mooncake"
    assert content(fetched.files) == content(origin.arena.versions[1])


def test_the_origin_counts_what_is_read_from_its_memory(peer):
    """Else each receiver would read everything from the origin."""
    origin, engine = with_engine(peer)
    receivers = [peer(mooncake=engine, forced_codec="none", seed=seed) for seed in range(3)]
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


# -- the real one ------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).with_name("mooncake_process.py")


def script(*words: str, program: str = SCRIPT.name) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT.with_name(program)), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.fixture(scope="module")
def real():
    try:
        load()
    except MooncakeMissing as error:
        pytest.skip(f"THE REAL MOONCAKE IS NOT TESTED: {error}")


@pytest.fixture(scope="module")
def publishing(real):
    """A publisher with the real Mooncake: what it says."""
    with memory_folder("weights") as folder:
        settings = {"transports": ["mooncake", "tcp"], "chunk_bytes": 1 << 20}
        process = script("publish", str(folder), json.dumps(settings))
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()[-3000:]
            yield json.loads(line)
        finally:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        ({"transports": ["mooncake"]}, {"mooncake"}),
        ({"transports": ["mooncake", "tcp"], "codec": "none"}, {"mooncake"}),
        ({"trusted_network": True, "codec": "none"}, {"mooncake", "mooncake+tcp"}),
    ],
    ids=["by name", "preferred", "auto"],
)
def test_a_version_goes_from_one_process_to_another_by_the_real_mooncake(publishing, folder, settings, ways):
    process = script(
        "receive", str(folder), json.dumps(settings), publishing["address"], publishing["checksum"]
    )
    out, errors = process.communicate(timeout=100)
    assert out, errors[-3000:]
    told = json.loads(out.splitlines()[-1])
    assert told["right"]
    assert told["wire_bytes"] == told["size_bytes"] > 8_000_000
    assert told["way"] in ways
    assert "mooncake" in told["reason"]
    assert not any("transport_failed" in kind for kind in told["heard"])


@pytest.fixture
def reader(real):
    """Starts a process that reads again and again from a memory of this process; see `mooncake_reads.py`."""
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        started.append(script(*words, program="mooncake_reads.py"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_memory_is_read_at_an_address_of_either_family(reader, host):
    source = reader("serve", host)
    served = json.loads(source.stdout.readline())
    assert served["peer"].startswith(f"[{host}]:" if ":" in host else f"{host}:")
    reading = reader("read", host, served["peer"], str(served["address"]), "1")
    out, errors = reading.communicate(timeout=GENEROUS_S)
    assert out, errors[-2000:]
    told = json.loads(out.splitlines()[-1])
    assert (told["error"], told["digest"]) == ("", served["digest"])


@pytest.mark.slow
def test_a_source_that_is_killed_or_stopped_ends_the_read_in_time(reader):
    for how, within_s in ((signal.SIGKILL, 2.0), (signal.SIGSTOP, 2 * PROGRESS_S + 2.0)):
        source = reader("serve", "127.0.0.1")
        served = json.loads(source.stdout.readline())
        reading = reader("read", "127.0.0.1", served["peer"], str(served["address"]), "1000000")
        assert json.loads(reading.stdout.readline())["began"]
        source.send_signal(how)
        began = time.monotonic()
        out, errors = reading.communicate(timeout=GENEROUS_S)
        assert out, errors[-2000:]
        assert json.loads(out.splitlines()[-1])["error"] in ("Stalled", "ConnectionResetError")
        assert time.monotonic() - began < within_s + 10.0, "Mooncake's own deadline, and a busy machine"


@pytest.mark.slow
@pytest.mark.parametrize(
    "peer", ["127.0.0.1:1", "127.0.0.1:99999", "no.such.host.invalid:15000", "::1:15000", ""]
)
def test_a_read_from_a_wrong_address_ends_with_an_error(reader, peer):
    reading = reader("read", "127.0.0.1", peer, str(1 << 40), "1")
    out, errors = reading.communicate(timeout=GENEROUS_S)
    assert out, errors[-2000:]
    assert json.loads(out.splitlines()[-1])["error"] in ("Stalled", "ConnectionResetError")


@pytest.mark.slow
def test_a_source_killed_in_the_middle_is_replaced_by_another(real, folder):
    """The version is so large that it still goes over when the first source dies."""
    settings = json.dumps({"transports": ["mooncake"], "chunk_bytes": 1 << 20})
    with memory_folder("weights") as one, memory_folder("weights") as other:
        sources = [script("publish", str(where), settings, "12000") for where in (one, other)]
        try:
            lines = [process.stdout.readline() for process in sources]
            assert all(lines), [
                process.stderr.read()[-2000:] for process in sources if process.poll() is not None
            ]
            told = [json.loads(line) for line in lines]
            assert told[0]["checksum"] == told[1]["checksum"]
            addresses = ",".join(one["address"] for one in told)
            receiving = script("receive", str(folder), settings, addresses, told[0]["checksum"])
            try:
                assert json.loads(receiving.stdout.readline())["began"]
                sources[0].kill()
                out, errors = receiving.communicate(timeout=100)
                assert out, errors[-3000:]
                got = json.loads(out.splitlines()[-1])
                assert got["right"]
                assert got["way"] == "mooncake"
                assert any("source_lost" in kind for kind in got["heard"]), got
            finally:
                receiving.kill()
                receiving.communicate()
        finally:
            for process in sources:
                process.kill()
                process.communicate()


# -- where there is none -----------------------------------------------------------------------------------


def test_where_it_cannot_be_imported_the_reason_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(MooncakeMissing, match="cannot be imported"):
        load()
    with pytest.raises(MooncakeMissing):
        self_test(MooncakeEngine())


def test_rdma_on_a_machine_without_a_device_is_refused_and_does_not_go_by_tcp(monkeypatch, tmp_path):
    monkeypatch.setattr("gyre.weights.transfer.mooncake.RDMA_DEVICES", tmp_path)
    with pytest.raises(MooncakeMissing, match="no RDMA device"):
        MooncakeEngine(protocol="rdma")
