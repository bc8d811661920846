"""Peers that may not come in, break the protocol, die or do not read: they harm nobody but themselves."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from gyre.rollouts.manager import connections as sessions_module
from gyre.rollouts.manager import rollout_manager as manager_module
from gyre.rollouts.protocol.codec import encode
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Assign,
    Attach,
    Done,
    EngineDied,
    Failed,
    GroupsStored,
    Hello,
    Reject,
    Weights,
)
from tests.rollouts.plane import TOKEN, Plane, ScriptedAgent, live_plane, until, within
from tests.waits import GENEROUS_S

# -- who is let in ----------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "wrong", "secret2", "sécret"])
async def test_without_the_token_nothing_is_open(plane: Plane, token: str) -> None:
    for route in ("agent", "trainer"):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await plane.dial(route, token)
        assert caught.value.status == 401
    assert (await plane.get("/v1/status", token))[0] == 401
    status, body = await plane.post("/v1/drain", {"instance": "a"}, token)
    assert (status, body["code"]) == (401, "unauthorised")
    assert not plane.manager.links


@pytest.mark.parametrize(
    "header",
    [b"Upgrade: \x83\xd7", b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: \xa6"],
)
async def test_a_header_that_is_no_text_is_refused(plane: Plane, header: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", plane.port)
    writer.write(
        b"GET /v1/agent HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"
        b"Connection: Upgrade\r\n" + header + b"\r\n\r\n"
    )
    assert b" 422 " in await asyncio.wait_for(reader.readline(), GENEROUS_S)
    writer.close()
    assert plane.manager.plane.refused == 1


def hello(**changed: Any) -> bytes:
    fields: dict[str, Any] = {
        "protocol": PROTOCOL,
        "instance": "bad",
        "incarnation": "1",
        "model": "unset",
        "engine": "scripted",
        "max_running": 8,
        "kv_tokens": 1024,
    }
    return encode(Hello(**(fields | changed)))


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (b"\xff\xff", "malformed"),
        (hello()[:-4], "malformed"),
        (encode(Attach(protocol=PROTOCOL, term=1)), "no_hello"),
        (hello(protocol=0), "protocol"),
        (hello(protocol=1), "protocol"),
        (hello(protocol=PROTOCOL + 1), "protocol"),
        (hello(model="qwen3-00"), "model"),
        (hello(version=9), "unknown_version"),
        (hello(source="whoever has it"), "invalid"),
        (hello(source="10.0.0.5:70000"), "invalid"),
    ],
)
async def test_who_is_not_one_of_ours_is_told_why_and_harms_nobody(
    plane: Plane, first: bytes, code: str
) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    good = await plane.working("good")
    await trainer.ask([0])
    (sample,) = await good.work(1)
    bad = await plane.dial()
    await bad.send(first)
    assert (await bad.expect(Reject)).code == code
    await bad.closed()
    assert [told["reason"] for told in plane.told("PeerRefused")] == [code]
    await good.report({sample.work.row: 3}, {sample.work.row: "stop"})
    assert (await trainer.groups(1))[0].samples[0].token_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "what", ["garbage", "text", "a trainer's frame", "a gap", "another's row", "a newer policy"]
)
async def test_a_joined_peer_that_breaks_the_protocol_is_cut_and_its_samples_go_on(
    plane: Plane, what: str
) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    bad = await plane.working("bad")
    await trainer.ask([0], n=2)
    samples = await bad.work(2)
    row = samples[0].work.row
    seq = await bad.report({row: 4})
    await bad.acknowledged(seq)
    code, other = "malformed", None
    match what:
        case "garbage":
            await bad.wire.send(b"\x92\xa8progress\x90")
        case "text":
            await bad.wire.socket.send_str("hello")
        case "a trainer's frame":
            await bad.wire.send(GroupsStored(purpose="train", ids=[0]))
            code = "unexpected"
        case "a gap":
            bad.samples[row].tokens += [0, 0]
            await bad.report({row: 1})
            code = "gap"
        case "another's row":
            other = await plane.working("other")
            await trainer.ask(range(1, 10))
            (theirs, *_) = await other.work(1)
            bad.samples[theirs.work.row] = theirs
            await bad.report({theirs.work.row: 3})  # its lease, from another instance: discarded, no more
            await until(lambda: plane.manager.groups.account.discarded["superseded"] == 3)
            await bad.wire.send(b"")
        case _:
            await bad.report({row: 1}, version=3)
            code = "unknown_version"
    assert (await bad.wire.expect(Reject)).code == code
    await until(lambda: "bad" not in plane.manager.links)
    good = other or await plane.working("good")
    again = await good.work(1)
    while not any(sample.work.key == samples[0].work.key for sample in again):
        again += await good.work(1)
    (first,) = [sample for sample in again if sample.work.key == samples[0].work.key]
    assert first.tokens == [1, 2, 3, 4]
    assert len(plane.told("PeerRefused")) == 1


async def test_a_token_beyond_the_vocabulary_reaches_nobody(tmp_path: Path) -> None:
    """Else it would end whoever looks its embedding up: another engine, the actor."""
    async with live_plane(tmp_path, vocabulary=10) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        bad = await plane.working("bad")
        await trainer.ask([0])
        (sample,) = await bad.work(1)
        row = sample.work.row
        seq = await bad.report({row: 9})  # tokens 1 to 9
        await bad.acknowledged(seq)
        await bad.report({row: 1})
        assert (await bad.wire.expect(Reject)).code == "vocabulary"
        (told,) = plane.told("PeerRefused")
        assert "10; the model has tokens 0 to 9" in str(told)
        good = await plane.working("good")
        (again,) = await good.work(1)
        assert again.tokens == list(range(1, 10))


async def test_who_says_nothing_is_let_go(tmp_path: Path) -> None:
    async with live_plane(tmp_path, hello_timeout_s=0.1) as plane:
        wire = await plane.dial()
        assert (await wire.expect(Reject)).code == "no_hello"
        await wire.closed()


@pytest.mark.filterwarnings("ignore")
async def test_events_that_cannot_be_told_end_nothing(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    class Deaf(list[Any]):
        def append(self, told: Any) -> None:
            raise ValueError("Out of range float values are not JSON compliant")

    plane.events = Deaf()
    plane.change(reconnect_grace_s=0.0)
    trainer = await plane.trainer()
    await trainer.publish(0)
    agent = await plane.working("a")
    await agent.wire.socket.close()
    await until(lambda: "a" not in plane.manager.links)  # the tick saw it, and had something to tell
    other = await plane.working("b")
    await trainer.ask([0])
    await other.work(1)
    assert "InstanceLeft could not be told" in capsys.readouterr().err


async def test_an_oversized_message_ends_its_connection_alone(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = await plane.agent("good")
    monkeypatch.setattr(manager_module, "MAX_FRAME_BYTES", 1000)
    bad = await plane.dial()
    await bad.send(b"\0" * 2000)
    await bad.closed()
    assert not good.wire.socket.closed
    assert list(plane.manager.links) == ["good"]


# -- failures ---------------------------------------------------------------------------------------


async def test_an_engine_that_dies_is_told_with_its_last_words_and_its_samples_go_on(plane: Plane) -> None:
    trainer, agent, sample = await plane.one_sample()
    await agent.report({sample.work.row: 4}, {sample.work.row: "died"}, message="out of memory")
    await agent.wire.send(EngineDied(message="killed by SIGKILL", tail="CUDA error"))
    weights = await agent.wire.expect(Weights)
    await trainer.ask([1])
    early = [one for frame in await agent.wire.passed(Assign) for one in frame.work]
    # Its own sample may have come back before the manager heard of the death; nothing is given to it after.
    assert {one.key for one in early} <= {sample.work.key}
    assert plane.manager.groups.queued == 2 - len(early)
    assert plane.told("EngineDied") == [
        {
            "instance": "a",
            "error": "killed by SIGKILL",
            "tail": "CUDA error",
            "words": "CUDA error",
            "others": [],
        }
    ]
    await agent.loaded(weights)
    given = early + [one.work for one in await agent.work(2 - len(early))]
    priors = {one.key: np.frombuffer(one.prior, "<i4").tolist() for one in given}
    assert len(priors) == 2
    assert priors[sample.work.key] == [1, 2, 3, 4]
    assert plane.manager.groups.account.discarded == {}


async def test_a_sample_that_fails_everywhere_is_quarantined_with_its_evidence_and_told_in_the_end(
    plane: Plane,
) -> None:
    trainer = await plane.trainer()
    await trainer.publish(0)
    agents = [await plane.working(name) for name in ("a", "b")]
    await trainer.ask([5])
    tries = 0
    seeds = set()

    async def fail(agent: ScriptedAgent) -> None:
        nonlocal tries
        while True:
            (sample,) = await agent.work(1)
            tries += 1
            seeds.add(sample.work.seed)
            await agent.report(
                {sample.work.row: 1}, {sample.work.row: "failed"}, message=f"{agent.name} said no"
            )

    failing = [asyncio.create_task(fail(agent)) for agent in agents]
    failed = await trainer.wire.expect(Failed)
    for task in failing:
        task.cancel()
    await asyncio.gather(*failing, return_exceptions=True)
    assert (failed.purpose, failed.ids) == ("train", [5])
    assert "a said no" in failed.message
    assert "b said no" in failed.message
    assert tries == 6
    assert len(seeds) == 4  # another one after each time
    aside = plane.told("SampleQuarantined")
    assert len(aside) == 4
    assert aside[0]["prompt"] == [7, 8]
    assert plane.manager.groups.account.discarded == {"quarantined": 6}
    # And not delivered as if it were data; the trainer may give it up.
    await trainer.wire.nothing(Done)
    assert not any(isinstance(frame, Done) for frame in trainer.wire.seen)
    await trainer.wire.send(GroupsStored(purpose="train", ids=[5]))
    await until(lambda: not plane.manager.groups.requests)


async def test_a_trainer_that_does_not_read_slows_nobody_and_is_cut(tmp_path: Path) -> None:
    async with live_plane(tmp_path, send_timeout_s=0.3) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        agent = await plane.working("a", max_running=512, kv_tokens=1 << 30)
        # The one that does not read: it asks, and then its receive buffer is full.
        raw = socket.create_connection(("127.0.0.1", plane.port))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await trainer.ask(range(64), limit=20_000)
        samples = await agent.work(64)
        key = "dGhlIHNhbXBsZSBub25jZQ=="
        raw.sendall(
            f"GET /v1/trainer HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Authorization: Bearer {TOKEN}\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        attach = encode(Attach(protocol=PROTOCOL, term=2))
        raw.sendall(bytes([0x82, 0x80 | len(attach), 0, 0, 0, 0]) + attach)
        await until(lambda: plane.requester.term == 2)
        slow = plane.trainer_connection
        rows = [sample.work.row for sample in samples]
        for row in rows:
            await agent.report({row: 20_000}, {row: "length"})
        seq = agent.seq
        with within(2.0):
            await agent.acknowledged(seq)
        assert slow is not None
        await until(lambda: plane.trainer_connection is not slow)
        raw.close()
        plane.change(send_timeout_s=60.0)
        # A trainer that reads gets all of it.
        good = await plane.trainer(term=3)
        await good.ask(range(64), limit=20_000)
        groups = await good.groups(64)
        assert sum(group.token_count for group in groups.values()) == 64 * 20_000
        plane.exact()


async def test_an_agent_that_does_not_read_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "SEND_LIMIT_BYTES", 10_000)
    async with live_plane(tmp_path) as plane:
        trainer = await plane.trainer()
        await trainer.publish(0)
        agent = await plane.working("a", max_running=4096, kv_tokens=1 << 30)
        await trainer.ask(range(1000))
        await agent.wire.closed()
        await until(lambda: "a" not in plane.manager.links)
        plane.exact()
