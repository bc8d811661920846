"""The real clients against a server made of the dialects: whole and streamed, over loops of three turns, where the
server fails, and where it refuses. The package `openai` of this environment always, others in the environment that
`make clients` makes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from gyre.chat.packaged import PackagedRenderer
from tests.chat.server import SCRIPT, Server, Session
from tests.chat.tokenizers import small
from tests.waits import GENEROUS_S

HERE = Path(__file__).parent / "clients"
APART = Path(__file__).parents[2] / ".venv-clients" / "bin" / "python"
ANSWER = "It is 2137."


async def run(python: Path | str, script: str, sessions: Mapping[str, Session]) -> Any:
    """What the script prints, run against a server with these sessions."""
    async with Server() as server:
        server.sessions |= sessions
        process = await asyncio.create_subprocess_exec(
            str(python),
            str(HERE / script),
            f"http://127.0.0.1:{server.port}",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_AGENTS_DISABLE_TRACING": "1"},
        )
        try:
            async with asyncio.timeout(GENEROUS_S):
                out, complaints = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, complaints.decode()[-3000:]
        return json.loads(out.decode().splitlines()[-1])


def check_is_one_path(session: Session) -> None:
    """Each turn went on from the one before, with its tokens in front."""
    assert [turn.parent for turn in session.turns] == [-1, 0, 1]
    assert session.causes == ["", "", ""]
    for before, after in zip(session.paths, session.paths[1:], strict=False):
        assert after[: len(before)] == before


FAULTS = {
    "retry-503": ["", "503", "", ""],
    "retry-cut": ["cut", "", "cut", "cut", ""],
    "retry-cut-body": ["", "cut body", "", "cut body", ""],
    "retry-responses": ["503", "cut", "", "cut body", ""],
}


def sessions(*names: str) -> dict[str, Session]:
    return {name: Session(FAULTS.get(name, [])[:]) for name in names}


@pytest.mark.parametrize(
    "python",
    [pytest.param(sys.executable, id="ours"), pytest.param(APART, id="apart", marks=pytest.mark.clients)],
)
async def test_openai(python: Path | str) -> None:
    loops = ("chat", "chat-tokens", "chat-streamed", "responses", "responses-streamed")
    at = sessions(*loops, "chat-helper", "completions", "refused", *FAULTS)
    told = await run(python, "openai_client.py", at)
    for name in loops:
        check_is_one_path(at[name])
    chat = [turn["choices"][0] for turn in told["chat"]]
    assert [one["finish_reason"] for one in chat] == ["tool_calls", "tool_calls", "stop"]
    assert chat[-1]["message"]["content"] == ANSWER
    tokens = at["chat-tokens"]
    for turn, path in zip(told["chat-tokens"], tokens.paths, strict=True):
        assert turn["prompt_token_ids"] + turn["choices"][0]["token_ids"] == path
        assert len(turn["choices"][0]["logprobs"]["content"]) == len(turn["choices"][0]["token_ids"])
    assert [one["reason"] for one in told["chat-streamed"]] == ["tool_calls", "tool_calls", "stop"]
    assert told["chat-streamed"][-1]["content"] == ANSWER
    assert told["chat-streamed"][-1]["usage"]["completion_tokens"] == len(SCRIPT[-1])
    assert (
        told["chat-helper"]["message"]["tool_calls"][0]["function"]["arguments"] == '{"expression": "37*58"}'
    )
    assert told["responses"][-1] == {"status": "completed", "text": ANSWER, "kinds": ["message"]}
    assert told["responses"][1]["kinds"] == ["message", "function_call"]
    assert told["responses-streamed"][-1]["text"] == ANSWER
    assert told["responses-streamed"][-1]["events"][-1] == "response.completed"
    assert told["completions"]["choices"][0]["text"] == ANSWER
    assert told["completions"]["choices"][0]["logprobs"]["token_ids"]
    check_retries(at, told)
    check_refusals(at["refused"], told["refused"])


def check_retries(at: Mapping[str, Session], told: Any) -> None:
    """Whatever failed, three turns were drawn, and the agent heard what the others heard."""
    for name in FAULTS:
        check_is_one_path(at[name])
        assert any(one not in ("", "0") for one in at[name].retry_counts), name
    said = [
        [(turn["id"], turn["choices"][0]["message"]["content"]) for turn in told[name]]
        for name in ("chat", "retry-503", "retry-cut", "retry-cut-body")
    ]
    assert all(one == said[0] for one in said)
    assert told["retry-responses"] == told["responses"]


def check_refusals(session: Session, told: Any) -> None:
    """Final ones are asked once; each says what and why."""
    kinds = [(one[0], one[1], one[2]) for one in told]
    assert kinds == [
        ("UnprocessableEntityError", 422, "unsupported"),
        ("UnprocessableEntityError", 422, "unsupported"),
        ("NotFoundError", 404, "unknown_session"),
        ("UnprocessableEntityError", 422, "unsupported"),
        ("NotFoundError", 404, None),
        ("AuthenticationError", 401, "unauthorised"),
    ]
    assert told[0][3] == "seed"
    assert "tool_choice" in told[1][4]
    assert "send the messages" in told[3][4]
    assert set(session.retry_counts) <= {"", "0"}
    assert session.turns == []


@pytest.mark.clients
async def test_anthropic() -> None:
    faults = [name for name in FAULTS if name != "retry-responses"]
    at = sessions("whole", "streamed", "counted", "cut", "refused", *faults)
    told = await run(APART, "anthropic_client.py", at)
    for name in ("whole", "streamed", *faults):
        check_is_one_path(at[name])
        assert [turn["stop_reason"] for turn in told[name]] == ["tool_use", "tool_use", "end_turn"]
        assert told[name][-1]["content"][0]["text"] == ANSWER
        assert told[name][1]["content"][0]["text"] == "let me go on "
    assert all(any(one not in ("", "0") for one in at[name].retry_counts) for name in faults)
    assert told["counted"] == len("37*58-9=?") + 1
    assert told["cut"] == "max_tokens"
    assert [one[:2] for one in told["refused"]] == [
        ["UnprocessableEntityError", 422],
        ["UnprocessableEntityError", 422],
        ["NotFoundError", 404],
        ["AuthenticationError", 401],
    ]
    assert "tool_choice.type" in told["refused"][0][2]
    assert at["refused"].turns == []


async def test_the_client_of_verifiers(tmp_path: Path) -> None:
    """`renderers.client.generate`, by which verifiers trains: ids go out, and each drawn id comes back with its
    log-prob."""
    from renderers.client import generate

    renderer = PackagedRenderer(small("qwen3", tmp_path), {"name": "qwen3"})
    async with Server() as server:
        session = server.sessions["v"] = Session()
        async with AsyncOpenAI(base_url=f"{server.url('v')}/v1", api_key="secret") as client:
            told = await generate(
                client=client,
                renderer=renderer._renderer,
                messages=[{"role": "user", "content": "a"}],
                model="policy",
                prompt_ids=[1, 5, 6],
                sampling_params={"temperature": 1.0, "max_tokens": 64, "routed_experts_prompt_start": 2},
                cache_salt="a",
                priority=0,
                max_prompt_len=100,
                extra_headers={"X-Session-ID": "v"},
            )
    assert told["prompt_ids"] + told["completion_ids"] == session.paths[0]
    assert told["completion_logprobs"] == [-0.5] * len(SCRIPT[-1])
    assert told["finish_reason"] == "stop"


@pytest.mark.clients
async def test_openai_agents() -> None:
    """It drops what it does not know, and keeps ids and arguments: its turns are one path."""
    at = sessions("responses", "chat", "chat-streamed", "responses-streamed")
    told = await run(APART, "openai_agents_client.py", at)
    assert told == dict.fromkeys(at, ANSWER)
    for session in at.values():
        check_is_one_path(session)


@pytest.mark.clients
async def test_smolagents() -> None:
    """It writes history as prose, so that every turn is a branch, counted by its cause."""
    script = ("«calculator37*58»", "«calculator2146-9»", "«final_answer2137»")
    agent = Session(script=script, is_by_number=True)
    assert await run(APART, "smolagents_client.py", {"agent": agent}) == "2137"
    assert agent.causes == ["", "client edit", "client edit"]
    assert [turn.parent for turn in agent.turns] == [-1, -1, -1]
