"""The environment of the job in job.yaml: a calculator that the model may ask.

    12*34*5=    the problem
    [12*34]     the model asks for a product
    :0408:      the calculator answers, with as many digits as its factors have
    [0408*5]    the model asks again, with what it was told
    :02040:
    02040       the model answers

Each session has an object of its own.
"""

import json

from gyre.agents import PolicyFault


class Calculator:
    # In OpenAI's form. The model of this job writes a call as [...], with the value of its one parameter.
    tools = (
        {
            "type": "function",
            "function": {
                "name": "multiply",
                "description": "The product of two numbers.",
                "parameters": {"type": "object", "properties": {"factors": {"type": "string"}}},
            },
        },
    )

    def reset(self, task, seed):
        """Begin a session: what the user says. `task` has what the data say of the prompt."""
        self.answer = task["answer"]
        return task["problem"]

    def step(self, message):
        """What follows the model's answer: messages, a reward, and whether the session is over. Either method may be
        `async`."""
        calls = message.get("tool_calls") or []
        if not calls:
            return [], float(message["content"] == self.answer), True
        return (
            [{"role": "tool", "tool_call_id": call["id"], "content": product(call)} for call in calls],
            0.0,
            False,
        )


def product(call):
    """What the calculator answers. `PolicyFault` ends the session with the reward 0; any other error counts as the
    environment's, and the session is drawn again."""
    try:
        left, right = str(json.loads(call["function"]["arguments"])["factors"]).split("*")
        return f"{int(left) * int(right):0{len(left) + len(right)}d}"
    except (KeyError, TypeError, ValueError):
        raise PolicyFault("it asked for no product of two numbers") from None
