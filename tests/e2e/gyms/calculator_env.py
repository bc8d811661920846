"""The calculator of `gyre demo --agent` as an environment of the package `verifiers`: a module with `load_environment`,
as those of its hub are.

    tools    a ToolEnv: the calculator is a tool
    turns    a MultiTurnEnv: a text that ends with `]` asks the calculator, and any other one is the answer
"""

from __future__ import annotations

import re
from typing import Any

import verifiers as vf
from datasets import Dataset

from gyre.agents.calculator import CalculatorTask, product

MOST_TURNS = 4
_CALL = re.compile(r"\[?([0-9]{1,4})\*([0-9]{1,2})\]?")


def multiply(factors: str) -> str:
    """The product of two numbers, such as 12*34."""
    found = _CALL.fullmatch(factors)
    return product(*found.groups()) if found is not None else "0"


class Turns(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: vf.State, **_: Any) -> Any:
        return [{"role": "user", "content": multiply(str(messages[-1].content))}]

    @vf.stop
    async def answered(self, state: vf.State) -> bool:
        said = state["trajectory"][-1]["completion"][-1].content if state["trajectory"] else "]"
        return not str(said).endswith("]")


def right(completion: Any, answer: str) -> float:
    return float(completion[-1].role == "assistant" and completion[-1].content == answer)


def _rows(groups: Any) -> Dataset:
    return Dataset.from_list(
        [{"question": one.meta["problem"], "answer": one.meta["answer"]} for one in groups]
    )


def load_environment(
    form: str = "tools", prompts: int = 1024, held_out: int = 128, seed: int = 0
) -> vf.Environment:
    task = CalculatorTask({"seed": seed})
    common: dict[str, Any] = {
        "dataset": _rows(task.prompts(0, prompts)),
        "eval_dataset": _rows(task.held_out(held_out)),
        "rubric": vf.Rubric(funcs=[right]),
        "max_turns": MOST_TURNS,
    }
    return vf.ToolEnv(tools=[multiply], **common) if form == "tools" else Turns(**common)
