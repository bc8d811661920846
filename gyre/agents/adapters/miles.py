"""An agent function of miles (`--custom-agent-function-path`, radixark/miles), which slime's agents have as well:

    async def run(base_url, prompt, request_kwargs, metadata, **kwargs) -> dict | None

It asks `base_url + "/v1/chat/completions"` by itself. What it returns is the sample's metadata there, which a reward
function reads later; here that function is named too, or the mapping has `reward`.

This module must not import miles.
"""

from __future__ import annotations

import inspect
from typing import Any

from gyre.agents.adapters import named, prompt_of
from gyre.agents.session import Session

_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""miles' names of sampling parameters, as requests have them."""

_ASKED = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens")


async def agent(
    session: Session, *, function: str, reward: str = "reward", prompt: str = "prompt", **kwargs: Any
) -> Any:
    """Run the function at the import path `function`. `reward` is the key of what it returns, or the import path of a
    function of that mapping. `prompt` is the column of the data with the prompt. Other options go to the function."""
    run = named("function", function)
    asked = {_NAMES.get(name, name): value for name, value in session.claimed.sampling.items()}
    told = await run(
        base_url=session.keyed_url,
        prompt=prompt_of(session.task, prompt),
        request_kwargs={name: value for name, value in asked.items() if name in _ASKED},
        metadata=dict(session.task),
        **kwargs,
    )
    metadata = {**session.task, **(told or {})}
    if ":" not in reward:
        return metadata[reward]
    scored = named("reward", reward)(metadata)
    return await scored if inspect.isawaitable(scored) else scored
