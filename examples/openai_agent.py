"""An agent on OpenAI's package, trained as it is: it multiplies with a calculator over two or three turns.

    pip install openai
    gyre plan examples/openai_agent.py
    gyre run examples/openai_agent.py

The loop knows a base URL and a key, and nothing of Gyre. `solve` gives it those of its session, so that each turn
that it asks for is drawn by the policy, is in the ledger, and is trained. The model is a tiny one, in which each
character is a token: from `12*34*5=` it learns to ask for 12*34, then for 0408*5, and to answer with what it was told.
Before that it has seen a pupil who forgets to ask in 60 % of the cases.
"""

from __future__ import annotations

import json
import re
from typing import Any

from openai import AsyncOpenAI

from gyre import RLJobBuilder
from gyre.agents import Session

# -- the agent: the package `openai`, a loop, a tool and a score ---------------------------------------

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "The product of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"factors": {"type": "string", "description": "such as 12*34"}},
                "required": ["factors"],
            },
        },
    }
]


def multiply(factors: str) -> str:
    """The product, with as many digits as both factors have together. Raises ValueError for what are no two numbers."""
    found = re.fullmatch(r"([0-9]{1,4})\*([0-9]{1,2})", factors)
    if found is None:
        raise ValueError(f"{factors!r} are no two numbers")
    left, right = found.groups()
    return f"{int(left) * int(right):0{len(left) + len(right)}d}"


async def answer_to(problem: str, base_url: str, api_key: str) -> str:
    """What the model answers at last, with the calculator's help."""
    messages: list[Any] = [{"role": "user", "content": problem}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = completion.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                result = multiply(json.loads(call.function.arguments)["factors"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


# -- what Gyre runs for each session -------------------------------------------------------------------


async def solve(session: Session) -> float:
    """The reward: 1 for the right answer, 0 for another one and for a call that the calculator does not know."""
    try:
        answer = await answer_to(session.task["problem"], session.base_url, session.api_key)
    except ValueError:
        return 0.0
    return float(answer == session.task["answer"])


# -- the job -------------------------------------------------------------------------------------------


def job() -> RLJobBuilder:
    return (
        RLJobBuilder()
        .name("openai-agent")
        .node_num(1)
        .device_per_node(8)
        .device_type("CPU")  # here a device is only a number: nothing is reserved
        .recipe("grpo")
        .config(
            {
                "seed": 0,
                "task": {"name": "gyre.agents.calculator:CalculatorTask"},
                "model": {
                    "layers": 2,
                    "hidden": 64,
                    "heads": 4,
                    "kv_heads": 2,
                    "mlp": 168,
                    "max_positions": 64,
                },
                "sampling": {"n": 8, "temperature": 1.0, "max_new_tokens": 12},
                "evaluation": {"temperature": 1.0, "threshold": 1.0},
                "optim": {"lr": 1e-3},
                "warm_start": {"max_steps": 120, "batch": 128, "lr": 4e-3, "slips": 0.6},
                "agent": {
                    "function": "openai_agent:solve",
                    "concurrency": 64,
                    "max_turns": 4,
                    "max_tokens": 60,
                },
            }
        )
        .run(
            steps=8,
            prompts_per_step=32,
            groups_per_firing=8,
            groups_per_micro_batch=16,
            checkpoint_every=4,
            evaluate_every=4,
            held_out=128,
        )
        .failover(silence_timeout_s=6.0)
        .actor()
        .total(2)
        .rollout()
        .total(1)
        .agent()
        .total(2)
        .end()
    )
