"""Whatever comes to the door over a socket: it is refused in the documented form, in time, and the next honest request
is answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gyre.ports.bounds import PortBounds
from gyre.rollouts.manager.door.door import BODY_BYTES
from tests.fleet.fleet_plane import PROMPT, FleetPlane, finish, fleet_plane, generate_body
from tests.rollouts.plane import SOON_S, ScriptedAgent, small_folder, until

SHORT_S = 0.5
ASKS = ("/generate", "/v1/completions")
VOCABULARY = 1000


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[FleetPlane]:
    """With short deadlines for heads and bodies."""
    bounds = PortBounds(head_s=SHORT_S, body_idle_s=SHORT_S, body_s=2 * SHORT_S)
    async with fleet_plane(tmp_path, bounds=bounds, vocabulary=VOCABULARY) as plane:
        yield plane
        plane.exact()


@pytest.fixture
async def agent(plane: FleetPlane) -> ScriptedAgent:
    (agent,) = await plane.serving("a")
    return agent


async def good(plane: FleetPlane, agent: ScriptedAgent) -> None:
    """An honest request is answered, and nothing else is open."""
    assert plane.door.ledger.open_count == 0
    asking = plane.asking("an-honest-one")
    await finish(agent, 3)
    status, told = await asking
    assert (status, told["output_ids"]) == (200, [1, 2, 3])


async def said(plane: FleetPlane, *parts: bytes) -> tuple[int, dict[str, Any]]:
    """The answer to these bytes, which silence follows."""
    async with asyncio.timeout(SOON_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", plane.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
        finally:
            writer.close()
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}


def head(path: str = "/generate", *lines: str, method: str = "POST", key: str = "lab-key") -> bytes:
    told = [f"{method} {path} HTTP/1.1", "Host: door", f"Authorization: Bearer {key}", *lines]
    return ("\r\n".join(told) + "\r\n\r\n").encode("latin-1")


def refused(answer: tuple[int, Any], *codes: str) -> None:
    """In the documented form."""
    status, told = answer
    assert 400 <= status < 500, answer
    assert told["code"] in codes, told
    assert told.get("message") or told.get("detail")


# -- bodies and heads -----------------------------------------------------------------------------------


async def test_a_body_without_end(plane: FleetPlane, agent: ScriptedAgent) -> None:
    chunked = head("/generate", "Transfer-Encoding: chunked")
    refused(await said(plane, chunked, b"5\r\nhello\r\n"), "invalid")
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    refused(await said(plane, chunked, *[chunk] * 9), "invalid")
    await good(plane, agent)


@pytest.mark.parametrize(
    "length", ["100", str(BODY_BYTES + 1), "99999999999999999999999", "-1", "1e3", "0x10"]
)
async def test_a_length_that_is_a_lie(plane: FleetPlane, agent: ScriptedAgent, length: str) -> None:
    refused(await said(plane, head("/generate", f"Content-Length: {length}"), b"{}"), "invalid")
    await good(plane, agent)


async def test_a_body_that_is_a_byte_too_large(plane: FleetPlane, agent: ScriptedAgent) -> None:
    body = json.dumps(generate_body("large")).encode()
    for path in ASKS:
        too_large = body + b" " * (BODY_BYTES + 1 - len(body))
        answer = await said(plane, head(path, f"Content-Length: {len(too_large)}"), too_large[: 1 << 16])
        assert answer[0] == 413
        refused(answer, "invalid")
    largest = body + b" " * (BODY_BYTES - len(body))
    asking = asyncio.create_task(said(plane, head("/generate", f"Content-Length: {BODY_BYTES}"), largest))
    await finish(agent, 1)
    assert (await asking)[0] == 200
    await good(plane, agent)


async def test_a_head_that_comes_a_byte_at_a_time(plane: FleetPlane, agent: ScriptedAgent) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", plane.port)
    async with asyncio.timeout(SOON_S):
        for byte in head():
            writer.write(bytes([byte]))
            if (answer := await _within(reader.read(1 << 16), SHORT_S / 10)) is not None:
                break
    writer.close()
    assert answer is not None
    assert answer.startswith(b"HTTP/1.1 408")
    await good(plane, agent)


async def _within(waited: Any, seconds: float) -> bytes | None:
    try:
        async with asyncio.timeout(seconds):
            return bytes(await waited)
    except TimeoutError:
        return None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"input_ids": [1, 2}',
        b"\xff\xfe",
        b'{"rid": "\xed\xa0\x80"}',
        b"[" * 100_000,
        b'{"policy": ' + b'{"exact": ' * 100_000,
        b'{"input_ids": ' + b"[" * 900_000,
        b'{"input_ids": [1], "x": {"x": ' + b'{"x": ' * 500 + b"1" + b"}" * 502,
        b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}',
        b'{"input_ids": [1], "sampling_params": {"temperature": Infinity}}',
        b'{"input_ids": [1], "sampling_params": {"temperature": 1e999}}',
        b'{"input_ids": [1], "sampling_params": {"max_new_tokens": ' + b"9" * 5000 + b"}}",
    ],
)
@pytest.mark.parametrize("path", [*ASKS, "/v1/policies"])
async def test_a_body_that_is_no_request(
    plane: FleetPlane, agent: ScriptedAgent, path: str, body: bytes
) -> None:
    refused(await plane.post(path, body, "lab-key"), "invalid", "unsupported")
    await good(plane, agent)


# -- keys and values ------------------------------------------------------------------------------------

STRANGE: tuple[Any, ...] = (True, -1, 1.5, 2**63, 10**30, "text", [], [[]], [None], {"a": 1}, [-1], [2**40])
KEYS = {
    "/generate": ("rid", "input_ids", "text", "sampling_params", "stream", "return_logprob", "policy"),
    "/v1/completions": (
        *("rid", "prompt", "model", "stream", "logprobs", "policy", "stream_options", "max_tokens", "n"),
        *("temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "add_special_tokens"),
    ),
    "/v1/policies": ("version", "path", "checksum", "sources", "model"),
}
SAMPLING = ("max_new_tokens", "n", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos")
GOOD: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": PROMPT},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/policies": {"version": 1, "checksum": "c" * 16, "sources": ["10.0.0.5:7000"]},
}
MEANT = [  # values among the strange ones that are of the key's form
    *[(key, "text") for key in ("rid", "checksum", "model")],
    *[(key, True) for key in ("stream", "return_logprob", "logprobs", "ignore_eos", "add_special_tokens")],
    *[
        ("temperature", 1.5),
        ("top_k", -1),
        ("policy", {}),
        ("stop_token_ids", []),
    ],
    *[("stop_token_ids", []), ("path", None)],
]


def _cases() -> list[tuple[str, str, Any]]:
    cases: list[tuple[str, str, Any]] = []
    for path, keys in KEYS.items():
        told = [*keys, *(f"sampling_params.{key}" for key in SAMPLING if path == "/generate")]
        for key in told:
            for value in STRANGE:
                plain = key.rpartition(".")[2]
                if not any(plain == one and type(value) is type(it) and value == it for one, it in MEANT):
                    cases.append((path, key, value))
    return cases


async def test_every_key_with_values_of_every_wrong_kind(plane: FleetPlane, agent: ScriptedAgent) -> None:
    known = ("invalid", "unsupported", "no_tokenizer", "model_not_found", "policy_unknown", "policy_refused")
    for path, key, value in _cases():
        outer, _, inner = key.partition(".")
        body = {**GOOD[path], outer: {inner: value} if inner else value}
        answer = await plane.post(path, body, "lab-key")
        assert 400 <= answer[0] < 500, (path, key, value, answer)
        refused(answer, *known)
    await good(plane, agent)


@pytest.mark.parametrize(
    "params",
    [
        {"max_new_tokens": -1},
        {"max_new_tokens": 0},
        {"max_new_tokens": 2**31},
        {"max_new_tokens": 10**300},
        {"n": 129},
        {"temperature": -0.1},
        {"temperature": 1e300},
        {"temperature": 10**400},
        {"top_p": 0},
        {"top_k": -2},
        {"stop_token_ids": list(range(257))},
        {"stop": ["a"]},
    ],
)
async def test_numbers_beyond_their_bounds(
    plane: FleetPlane, agent: ScriptedAgent, params: dict[str, Any]
) -> None:
    refused(await plane.generate("one", params=params), "invalid", "unsupported")
    await good(plane, agent)


@pytest.mark.parametrize("token", [VOCABULARY, 2**31 - 1, 2**31, -1])
async def test_tokens_out_of_the_vocabulary(plane: FleetPlane, agent: ScriptedAgent, token: int) -> None:
    refused(await plane.generate("one", input_ids=[1, token]), "invalid")
    refused(await plane.post("/v1/completions", {"prompt": [token]}, "lab-key"), "invalid")
    await good(plane, agent)


# -- ids and keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_id",
    [
        "",
        " ",
        "a b",
        "a\r\nX-Evil: 1",
        "a\nb",
        "a\0b",
        "ü",
        "\u202e",
        "\U0001f600",
        "a" * 201,
        "a" * 1_000_000,
    ],
)
async def test_ids_that_are_none(plane: FleetPlane, agent: ScriptedAgent, request_id: str) -> None:
    refused(await plane.generate(request_id), "invalid")
    await good(plane, agent)


async def test_ids_in_heads(plane: FleetPlane, agent: ScriptedAgent) -> None:
    body = json.dumps(generate_body()).encode()
    for line in ("a b", "\x01", "\xff\xfe", "a" * 201):
        told = head("/generate", f"X-Request-Id: {line}", f"Content-Length: {len(body)}")
        refused(await said(plane, told, body), "invalid")
    body = json.dumps(generate_body("one")).encode()
    told = head("/generate", "X-Request-Id: two", f"Content-Length: {len(body)}")
    refused(await said(plane, told, body), "invalid")
    refused(await said(plane, head("/generate", "X-Large: " + "a" * (70 << 10))), "invalid")
    await good(plane, agent)


@pytest.mark.parametrize(
    "request_id",
    ["../../etc/passwd", "..%2f..%2fetc", "%00", "%0d%0aX-Evil:1", "%ff", "a" * 5000, "%F0%9F%98%80"],
)
async def test_ids_in_paths(plane: FleetPlane, agent: ScriptedAgent, request_id: str) -> None:
    for method in ("GET", "DELETE"):
        answer = await said(plane, head(f"/v1/requests/{request_id}", method=method))
        assert 400 <= answer[0] < 500
        assert "X-Evil" not in answer[1]
    await good(plane, agent)


@pytest.mark.parametrize("method", ["PUT", "PATCH", "TRACE", "OPTIONS", "CONNECT", "BREW", "G\0T", "get"])
async def test_other_methods(plane: FleetPlane, agent: ScriptedAgent, method: str) -> None:
    for path in (*ASKS, "/v1/policies", "/v1/requests/one"):
        assert 400 <= (await said(plane, head(path, method=method)))[0] < 500
    await good(plane, agent)


@pytest.mark.parametrize(
    "shown",
    ["Bearer ", "Bearer", "", "Basic bGFiLWtleQ==", "Bearer lab-key extra", "Bearer LAB-KEY", "Bearer spot-key",
     "Bearer " + "a" * 10_000, "Bearer \xff", "bearer\tlab", "Bearer None", "Bearer lab-key\0"],
)  # fmt: skip
async def test_forged_keys(plane: FleetPlane, agent: ScriptedAgent, shown: str) -> None:
    for path in (*ASKS, "/v1/policies"):
        told = (
            f"POST {path} HTTP/1.1\r\nHost: door\r\nAuthorization: {shown}\r\nContent-Length: 2\r\n\r\n{{}}"
        )
        answer = await said(plane, told.encode("latin-1"))
        refused(answer, "unauthorised", "invalid")
        assert answer[0] == (401 if "\0" not in shown else 400)
    await good(plane, agent)


@pytest.mark.slow
async def test_ten_thousand_requests_of_one_id(plane: FleetPlane, agent: ScriptedAgent) -> None:
    door = plane.door
    first = plane.asking("one")
    (sample,) = await agent.work(1)
    for _ in range(100):
        batch = [plane.asking("one") for _ in range(100)]
        await until(lambda batch=batch: sum(task.done() for task in batch) >= 92)
        assert door.status()["door"]["waiting"] <= 8
        assert (len(door.ledger), door.ledger.open_count) == (1, 1)
        for task in batch:
            task.cancel()
        await asyncio.gather(*batch, return_exceptions=True)
        assert await agent.wire.echo()  # it is there still
    assert (await first)[1]["code"] == "asked_again"
    last = plane.asking("one")
    await agent.report({sample.work.row: 1}, {sample.work.row: "stop"})
    assert (await last)[0] == 200
    await good(plane, agent)


# -- policies -------------------------------------------------------------------------------------------


async def test_folders_that_are_no_policies(plane: FleetPlane, agent: ScriptedAgent, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("[" * 100_000)
    (tmp_path / "broken" / "model.safetensors").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "secret").write_text("a secret")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "config.json").symlink_to("/etc/hostname")
    (linked / "model.safetensors").symlink_to("/nowhere")
    small_folder(tmp_path / "no-file", 1)
    (tmp_path / "no-file" / "model-2.safetensors").symlink_to("/nowhere")
    small_folder(tmp_path / "elsewhere", 1)
    (tmp_path / "elsewhere" / "gyre.json").unlink()
    (tmp_path / "elsewhere" / "gyre.json").symlink_to(tmp_path / "secret")
    paths = ["empty", "broken", "loop", "secret", "linked", "no-file", "elsewhere", "nowhere"]
    for path in [*(str(tmp_path / one) for one in paths), "/etc/passwd", "/proc/self", "/dev/zero", "/"]:
        answer = await plane.post("/v1/policies", {"version": 1, "path": path}, "lab-key")
        assert answer[0] == 422, (path, answer)
        refused(answer, "no_policy")
        assert "a secret" not in answer[1]["message"]
    for told in ("relative", "../up", "", "/a\0b", "/" + "a" * 5000):
        refused(await plane.post("/v1/policies", {"version": 1, "path": told}, "lab-key"), "invalid")
    assert plane.manager.versions.newest == 0
    assert (tmp_path / "secret").read_text() == "a secret"
    await good(plane, agent)


@pytest.mark.parametrize("version", [2**31, 2**63, 2**64, -1, 1.0, "1", True, None])
async def test_versions_that_are_none(plane: FleetPlane, agent: ScriptedAgent, version: Any) -> None:
    body = {"version": version, "path": str(plane.tmp_path / "v0")}
    refused(await plane.post("/v1/policies", body, "lab-key"), "invalid")
    await good(plane, agent)


async def test_a_folder_under_a_path_with_dots_is_the_folder(
    plane: FleetPlane, agent: ScriptedAgent, tmp_path: Path
) -> None:
    """A path that goes up and down again names a folder like any other; nothing is written but its manifest."""
    small_folder(tmp_path / "next", 1)
    path = f"{tmp_path}/next/../next"
    status, _ = await plane.post("/v1/policies", {"version": 1, "path": path}, "lab-key")
    assert status == 200
    assert sorted(one.name for one in (tmp_path / "next").iterdir()) == [
        *("config.json", "gyre.json", "model.safetensors")
    ]


async def test_a_client_that_leaves_in_the_middle(plane: FleetPlane, agent: ScriptedAgent) -> None:
    """What it asked for goes on, and its next connection has it."""
    body = {**generate_body("one"), "stream": True}
    reply = await plane.session().post(
        f"{plane.url}/generate", json=body, headers={"Authorization": "Bearer lab-key"}
    )
    (sample,) = await agent.work(1)
    reply.close()
    await agent.report({sample.work.row: 2}, {sample.work.row: "stop"})
    status, told = await plane.generate("one")
    assert (status, told["output_ids"]) == (200, [1, 2])
    await good(plane, agent)
