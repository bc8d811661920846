"""What smolagents' agent that calls tools does: see `openai_client`. It is told `tool_choice="auto"`, for a
session refuses what it says otherwise.

    python smolagents_client.py http://127.0.0.1:PORT
"""

from __future__ import annotations

import json
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

URL = sys.argv[1]


@tool
def calculator(expression: str) -> str:
    """Computes.

    Args:
        expression: What to compute.
    """
    left, operator, right = expression.partition("*")
    if not operator:
        left, operator, right = left.partition("-")
        return str(int(left) - int(right))
    return str(int(left) * int(right))


if __name__ == "__main__":
    model = OpenAIModel(
        model_id="policy",
        api_base=f"{URL}/s/agent/v1",
        api_key="secret",
        tool_choice="auto",
    )
    agent = ToolCallingAgent(tools=[calculator], model=model, verbosity_level=0)
    print(json.dumps(str(agent.run("37*58-9=?"))))
