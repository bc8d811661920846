"""The demo's task: problems, the pupil's sessions, and the calculator."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from gyre.agents import PolicyFault
from gyre.agents.calculator import Calculator, CalculatorTask, answer_to, called, session_of
from gyre.chat.messages import Message, Tool, ToolCall
from gyre.chat.plain import PlainRenderer


def task_with(seed: int = 0) -> CalculatorTask:
    return CalculatorTask({"seed": seed})


def call(factors: str) -> dict[str, Any]:
    arguments = json.dumps({"factors": factors})
    return {"id": "call_1", "function": {"name": "multiply", "arguments": arguments}}


def test_answers_are_right_and_half_of_the_problems_have_three_factors() -> None:
    groups = task_with().prompts(0, 2000)
    three = 0
    for group in groups:
        factors = [int(one) for one in group.meta["problem"].removesuffix("=").split("*")]
        assert int(group.meta["answer"]) == np.prod(factors)
        three += len(factors) == 3
    assert 0.45 < three / len(groups) < 0.55
    assert (answer_to("12*34="), answer_to("12*34*5=")) == ("0408", "02040")


def test_a_prompt_is_a_function_of_seed_and_index() -> None:
    one, again = task_with().prompts(0, 300), [task_with().prompt(index) for index in range(300)]
    assert [group.meta for group in one] == [group.meta for group in again]
    assert task_with(1).prompt(7).meta != one[7].meta


def test_held_out_problems_are_never_trained_on() -> None:
    def pair(problem: str) -> frozenset[str]:
        return frozenset(problem.removesuffix("=").split("*")[:2])

    held_out = task_with().held_out(300)
    assert [group.id for group in held_out] == list(range(-1, -301, -1))
    assert len({group.meta["problem"] for group in held_out}) == 300
    trained = {pair(group.meta["problem"]) for group in task_with().prompts(0, 20_000)}
    assert not trained & {pair(group.meta["problem"]) for group in held_out}


@pytest.mark.parametrize(
    ("forgets", "said"),
    [
        ([False, False], "[12*34]:0408:[0408*5]:02040:02040"),
        ([True, False], "12345"),
        ([False, True], "[12*34]:0408:04085"),
    ],
)
def test_what_a_pupil_writes(forgets: list[bool], said: str) -> None:
    assert "".join(text for text, _ in session_of("12*34*5=", forgets)) == said


def test_a_pupil_who_forgets_is_never_right() -> None:
    task = task_with()
    for group, shown in zip(task.prompts(0, 1000), task.demonstrations(0, 1000, 1.0), strict=True):
        assert task.tokenizer.decode(shown.token_ids) != group.meta["answer"]
        assert shown.mask.all()


def test_a_pupil_s_session_is_what_the_renderer_makes_of_the_same_conversation() -> None:
    """Tokens that the model learns from are those that it will see."""
    task = task_with()
    renderer = PlainRenderer(task.tokenizer)
    tools = [Tool("multiply", "", Calculator.tools[0]["function"]["parameters"])]
    group = next(one for one in task.prompts(0, 50) if one.meta["problem"].count("*") == 2)
    (shown,) = task.demonstrations(group.id, 1, 0.0)

    async def conversation() -> tuple[list[int], list[bool], float]:
        environment = Calculator()
        text = await environment.reset(group.meta, 0)
        path = renderer.render([Message("user", text)], tools)
        assert path == group.prompt_ids.tolist()
        mask: list[bool] = []
        drawn = np.split(shown.token_ids, np.flatnonzero(np.diff(shown.mask.astype(int))) + 1)[::2]
        for part in drawn:
            prompt, path = path, path + part.tolist()
            mask += [True] * len(part)
            message = renderer.parse(prompt, part, tools)
            told, reward, done = await environment.step(as_openai(message))
            if done:
                return path, mask, reward
            added = renderer.bridge(
                prompt, part, [Message("tool", str(one["content"])) for one in told], tools
            )
            assert added is not None
            path += added
            mask += [False] * len(added)
        raise AssertionError("the session did not end")

    path, mask, reward = asyncio.run(conversation())
    assert path == [*group.prompt_ids.tolist(), *shown.token_ids.tolist()]
    assert mask == shown.mask.tolist()
    assert reward == 1.0


def as_openai(message: Message) -> dict[str, Any]:
    def of(call: ToolCall) -> dict[str, Any]:
        return {"id": "call_1", "function": {"name": call.name, "arguments": call.arguments}}

    return {
        "role": "assistant",
        "content": message.content,
        "tool_calls": [of(one) for one in message.tool_calls],
    }


@pytest.mark.parametrize(("factors", "told"), [("12*34", "0408"), ("0408*5", "02040"), ("99*99", "9801")])
def test_the_calculator_answers(factors: str, told: str) -> None:
    assert called(call(factors)) == told


@pytest.mark.parametrize("factors", ["", "12", "12*", "*5", "1*2*3", "12345*6", "1*123", "=*=", "1+2"])
def test_what_is_no_product_is_the_policy_s_fault(factors: str) -> None:
    with pytest.raises(PolicyFault, match="no product"):
        called(call(factors))
