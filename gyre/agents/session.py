"""A session as an agent's code sees it.

Invariants:
- *the same again*: what a session draws by `rng` and `seed` is a function of the session alone, so an agent that is run
  again asks for the same, and is answered from the ledger;
- *no turn beyond its budget*, whoever asks: `chat`, `generate`, or an SDK at `base_url`.

This module must not know how a session ends.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import orjson

from gyre.agents.client import Claimed, ClientAnswer, SessionClient, raise_refusal
from gyre.agents.outcomes import BudgetSpent, InfraFault, SessionLost, SessionRefused
from gyre.chat.retries import NUMBER, Repeats

T = TypeVar("T")

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"

_CHAT_NAMES = {"max_new_tokens": "max_completion_tokens"}
_GENERATE_NAMES = {"max_new_tokens": "max_tokens"}
"""Gyre's names of sampling parameters by those of the routes."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The assistant's answer: `message` as it goes back into the next request, and `finish_reason` (`stop`, `length` or
    `tool_calls`)."""

    message: dict[str, Any]
    finish_reason: str

    @property
    def content(self) -> str:
        return self.message.get("content") or ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Each has `id` and `function`, with its `name` and its `arguments` as JSON text."""
        return self.message.get("tool_calls") or []


@dataclass(frozen=True, slots=True)
class Turn:
    """What was drawn after some tokens: ids, a log-prob of each, and `stop` or `length`."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass(slots=True)
class Session:
    """One rollout. `task` is what the data set says of its prompt, `prompt_ids` the prompt's tokens, `config` the job's
    configuration."""

    claimed: Claimed
    client: SessionClient
    url: str = ""
    """The base URL of Anthropic's SDK, and of clients that ask `/inference/v1/generate`."""
    api_key: str = ""
    """The key of any SDK, for this session alone."""
    keyed_url: str = ""
    """The same as `url` for clients that send no key: it has the key in its path."""
    config: Mapping[str, Any] = field(default_factory=dict)
    tool_timeout_s: float = 60.0
    threads: Executor | None = None
    rng: random.Random = field(init=False)
    """Random numbers of this session: the same ones when it is run again."""
    turns_made: int = 0
    """Turns that this run of it has been given, those from the ledger included."""
    repeats: Repeats = field(default_factory=Repeats)
    """Which of its requests are which: a manager that follows on another does not know what was heard."""
    over: bool = False
    """Whether it has ended here: code that is still at it gets no further turn."""
    deadline: float = field(init=False)
    """The loop's time at which it is cut off."""

    def __post_init__(self) -> None:
        self.rng = random.Random(_digest(self.id))
        self.deadline = asyncio.get_running_loop().time() + self.claimed.seconds_left

    @property
    def id(self) -> str:
        return self.claimed.id

    @property
    def task(self) -> Mapping[str, Any]:
        return self.claimed.task

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.claimed.prompt_ids

    @property
    def base_url(self) -> str:
        """The base URL of OpenAI's SDK."""
        return f"{self.url}/v1"

    @property
    def seed(self) -> int:
        """A seed below 2**31 for what members of a group have in common: an environment's start."""
        return _digest(f"{self.claimed.purpose}/{self.claimed.group}") % 2**31

    @property
    def turns_left(self) -> int:
        return max(0, self.claimed.max_turns - self.turns_made)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Reply:
        """The answer to `messages`, in OpenAI's form. Give `reply.message` back unchanged, with what follows it.
        `sampling` goes over the job's own: `temperature`, `max_new_tokens`, … Raises BudgetSpent, SessionLost, and
        SessionRefused for messages that are none."""
        body: dict[str, Any] = {"model": "policy", "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        body |= {_CHAT_NAMES.get(name, name): value for name, value in sampling.items()}
        choice = _choice(await self._turn(CHAT, body))
        return Reply(choice["message"], str(choice.get("finish_reason")))

    async def generate(self, token_ids: Sequence[int], **sampling: Any) -> Turn:
        """The tokens that follow these. What was drawn before, and is to be trained, is their prefix. Raises as `chat`
        does."""
        asked = {"logprobs": 1, "skip_special_tokens": False}
        asked |= {_GENERATE_NAMES.get(name, name): value for name, value in sampling.items()}
        body = {"model": "policy", "token_ids": [int(one) for one in token_ids], "sampling_params": asked}
        choice = _choice(await self._turn(GENERATE, body))
        content = (choice.get("logprobs") or {}).get("content") or ()
        return Turn(
            [int(one) for one in choice["token_ids"]],
            [float(one["logprob"]) for one in content],
            str(choice.get("finish_reason")),
        )

    async def tool(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """What a tool returns, a coroutine's function or a plain one, which runs on a thread. Raises InfraFault where
        it takes longer than `config.agent.tool_timeout_s`."""
        return await within(self.tool_timeout_s, self.threads, function, *args, **keywords)

    async def _turn(self, path: str, body: Mapping[str, Any]) -> Any:
        self.take_turn()
        data = orjson.dumps(body)
        key = self.repeats.key(path, data)
        try:
            answer = await self.ask_turn(path, data, key)
        except TimeoutError:
            raise BudgetSpent(f"session {self.id} has had its time") from None
        raise_refusal(answer)
        self.repeats.left(key)
        return answer.json()

    async def ask_turn(
        self, path: str, body: bytes, key: str, headers: Mapping[str, str] | None = None
    ) -> ClientAnswer:
        """What the manager answers to the request, whose key `repeats` gave. Raises TimeoutError when the session has
        had its time."""
        given = {**(headers or {}), NUMBER: key.rpartition("-")[2]}
        return await self.client.ask(
            "POST", self.claimed.path + path, body, within_s=self.seconds_left, headers=given
        )

    def take_turn(self) -> None:
        """Count a turn. Raises BudgetSpent where none is left, and SessionLost where it has ended here."""
        if self.over:
            raise SessionLost(f"session {self.id} has ended here.")
        if not self.turns_left:
            raise BudgetSpent(f"session {self.id} has had its {self.claimed.max_turns} turns")
        self.turns_made += 1


class BlockingSession:
    """A session for an agent that is a plain function, which runs on a thread of its own: the same attributes and
    methods, which wait."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Reply:
        return self._wait(self._session.chat(messages, tools, **sampling))

    def generate(self, token_ids: Sequence[int], **sampling: Any) -> Turn:
        return self._wait(self._session.generate(token_ids, **sampling))

    def tool(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        return self._wait(self._session.tool(function, *args, **keywords))

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._session.deadline - self._loop.time())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(self.seconds_left + 5.0)


async def within(
    seconds: float, threads: Executor | None, function: Callable[..., Any], *args: Any, **keywords: Any
) -> Any:
    """What `function` returns within `seconds`; a plain one runs on a thread. Raises InfraFault where it takes longer:
    a coroutine is cancelled then, and a thread is left behind, for Python cannot end one."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds) as limit:
            if inspect.iscoroutinefunction(function):
                return await function(*args, **keywords)
            returned = await loop.run_in_executor(threads, partial(function, *args, **keywords))
            return await returned if inspect.isawaitable(returned) else returned
    except TimeoutError:
        if not limit.expired():
            raise  # the function's own
        name = getattr(function, "__qualname__", repr(function))
        raise InfraFault(f"tool: {name} took longer than {seconds:g} s") from None


def _choice(told: Any) -> Any:
    try:
        return dict(told["choices"][0])
    except (KeyError, IndexError, TypeError, ValueError):
        raise SessionRefused("The rollout manager answered a turn without a choice.") from None


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
