"""Environments: a class that answers the policy's messages, whose turns Gyre asks for.

    class Shop:
        tools = [...]                                       # optional: OpenAI's form of tools

        def __init__(self, **options): ...                  # config.agent.options
        def reset(self, task, seed): ...                    # -> the first messages, or a text
        def step(self, message): ...                        # -> messages or a text, reward, done
        def close(self): ...                                # optional
        def snapshot(self) -> bytes: ...                    # both for config.agent.recovery: snapshot
        def restore(self, data): ...

Each method may be a coroutine's function; plain ones run on threads, one call of one environment at a time. An
environment is made for each session. `step` gets the assistant's message in OpenAI's form, and its rewards are summed.

Invariant *what was answered is kept*: where an environment has snapshots, one goes to the ledger after each step,
before the next turn is asked for; what was drawn after it comes from the ledger again.

This module must not know which sessions there are.
"""

from __future__ import annotations

import base64
import binascii
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gyre.agents.outcomes import SCORED, Outcome, PolicyFault
from gyre.agents.session import Session
from gyre.rollouts.sample_checks import real_number, shown

MOST_SNAPSHOT_BYTES = 1 << 20
"""What the manager keeps of a session."""

Messages = list[Mapping[str, Any]]


@dataclass(slots=True)
class EpisodeProgress:
    """How far a session has come: its reward so far, which it ends with where it is cut off."""

    reward: float = 0.0


@dataclass(slots=True)
class Episode:
    """One session of an environment. `snapshots` says that its state is kept after each step."""

    environment: Any
    session: Session
    progress: EpisodeProgress
    snapshots: bool = False

    async def run(self) -> Outcome:
        """Ask for turns until the environment is done. Raises BudgetSpent where the session's budget is spent before,
        and whatever the environment raises."""
        try:
            messages = await self._begin()
            while True:
                reply = await self.session.chat(messages, getattr(self.environment, "tools", None))
                added, reward, done = _step(await self._call("step", reply.message))
                self.progress.reward += reward
                if done:
                    return Outcome(SCORED, self.progress.reward, extras=self._extras())
                messages += [reply.message, *added]
                if self.snapshots:
                    await self._keep(messages)
        finally:
            if hasattr(self.environment, "close"):
                await self._close()

    async def _close(self) -> None:
        """What fails here changes nothing of how the session ended, which stands before it."""
        try:
            await self._call("close")
        except Exception as error:
            traceback.print_exception(error)

    def _extras(self) -> Mapping[str, float]:
        """Further numbers, where the environment has some."""
        found = getattr(self.environment, "extras", None)
        return (
            {str(name): float(value) for name, value in found.items()} if isinstance(found, Mapping) else {}
        )

    async def _call(self, name: str, *args: Any) -> Any:
        return await self.session.tool(getattr(self.environment, name), *args)

    async def _begin(self) -> Messages:
        """The messages that the next turn is asked with: the first ones, or those of the snapshot."""
        kept = self.session.claimed.snapshot if self.snapshots else None
        if kept is None:
            return _messages(await self._call("reset", self.session.task, self.session.seed), "reset")
        messages, self.session.turns_made, self.progress.reward, state = unpack_snapshot(kept)
        await self._call("restore", state)
        return messages

    async def _keep(self, messages: Messages) -> None:
        state = await self._call("snapshot")
        data = pack_snapshot(messages, self.session.turns_made, self.progress.reward, state)
        if len(data) > MOST_SNAPSHOT_BYTES:
            raise ValueError(
                f"the environment's snapshot and its messages have {len(data)} bytes, and {MOST_SNAPSHOT_BYTES} are "
                "kept; take config.agent.recovery: replayable"
            )
        await self.session.client.snapshot(self.session.claimed, data)


def pack_snapshot(messages: Sequence[Mapping[str, Any]], turns: int, reward: float, state: bytes) -> bytes:
    """What is kept of an episode: the conversation, how many turns were made of it (an assistant's message may also be
    one of `reset`), the reward so far, and the environment's own bytes."""
    if not isinstance(state, bytes | bytearray):
        raise ValueError(f"snapshot() returned a {type(state).__name__}, expected bytes")
    return orjson.dumps(
        {
            "messages": list(messages),
            "turns": turns,
            "reward": reward,
            "state": base64.b64encode(state).decode(),
        }
    )


def unpack_snapshot(data: bytes) -> tuple[Messages, int, float, bytes]:
    """The inverse. Raises ValueError for what `pack_snapshot` did not write."""
    try:
        told = orjson.loads(data)
        state = base64.b64decode(told["state"], validate=True)
        return list(told["messages"]), int(told["turns"]), float(told["reward"]), state
    except (KeyError, TypeError, binascii.Error, orjson.JSONDecodeError) as error:
        raise ValueError(f"a snapshot of {len(data)} bytes cannot be read: {error!r:.100}") from error


def _step(returned: Any) -> tuple[Messages, float, bool]:
    try:
        added, given, done = returned
        messages, reward = _messages(added, "step"), real_number(given)
        if reward is None:
            raise ValueError(f"{shown(given)} is no finite number")
        return messages, reward, bool(done)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"step() returned {shown(returned)}, expected messages (or a text), a reward and whether it is "
            f"done: {error}"
        ) from None


def _messages(given: Any, method: str) -> Messages:
    """Messages in OpenAI's form; a text is one of the user."""
    if given is None:
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, Mapping):
        given = [given]
    if isinstance(given, Sequence) and all(isinstance(one, Mapping) and "role" in one for one in given):
        return list(given)
    raise ValueError(f"{method}() returned {given!r:.100}, expected a text, or messages with a role each")


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a tool call as the policy wrote them. Raises PolicyFault where they are no JSON object."""
    text = (call.get("function") or {}).get("arguments") or ""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise PolicyFault("malformed call")
    return found
