"""The door of a fleet over real sockets and a real ledger: requests, ids, streams, policies, keys."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
from aiohttp import web

from gyre.data import TextTokenizer
from gyre.ports.bounds import PortBounds
from gyre.rollouts.manager.door.door import BODIES_BYTES
from gyre.rollouts.plane import updates
from gyre.rollouts.plane.door_ledger import Asked, DoorLedger
from gyre.rollouts.protocol.credentials import digest_of
from gyre.rollouts.protocol.frames import LoadFailed, Weights
from gyre.rollouts.protocol.progress import End, GenerationProgress
from gyre.rollouts.samples import VersionRun
from tests.data.small import write_tokenizer
from tests.fleet.fleet_plane import PROMPT, FleetPlane, finish, fleet_plane, generate_body
from tests.rollouts.machine.small_groups import groups_with, report
from tests.rollouts.plane import small_folder, until


def hold_commits(plane: FleetPlane) -> asyncio.Event:
    """From now on nothing is written to the ledger until the event is set."""
    written = plane.manager.shell.write
    held = asyncio.Event()
    loop = asyncio.get_running_loop()

    def write(batch: Any) -> None:
        asyncio.run_coroutine_threadsafe(held.wait(), loop).result(60.0)
        written(batch)

    plane.manager.shell.commits._write = write
    return held


COMPLETION = {"prompt": PROMPT, "max_tokens": 100}


async def test_generate_answers_as_sglang_does(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    asking = plane.asking("one", return_logprob=True)
    await finish(agent, 3)
    status, told = await asking
    assert status == 200
    assert told["output_ids"] == [1, 2, 3]
    meta = told["meta_info"]
    assert meta["id"] == "one"
    assert meta["finish_reason"] == {"type": "stop", "matched": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, 3)
    assert meta["weight_version"] == "0"
    assert meta["policy_versions"] == [[0, 0, 3]]
    assert meta["output_token_logprobs"] == [[-1.0, 1, None], [-2.0, 2, None], [-3.0, 3, None]]


async def test_completions_answer_as_openai_does(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    body = {**COMPLETION, "n": 2, "logprobs": 1, "rid": "two"}
    asking = asyncio.create_task(plane.post("/v1/completions", body, "lab-key"))
    await finish(agent, 2, count=2)
    status, told = await asking
    assert status == 200
    assert (told["object"], told["id"], told["model"]) == ("text_completion", "two", "fleet")
    assert [choice["index"] for choice in told["choices"]] == [0, 1]
    assert told["choices"][0]["token_ids"] == [1, 2]
    assert told["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -2.0]
    assert told["choices"][0]["finish_reason"] == "stop"
    assert told["choices"][0]["policy_versions"] == [[0, 0, 2]]
    assert told["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}


async def test_nothing_is_told_before_it_is_in_the_ledger(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    held = hold_commits(plane)
    asking = plane.asking("one")
    await finish(agent, 3)
    for _ in range(5):
        ticks = plane.ticks
        await until(lambda ticks=ticks: plane.ticks > ticks + 1)
    assert not asking.done()
    held.set()
    status, _ = await asking
    assert status == 200


async def test_the_same_id_gets_the_same_tokens(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    first = plane.asking("one")
    await plane.open(1)
    second = plane.asking("one")
    await finish(agent, 3)
    answers = [await first, await second, await plane.generate("one")]
    assert answers[0] == answers[1] == answers[2]
    assert plane.manager.groups.account.generated == 3
    with_stream = await plane.heard("/generate", generate_body("one", stream=True))
    assert [with_stream[-1], with_stream[-2]] == ["[DONE]", answers[0][1]]


async def test_an_id_outlives_its_manager(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    done = plane.asking("done")
    await finish(agent, 2)
    before = await done
    asking = plane.asking("under-way")
    (sample,) = await agent.work(1)
    await agent.report({sample.work.row: 4})
    await plane.told_tokens("under-way", 4)
    await plane.kill()
    assert (await asking)[0] == 503
    await plane.start()
    assert await plane.generate("done") == before
    again = plane.asking("under-way")
    await agent.back()
    (row,) = agent.samples
    await agent.report({row: 2}, {row: "stop"})
    status, told = await again
    assert status == 200
    assert told["output_ids"] == [1, 2, 3, 4, 5, 6]
    assert plane.manager.groups.missing_tokens() == 0


async def test_a_sample_goes_on_when_its_instance_dies(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    stream = plane.stream("/v1/completions", {**COMPLETION, "rid": "one", "stream": True})
    first = asyncio.create_task(anext(stream))
    (sample,) = await agent.work(1)
    await agent.report({sample.work.row: 4})
    assert (await first)["choices"][0]["token_ids"] == [1, 2, 3, 4]
    await agent.wire.socket.close()
    other = await plane.working("b")
    (sample,) = await other.work(1)
    assert sample.tokens == [1, 2, 3, 4]
    await other.report({sample.work.row: 2}, {sample.work.row: "length"})
    rest = [event async for event in stream]
    assert rest[-1] == "[DONE]"
    assert [token for one in rest[:-1] for token in one["choices"][0]["token_ids"]] == [5, 6]
    assert rest[-2]["choices"][0]["finish_reason"] == "length"


async def test_an_answer_says_which_version_made_which_token(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    asking = plane.asking("one")
    (sample,) = await agent.work(1)
    await agent.report({sample.work.row: 2})
    assert (await plane.publish(1))[0] == 200
    agent.weights = None
    await agent.load()
    await agent.report({sample.work.row: 3}, {sample.work.row: "stop"})
    _, told = await asking
    assert told["meta_info"]["policy_versions"] == [[0, 0, 2], [1, 2, 5]]
    assert told["meta_info"]["weight_version"] == "1"


async def test_an_exact_version_holds_a_publish_up_until_it_is_answered(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    asking = plane.asking("pinned", policy={"exact": 0})
    (sample,) = await agent.work(1)
    assert (await plane.publish(1))[0] == 200
    late = await plane.generate("late", policy={"exact": 0})
    assert (late[0], late[1]["code"]) == (409, "policy_gone")
    await plane.settled()
    assert plane.manager.groups.served_version == 0
    await agent.report({sample.work.row: 3}, {sample.work.row: "stop"})
    _, told = await asking
    assert told["meta_info"]["policy_versions"] == [[0, 0, 3]]
    await until(lambda: plane.manager.groups.served_version == 1)


async def test_a_bounded_version_waits_until_it_is_served(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    assert (await plane.generate("soon", policy={"at_least": 1}))[1]["code"] == "policy_unknown"
    pinned = plane.asking("pinned", policy={"exact": 0})
    (sample,) = await agent.work(1)
    await plane.publish(1)
    asking = plane.asking("one", policy={"at_least": 1})
    await plane.open(2)
    await agent.report({sample.work.row: 1}, {sample.work.row: "stop"})
    assert (await pinned)[0] == 200
    agent.weights = None
    await agent.load()
    await finish(agent, 2)
    _, told = await asking
    assert told["meta_info"]["policy_versions"] == [[1, 0, 2]]


async def test_a_wish_for_a_version_is_its_samples_and_stops_nobody_else(plane: FleetPlane) -> None:
    """The version is published, and no instance has it yet: who asks for nothing of the kind is served, before the one
    that waits, beside it, and after its end."""
    first, second = await plane.serving("a", "b")
    await plane.publish(1)
    newer = await first.wire.expect(Weights)
    waits = plane.asking("waits", "other", policy={"at_least": 1})
    await plane.open(1)
    asking = [plane.asking(f"any-{number}") for number in range(12)]
    await asyncio.gather(finish(first, 2, count=6), finish(second, 2, count=6))
    assert {(await one)[1]["meta_info"]["weight_version"] for one in asking} == {"0"}
    assert (await plane.get("/health"))[0] == 200
    await first.loaded(newer)  # the wish is met by whoever can
    await finish(first, 3)
    assert (await waits)[1]["meta_info"]["policy_versions"] == [[1, 0, 3]]
    again = plane.asking("again", "other", policy={"at_least": 1})
    await first.work(1)
    await first.wire.socket.close()  # nobody else has it
    await until(lambda: plane.manager.groups.waiting_for_policy == 1)
    later = plane.asking("later")
    await finish(second, 2)
    assert (await later)[1]["meta_info"]["policy_versions"] == [[0, 0, 2]]
    again.cancel()


async def test_a_version_that_nobody_can_load_fails_who_asks_for_it_and_nobody_else(tmp_path: Path) -> None:
    async with fleet_plane(tmp_path, answer_within_s=1.0) as plane:
        (agent,) = await plane.serving("a")
        await plane.publish(1)
        await agent.wire.expect(Weights)
        await agent.wire.send(LoadFailed(version=1, error="a tensor has another shape"))
        waits = plane.asking("waits", "other", policy={"at_least": 1})
        status, told = await waits
        if told["code"] == "unfinished":  # it asked a moment before its request had waited for as long
            await until(lambda: plane.door.ledger.requests()["waits"].failed != "")
            status, told = await plane.generate("waits", "other", policy={"at_least": 1})
        assert (status, told["code"]) == (500, "cannot_generate")
        assert "No instance has version 1" in told["message"]
        assert "a: a tensor has another shape" in told["message"]
        asking = plane.asking("any")
        await finish(agent, 2)
        assert (await asking)[0] == 200


async def test_whoever_published_can_ask_who_serves_the_version_and_why_nobody_does(
    plane: FleetPlane,
) -> None:
    async def look(path: str) -> Any:
        return json.loads((await plane.get(path))[1])

    first, second = await plane.serving("a", "b")
    assert (await plane.get("/v1/policies/1"))[0] == 404
    assert (await plane.get("/v1/policies/nonsense"))[0] == 404
    await plane.publish(1)
    newer = [await agent.wire.expect(Weights) for agent in (first, second)]
    told = await look("/v1/policies/1")
    assert (told["state"], told["loading"], told["served_by"]) == ("loading", ["a", "b"], [])
    assert (await look("/v1/policies"))["served"] == 0
    await first.wire.send(LoadFailed(version=1, error="norm.weight holds NaN"))
    await until(lambda: updates.refusals(plane.manager.plane, 1) != {})
    assert (await look("/v1/policies/1"))["state"] == "loading"
    assert not plane.told("PolicyNotServed")
    await second.wire.send(LoadFailed(version=1, error="norm.weight holds NaN"))
    await until(lambda: plane.told("PolicyNotServed"))
    words = {"a": "norm.weight holds NaN", "b": "norm.weight holds NaN"}
    assert plane.told("PolicyNotServed") == [{"version": 1, "refused": words}]
    told = await look("/v1/policies/1")
    assert (told["state"], told["refused"], told["served_by"]) == ("refused", words, [])
    told = await look("/v1/policies")
    assert (told["newest"], told["served"], told["instances"]) == (1, 0, {"a": 0, "b": 0})
    assert (await look("/v1/models"))["data"][0]["policy_version"] == 0
    asking = plane.asking("one")  # the version before is served on
    await asyncio.gather(finish(first, 2), return_exceptions=True)
    assert (await asking)[1]["meta_info"]["weight_version"] == "0"
    before = len(plane.told("PolicyServed"))
    await second.loaded(newer[1])
    await until(lambda: len(plane.told("PolicyServed")) == before + 1)
    told = await look("/v1/policies/1")
    assert (told["state"], told["served_by"], told["refused"]) == ("served", ["b"], {"a": words["a"]})
    assert (await look("/v1/policies/0"))["state"] == "served"
    await first.loaded(newer[0])
    await until(lambda: plane.manager.groups.instances["a"].version == 1)
    assert (await look("/v1/policies/0"))["state"] == "superseded"
    assert len(plane.told("PolicyNotServed")) == 1


async def test_what_one_key_asks_for_takes_so_many_bytes_and_keeps_no_other_out(tmp_path: Path) -> None:
    """Prompts count as well as answers, those of open requests as well as kept ones, and what is deleted no more."""
    async with fleet_plane(tmp_path, key_bytes=100_000, keep_tokens=4) as plane:
        (agent,) = await plane.serving("a")
        asking = [plane.asking(f"long-{number}", input_ids=[7] * 5000) for number in range(2)]
        await plane.open(2)
        async with asyncio.timeout(5.0):  # what is taken would wait for an engine
            status, told = await plane.generate("another", input_ids=[7] * 5000)
        assert (status, told["code"]) == (429, "key_full")
        assert "no more than 100000" in told["message"]
        theirs = plane.asking("theirs", "other", input_ids=[7] * 5000)
        await plane.open(3)
        await finish(agent, 3, count=3)
        assert [(await one)[0] for one in (*asking, theirs)] == [200] * 3
        assert (await plane.generate("kept", input_ids=[7] * 5000))[1]["code"] == "key_full"
        taken = plane.manager.status()["door"]["key_bytes"]
        assert taken == {"lab": 2 * (2048 + 1024 + 8 * 5003), "other": 2048 + 1024 + 8 * 5003}
        # So many answers are kept that only those who have less than their share may ask for more.
        assert (await plane.generate("short", input_ids=[7]))[1]["code"] == "ledger_full"
        more = plane.asking("more", "other", input_ids=[7])
        await finish(agent, 1)
        assert (await more)[0] == 200
        for number in range(2):
            await plane.delete(f"long-{number}")
        again = plane.asking("again", input_ids=[7] * 5000)
        await finish(agent, 1)
        assert (await again)[0] == 200
        await plane.kill()
        await plane.start()
        assert plane.manager.status()["door"]["key_bytes"]["lab"] == 2048 + 1024 + 8 * 5001


async def test_bodies_of_one_key_are_read_so_many_at_a_time(plane: FleetPlane) -> None:
    door = plane.door
    (agent,) = await plane.serving("a")
    whose = plane.asking("whose")
    await finish(agent, 1)
    assert (await whose)[0] == 200
    owner = door.ledger.requests()["whose"].owner
    door._reading[owner] = BODIES_BYTES
    status, told = await plane.generate("one")
    assert (status, told["code"]) == (429, "too_much_at_once")
    del door._reading[owner]
    asking = plane.asking("one")
    await finish(agent, 1)
    assert (await asking)[0] == 200
    assert not door._reading


async def test_a_publish_is_durable_when_it_is_answered(plane: FleetPlane) -> None:
    status, told = await plane.publish(3)
    assert status == 200
    assert told["version"] == 3
    assert plane.manager.versions.durable == 3
    assert await plane.publish(3) == (200, told)
    assert (await plane.publish(2))[1]["code"] == "policy_old"
    (plane.tmp_path / "v3" / "model.safetensors").write_bytes(b"other")
    assert (await plane.publish(3))[0] == 409
    await plane.kill()
    await plane.start()
    assert plane.manager.versions.newest == 3


async def test_a_source_on_the_weight_plane_is_a_publish(plane: FleetPlane) -> None:
    body = {"version": 1, "checksum": "c" * 16, "sources": ["10.0.0.5:7000"], "model": "unset"}
    assert await plane.post("/v1/policies", body, "trainer-key") == (
        200,
        {"version": 1, "checksum": "c" * 16},
    )
    agent = await plane.agent("a")
    assert agent.weights is not None
    assert agent.weights.sources == ["10.0.0.5:7000"]


async def test_a_folder_is_served_to_other_machines(plane: FleetPlane) -> None:
    await plane.publish(0)
    published = plane.manager.versions.published
    assert published is not None
    (source,) = published.sources
    await plane.kill()
    await plane.start()
    weights = plane.manager.versions
    await until(lambda: weights.published is not None and weights.published.sources != [source])


@pytest.mark.parametrize(
    ("key", "path", "status"),
    [
        ("lab", "/generate", 401),
        ("trainer", "/generate", 401),
        ("spot", "/v1/completions", 401),
        ("other", "/v1/policies", 401),
        ("spot", "/v1/policies", 401),
    ],
)
async def test_a_key_may_do_what_its_scopes_say(plane: FleetPlane, key: str, path: str, status: int) -> None:
    if key == "lab":
        await plane.revoke("lab")
    assert (await plane.post(path, {}, f"{key}-key"))[0] == status


async def test_a_door_key_admits_no_instance(plane: FleetPlane) -> None:
    with pytest.raises(Exception, match="401"):
        await plane.agent("a", token="lab-key")
    await plane.agent("b", token="spot-key")


async def test_another_keys_id_is_refused(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    asking = plane.asking("one")
    await finish(agent, 1)
    await asking
    status, told = await plane.generate("one", key="other")
    assert (status, told["code"]) == (403, "not_yours")
    assert "output_ids" not in told
    for path in ("/v1/requests/one",):
        assert (await plane.get(path, "other-key"))[0] == 403
        async with plane.session().delete(
            f"{plane.url}{path}", headers={"Authorization": "Bearer other-key"}
        ) as reply:
            assert reply.status == 403
    assert (await plane.generate("one"))[0] == 200


async def test_an_id_stands_for_one_request(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    asking = plane.asking("one")
    await finish(agent, 1)
    await asking
    for other in ({"input_ids": [9]}, {"params": {"temperature": 0.5}}, {"policy": {"at_least": 0}}):
        status, told = await plane.generate("one", **other)
        if other == {"policy": {"at_least": 0}}:  # the same as no policy
            assert status == 200
        else:
            assert (status, told["code"]) == (422, "other_request")


async def test_a_revoked_key_hears_no_more(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    asking = plane.asking("one", key="other")
    (sample,) = await agent.work(1)
    await plane.revoke("other")
    await agent.report({sample.work.row: 1}, {sample.work.row: "stop"})
    assert (await asking)[0] == 401


async def test_a_key_that_was_just_made_works(plane: FleetPlane) -> None:
    """The journal has it, and the manager has not looked since."""
    await plane.kill()
    await plane.start(tokens_every_s=1e6)
    (agent,) = await plane.serving("a")
    plane.rows = {**plane.rows, "new": {**plane.rows["other"], "digest": digest_of("new-key")}}
    asking = plane.asking("one", key="new")
    await finish(agent, 1)
    assert (await asking)[0] == 200
    plane.rows = {**plane.rows, "site": {**plane.rows["spot"], "digest": digest_of("site-key")}}
    with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):  # it dials again, and comes in
        await plane.agent("b", token="site-key")
    await plane.agent("b", token="site-key")


async def test_forged_keys_share_a_look_at_the_store(plane: FleetPlane) -> None:
    await plane.kill()
    await plane.start(tokens_every_s=1e6)
    looked, rows = 0, plane.rows

    def snapshot_rows(kind: str) -> dict[str, Any]:
        nonlocal looked
        looked += 1
        return rows

    plane.store.snapshot_rows = snapshot_rows  # type: ignore[method-assign]
    forged = [plane.asking(f"id-{at}", key=f"forged-{at}") for at in range(200)]
    assert {status for status, _ in await asyncio.gather(*forged)} == {401}
    assert looked < 20


async def test_a_thousand_clients_that_dial_before_they_ask_are_answered(plane: FleetPlane) -> None:
    assert (await plane.publish(0))[0] == 200
    agent = await plane.working("a", max_running=2000, kv_tokens=1 << 24)
    links = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", plane.port) for _ in range(1000)))
    for at, (_, writer) in enumerate(links):
        body = json.dumps(generate_body(f"id-{at}")).encode()
        writer.write(
            b"POST /generate HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer lab-key\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
    await finish(agent, 1, count=1000)
    statuses = [await reader.readline() for reader, _ in links]
    assert set(statuses) == {b"HTTP/1.1 200 OK\r\n"}
    for _, writer in links:
        writer.close()


async def test_a_stream_tells_what_came_while_it_was_written(
    plane: FleetPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is committed while an earlier event is on its way."""
    (agent,) = await plane.serving("a")
    written = web.StreamResponse.write
    door = plane.door
    ended = asyncio.Event()

    async def slow(response: web.StreamResponse, data: Any) -> None:
        await written(response, data)
        if not ended.is_set():
            ended.set()
            known = door.ledger.requests()["one"]
            await until(lambda: known.ended_at is not None)

    monkeypatch.setattr(web.StreamResponse, "write", slow)
    hearing = asyncio.create_task(
        plane.heard("/v1/completions", {**COMPLETION, "rid": "one", "stream": True})
    )
    (sample,) = await agent.work(1)
    await agent.report({sample.work.row: 2})
    await ended.wait()
    await agent.report({sample.work.row: 3}, {sample.work.row: "stop"})
    *events, last = await hearing
    assert last == "[DONE]"
    assert [token for one in events for token in one["choices"][0]["token_ids"]] == [1, 2, 3, 4, 5]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_request_that_was_taken_is_known_by_a_model_that_takes_less(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    asking = plane.asking("one")
    await finish(agent, 3)
    told = await asking
    (small_folder(plane.tmp_path / "v1", 1).path / "config.json").write_text(
        '{"model_type": "tiny", "hidden_size": 8, "max_position_embeddings": 50}'
    )
    assert (await plane.publish(1))[0] == 200
    assert await plane.generate("one") == told
    status, refused = await plane.generate("two")
    assert (status, refused["code"]) == (422, "invalid")
    assert "more than the 50 that the model takes" in refused["message"]


async def test_policies_come_from_the_folders_that_they_may_come_from(tmp_path: Path) -> None:
    allowed = tmp_path / "policies"
    allowed.mkdir()
    async with fleet_plane(tmp_path, policy_folders=(allowed,)) as plane:
        elsewhere = small_folder(tmp_path / "elsewhere", 1).path
        linked = small_folder(allowed / "linked", 1).path
        (linked / "extra.txt").symlink_to("/etc/hostname")
        for path in (elsewhere, linked, allowed / ".." / "elsewhere"):
            status, told = await plane.post("/v1/policies", {"version": 1, "path": str(path)}, "lab-key")
            assert (status, told["code"]) == (422, "no_policy")
            assert "rollouts.door.policy_folders" in told["message"]
        good = small_folder(allowed / "good", 1).path
        status, told = await plane.post("/v1/policies", {"version": 1, "path": str(good)}, "lab-key")
        assert status == 200, told


async def test_ten_thousand_of_one_id_are_one_sample(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    first = [plane.asking("one") for _ in range(60)]
    (sample,) = await agent.work(1)
    door = plane.door
    await until(lambda: sum(task.done() for task in first) >= 52)
    assert door.status()["door"]["waiting"] <= 8
    assert door.ledger.open_count == 1
    await agent.report({sample.work.row: 1}, {sample.work.row: "stop"})
    statuses = [(await task)[0] for task in first]
    assert statuses.count(200) == 8
    assert statuses.count(409) == 52


async def test_a_deleted_request_is_gone(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    asking = plane.asking("one")
    await agent.work(1)
    headers = {"Authorization": "Bearer lab-key"}
    async with plane.session().delete(f"{plane.url}/v1/requests/one", headers=headers) as reply:
        assert reply.status == 200
    assert (await asking)[1]["code"] == "deleted"
    assert (await plane.get("/v1/requests/one", "lab-key"))[0] == 404


async def test_an_aborted_request_is_answered_with_what_is_there(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    asking = plane.asking("one", return_logprob=True)
    others = plane.asking("theirs", key="other")
    one, theirs = sorted(await agent.work(2), key=lambda sample: sample.work.row)
    await agent.report({one.work.row: 4})
    await plane.told_tokens("one", 4)
    loads = {"num_running_reqs": 1, "num_waiting_reqs": 0, "dp_rank": 0}
    assert json.loads((await plane.get("/v1/loads?include=core", "lab-key"))[1]) == {"loads": [loads]}
    assert await plane.post("/abort_request", {"abort_all": True}, "lab-key") == (200, {"aborted": ["one"]})
    status, told = await asking
    assert status == 200
    assert told["output_ids"] == [1, 2, 3, 4]
    meta = told["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert len(meta["output_token_logprobs"]) == 4
    assert meta["weight_version"] == "0"
    assert (await plane.get("/v1/requests/one", "lab-key"))[0] == 404
    _, loads = await plane.get("/v1/loads", "lab-key")
    assert json.loads(loads)["loads"][0]["num_running_reqs"] == 0
    await agent.report({theirs.work.row: 1}, {theirs.work.row: "stop"})
    assert (await others)[1]["output_ids"] == [1]


async def test_one_request_is_aborted_before_it_has_a_token(plane: FleetPlane) -> None:
    """It waits for a place; the other of the key goes on, and an id that is not there is no error."""
    assert (await plane.publish(0))[0] == 200
    one, two = plane.asking("one"), plane.asking("two")
    await plane.open(2)
    for named, aborted in (("one", ["one"]), ("one", []), ("nobody", [])):
        assert await plane.post("/abort_request", {"rid": named}, "lab-key") == (200, {"aborted": aborted})
    status, told = await one
    assert (status, told["output_ids"]) == (200, [])
    assert told["meta_info"]["finish_reason"]["type"] == "abort"
    assert "weight_version" not in told["meta_info"]
    agent = await plane.working("a")
    await finish(agent, 2)
    assert (await two)[1]["output_ids"] == [1, 2]


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": "one", "abort_all": True}, {"abort_all": 1}, []])
async def test_an_abort_says_what_it_ends(plane: FleetPlane, body: Any) -> None:
    assert (await plane.post("/abort_request", body, "lab-key"))[1]["code"] == "invalid"
    assert (await plane.post("/abort_request", {"abort_all": True}, "trainer-key"))[0] == 401


@pytest.mark.parametrize(
    ("path", "body"), [("/generate", generate_body("one", stream=True)), ("/v1/completions", COMPLETION)]
)
async def test_the_stream_of_an_aborted_request_ends(
    plane: FleetPlane, path: str, body: dict[str, Any]
) -> None:
    (agent,) = await plane.serving("a")
    hearing = asyncio.create_task(plane.heard(path, {**body, "rid": "one", "stream": True}))
    (sample,) = await agent.work(1)
    await agent.report({sample.work.row: 2})
    await plane.told_tokens("one", 2)
    await plane.post("/abort_request", {"rid": "one"}, "lab-key")
    *_, last, done = await hearing
    assert done == "[DONE]"
    ended = (
        last["meta_info"]["finish_reason"]["type"]
        if path == "/generate"
        else last["choices"][0]["finish_reason"]
    )
    assert ended == "abort"


async def test_the_door_is_its_only_worker(plane: FleetPlane) -> None:
    assert (await plane.get("/workers", "nobody"))[0] == 401
    _, body = await plane.get("/workers", "lab-key")
    (worker,) = json.loads(body)["workers"]
    assert (worker["url"], worker["is_healthy"]) == (plane.url, False)


async def test_text_has_special_tokens_where_they_are_asked_for(tmp_path: Path) -> None:
    words = TextTokenizer(write_tokenizer(tmp_path / "words"))
    async with fleet_plane(tmp_path, tokenizer=words) as plane:
        (agent,) = await plane.serving("a")
        wants: list[tuple[dict[str, Any], str]] = [
            ({}, ""),
            ({"skip_special_tokens": True, "no_stop_trim": True}, ""),
            ({"skip_special_tokens": False}, "<|im_start|>"),
            ({"skip_special_tokens": False, "no_stop_trim": True}, "<|im_start|><|im_end|>"),
        ]
        asking = plane.asking("one", params=wants[0][0])
        await finish(agent, 2)  # the tokens 1 and 2
        await asking
        for params, text in wants:  # the same request, told otherwise
            _, told = await plane.generate("one", params=params)
            assert (told["text"], told["output_ids"]) == (text, [1, 2])


def test_clients_close_idle_connections_before_the_door_does() -> None:
    of_aiohttp_s, of_httpx_s = 15.0, httpx.Limits().keepalive_expiry
    assert of_httpx_s is not None
    assert PortBounds().keep_alive_s > max(of_aiohttp_s, of_httpx_s)


async def test_a_prompt_that_kills_engines_fails_for_good(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    asking = plane.asking("poison")
    for _ in range(3):
        (sample,) = await agent.work(1)
        await agent.report({}, {sample.work.row: "failed"}, message="no such token")
    status, told = await asking
    assert (status, told["code"]) == (500, "cannot_generate")
    assert "no such token" in told["message"]
    assert await plane.generate("poison") == (status, told)
    await plane.kill()
    await plane.start()
    assert await plane.generate("poison") == (status, told)


async def test_models_and_health(plane: FleetPlane) -> None:
    assert (await plane.get("/health", "lab-key"))[0] == 503
    await plane.serving("a")
    await until(lambda: any(one.admitted for one in plane.manager.groups.instances.values()))
    assert (await plane.get("/health", "nobody"))[0] == 200
    _, body = await plane.get("/v1/models", "lab-key")
    assert b'"id":"fleet"' in body
    _, body = await plane.get("/v1/policies", "lab-key")
    assert body == b'{"newest":0,"served":0,"instances":{"a":0}}'


async def test_a_delete_is_answered_after_its_commit(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    asking = plane.asking("one")
    await finish(agent, 1)
    await asking
    held = hold_commits(plane)
    headers = {"Authorization": "Bearer lab-key"}
    deleting = asyncio.ensure_future(
        plane.session().delete(f"{plane.url}/v1/requests/one", headers=headers).__aenter__()
    )
    door = plane.door
    await until(lambda: "one" not in door.ledger.requests())
    for _ in range(5):
        ticks = plane.ticks
        await until(lambda ticks=ticks: plane.ticks > ticks + 1)
    assert not deleting.done()
    held.set()
    reply = await deleting
    assert reply.status == 200
    reply.close()


def test_the_models_end_tokens_are_no_part_of_what_was_asked() -> None:
    """A newer policy may have others, and the next manager may know none: the same id is the same request."""
    sampling = {"max_new_tokens": 4, "stop_token_ids": [5], "ignore_eos": False}
    prompt = np.array(PROMPT, np.int32)
    asked = [Asked("one", prompt, 1, sampling, stops=stops) for stops in ((), (2,), (2, 3))]
    assert len({one.digest for one in asked}) == 1
    assert [one.drawing()["stop_token_ids"] for one in asked] == [[5], [2, 5], [2, 3, 5]]
    ignoring = Asked("one", prompt, 1, {**sampling, "ignore_eos": True}, stops=(2,))
    assert ignoring.drawing()["stop_token_ids"] == [5]


def test_versions_that_an_engine_corrects_are_told_after_the_commit() -> None:
    open_groups = groups_with("a")
    ledger = DoorLedger(open_groups, keep_s=60.0, keep_tokens=1000, most_open=8)
    asked = Asked("one", np.array(PROMPT, np.int32), 1, {"max_new_tokens": 10})
    known, _ = ledger.ask("lab", asked, newest=0, now=0.0)
    (sample,) = known.request.samples
    open_groups.assign()
    report(open_groups, "a", {sample: 6})
    ledger.collect(open_groups.take_batch())
    ledger.committed(0.0)
    before = known.view()[0].versions
    open_groups.serve("a", 2)
    end = End(sample.row, sample.lease, "stop", "", ((0, 2), (2, 4)))
    open_groups.progress("a", GenerationProgress(9, *[np.empty(0, t) for t in "IQIIiif"], [end]))
    assert known.view()[0].versions == before == (VersionRun(0, 0, 6),)
    ledger.collect(open_groups.take_batch())
    ledger.committed(0.0)
    assert known.view()[0].versions == (VersionRun(0, 0, 2), VersionRun(2, 2, 6))


async def test_what_came_of_requests_is_counted_by_key(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    before = plane.manager.status()["door"]["requests"]
    assert before == {
        "answered": 0,
        "failed": 0,
        "tokens": 0,
        "median_s": None,
        "slow_s": None,
        "keys": {},
    }
    first, second = plane.asking("one"), plane.asking("two", "other")
    await plane.open(2)
    await finish(agent, 3, count=2)
    assert [(await one)[0] for one in (first, second)] == [200, 200]
    again, _ = await plane.asking("one")  # the same answer is no other request
    assert again == 200
    found = plane.manager.status()["door"]["requests"]
    assert (found["answered"], found["failed"], found["tokens"]) == (2, 0, 6)
    assert found["keys"] == {key: {"answered": 1, "failed": 0, "tokens": 3} for key in ("lab", "other")}
    assert 0.0 <= found["median_s"] <= found["slow_s"] < 60.0
