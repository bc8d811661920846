"""An agent loop of verl (`AgentLoopBase`): `run(sampling_params, **row)`, which asks a server manager for tokens.

Its output's ids and mask are not needed: what the policy drew is in the ledger, and what stood between is in the next
request. Its `reward_score` is the reward, or else a function's of its output and the row.

This module must not import verl: the loop's own module does.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gyre.agents.adapters import messages_of, named, prompt_of
from gyre.agents.session import Session
from gyre.errors import ConfigError

_ASKED = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_new_tokens")
"""Of verl's sampling parameters; the others (`repetition_penalty: 1.0`, `logprobs`) change no draw."""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """As verl's servers answer."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    num_preempted: int = 0
    routed_experts: None = None


@dataclass(frozen=True, slots=True)
class ServerManager:
    """In the place of verl's: a turn of the session."""

    session: Session

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        asked = {name: sampling_params[name] for name in _ASKED if name in sampling_params}
        turn = await self.session.generate(prompt_ids, **asked)
        reason = "completed" if turn.finish_reason == "stop" else turn.finish_reason
        return TokenOutput(turn.token_ids, turn.logprobs, reason)


async def agent(
    session: Session,
    *,
    loop: str,
    tokenizer: str = "",
    config: Any = None,
    reward: str = "",
    prompt: str = "prompt",
    **keywords: Any,
) -> float:
    """Run the loop whose class is at the import path `loop`. `tokenizer` is a model's folder, for transformers'
    AutoTokenizer; `config` what the loop reads as verl's configuration; `reward` the import path of a function of the
    loop's output and the row, for loops that score nothing. Other options go to the class."""
    made = named("loop", loop)(
        trainer_config=SimpleNamespace(config=_attributes(config or {})),
        server_manager=ServerManager(session),
        tokenizer=_tokenizer(tokenizer),
        processor=None,
        **keywords,
    )
    row = {**session.task, "raw_prompt": messages_of(prompt_of(session.task, prompt))}
    output = await made.run(dict(session.claimed.sampling), **row)
    if reward:
        scored = named("reward", reward)(output, row)
        return float(await scored if inspect.isawaitable(scored) else scored)
    if output.reward_score is None:
        raise ConfigError(
            f"config.agent.options.reward: is missing, and {loop} scores nothing itself.",
            hint="Give the import path of a function of the loop's output and the row.",
        )
    return float(output.reward_score)


def _attributes(value: Any) -> Any:
    """Mappings as verl's configuration has them: by key and by attribute."""
    from omegaconf import OmegaConf

    return OmegaConf.create(value)


def _tokenizer(folder: str) -> Any:
    if not folder:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
