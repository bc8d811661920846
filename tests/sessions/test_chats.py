"""Sessions of chat clients: messages, tool calls, and what comes back of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gyre.chat.plain import PlainRenderer
from gyre.workloads.tasks.arithmetic import CharTokenizer
from tests.rollouts.plane import ScriptedAgent
from tests.sessions.session_plane import session_plane

TOKENIZER = CharTokenizer("0123456789+-*=[]:")
CALCULATOR = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"properties": {"sum": {}}}},
}


async def drew(agent: ScriptedAgent, text: str, *, ends: bool = True) -> None:
    """The agent draws this text for its next sample."""
    (sample,) = await agent.work(1)
    ids = [*TOKENIZER.encode(text).tolist(), *([TOKENIZER.eos_id] if ends else [])]
    await agent.say(sample.work.row, ids)


async def test_a_tool_is_called_and_its_result_bridged(tmp_path: Path) -> None:
    async with session_plane(tmp_path, renderer=PlainRenderer(TOKENIZER)) as plane:
        trainer = await plane.asked([0])
        agent = await plane.working("a")
        (session,) = await plane.claim()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "12*3="}]
        first = plane.chatting(session, messages, [CALCULATOR])
        await drew(agent, "[12*3]", ends=False)
        status, told = await first
        assert status == 200, told
        choice = told["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        call = choice["message"]["tool_calls"][0]
        assert call["function"] == {"name": "calculator", "arguments": '{"sum": "12*3"}'}
        messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "36"}]
        second = plane.chatting(session, messages, [CALCULATOR])
        await drew(agent, "36")
        assert (await second)[1]["choices"][0]["message"]["content"] == "36"
        await plane.end(session)
        group = (await trainer.groups(1))[0]
        (row,) = group.samples
        assert TOKENIZER.decode(np.concatenate([group.prompt_ids, row.token_ids])) == "12*3=[12*3]:36:36"
        assert row.mask is not None
        assert TOKENIZER.decode(row.token_ids[row.mask]) == "[12*3]36"
        plane.exact()
