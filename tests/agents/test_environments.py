"""Environments: whose turns are asked for, what becomes of their rewards, their limits, and their snapshots."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, ClassVar

import pytest

from gyre.agents import PolicyFault
from gyre.agents.environments import arguments_of, pack_snapshot, unpack_snapshot
from gyre.testing.clock import run_virtual
from tests.agents.manager import Manager
from tests.agents.test_runner import all_ended, beats_of, end_of, run_until_ended, runner_of


class Counting:
    """Done when the policy has said `to` things; each is worth 0.25."""

    closed: ClassVar[list[int]] = []

    def __init__(self, to: int = 3) -> None:
        self.to, self.said = to, 0

    def reset(self, task: Any, seed: int) -> str:
        return f"count to {self.to}"

    def step(self, message: dict[str, Any]) -> tuple[Any, float, bool]:
        self.said += 1
        return "go on", 0.25, self.said >= self.to

    def close(self) -> None:
        self.closed.append(self.said)


class Async(Counting):
    async def reset(self, task: Any, seed: int) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{"role": "system", "content": task["who"]}, {"role": "user", "content": str(seed)}]

    async def step(self, message: dict[str, Any]) -> tuple[Any, float, bool]:  # type: ignore[override]
        await asyncio.sleep(1.0)
        return Counting.step(self, message)


def test_an_environment_is_asked_for_its_turns_and_its_rewards_are_summed() -> None:
    Counting.closed.clear()
    manager = Manager()
    ended = end_of(Counting, manager, options={"to": 4})
    assert (ended["outcome"], ended["reward"]) == ("scored", 1.0)
    (one,) = manager.sessions.values()
    assert one.drawn == 4
    roles = [message["role"] for message in one.asked[-1]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user", "assistant", "user"]
    assert Counting.closed == [4]


def test_members_of_a_group_have_one_seed_and_dice_of_their_own() -> None:
    manager = Manager()
    members = manager.add(2, task={"who": "you"})
    dice = []

    class Seeded(Async):
        async def reset(self, task: Any, seed: int) -> Any:
            dice.append(seed)
            return await Async.reset(self, task, seed)

    run_virtual(run_until_ended(manager, Seeded))
    assert dice[0] == dice[1]
    assert members[0].asked[0]["messages"][0] == {"role": "system", "content": "you"}


def test_what_is_cut_off_has_the_reward_that_it_has() -> None:
    Counting.closed.clear()
    ended = end_of(Counting, limits={"max_turns": 2}, options={"to": 100})
    assert (ended["outcome"], ended["reward"]) == ("truncated", 0.5)
    assert Counting.closed == [2]


def test_a_session_whose_time_is_over_has_the_reward_that_it_has() -> None:
    ended = end_of(Async, limits={"seconds": 2.5, "task": {"who": "you"}}, options={"to": 100})
    assert (ended["outcome"], ended["reward"]) == ("truncated", 0.5)


class Broken(Counting):
    def step(self, message: dict[str, Any]) -> tuple[Any, float, bool]:
        raise OSError("the sandbox is away")


class Faulted(Counting):
    def step(self, message: dict[str, Any]) -> tuple[Any, float, bool]:
        return arguments_of({"function": {"name": "buy", "arguments": "{oh"}}), 0.0, True


class Wrong(Counting):
    def step(self, message: dict[str, Any]) -> Any:
        return "no tuple"


class EarnsNan(Counting):
    def step(self, message: dict[str, Any]) -> Any:
        return "go on", float("nan"), False


class EarnsText(Counting):
    def step(self, message: dict[str, Any]) -> Any:
        return "go on", "1.0", True


class Slow(Async):
    async def step(self, message: dict[str, Any]) -> Any:
        await asyncio.sleep(100.0)


class ClosesBadly(Counting):
    def close(self) -> None:
        raise RuntimeError("close")


@pytest.mark.parametrize(
    ("found", "outcome", "reason"),
    [
        (Broken, "infra_fault", "OSError: the sandbox is away"),
        (Faulted, "policy_fault", "malformed call"),
        (Wrong, "infra_fault", "expected messages (or a text), a reward"),
        (EarnsNan, "infra_fault", "nan is no finite number"),
        (EarnsText, "infra_fault", "'1.0' is no finite number"),
        (Slow, "infra_fault", "took longer than 5 s"),
        (ClosesBadly, "scored", ""),
    ],
)
def test_how_a_session_of_an_environment_ends(found: Any, outcome: str, reason: str) -> None:
    ended = end_of(found, limits={"task": {"who": "you"}}, tool_timeout_s=5.0)
    assert ended["outcome"] == outcome
    assert reason in ended["reason"]


def test_a_plain_step_that_hangs_is_the_environment_s_fault() -> None:
    """Real time: a thread cannot wait in virtual time."""

    class Hangs(Counting):
        def step(self, message: dict[str, Any]) -> Any:
            time.sleep(1.0)

    manager = Manager()
    (one,) = manager.add()
    asyncio.run(run_until_ended(manager, Hangs, tool_timeout_s=0.2, within_s=60.0))
    assert one.ended is not None
    assert (one.ended["outcome"], "took longer than 0.2 s" in one.ended["reason"]) == ("infra_fault", True)


class Remembering(Async):
    """Its state is how much was said, and it cannot be run again from its beginning: what it was told is its secret."""

    def snapshot(self) -> bytes:
        return json.dumps({"said": self.said}).encode()

    def restore(self, data: bytes) -> None:
        self.said = json.loads(data)["said"]
        self.restored = True

    async def reset(self, task: Any, seed: int) -> Any:
        resets.append(seed)
        example = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "one"}]
        return [*example, *await Async.reset(self, task, seed)]


resets: list[int] = []


def test_an_environment_with_snapshots_goes_on_from_the_last_one() -> None:
    resets.clear()
    manager = Manager(lambda messages: f"turn {sum(one['role'] == 'assistant' for one in messages)}")
    (one,) = manager.add(task={"who": "you"}, max_turns=6)  # an assistant's message in the prompt is no turn
    keys: dict[str, Any] = {"recovery": "snapshot", "options": {"to": 6}}

    async def scenario() -> None:
        killed = runner_of(manager, Remembering, "agent-0", **keys)
        task = asyncio.create_task(killed.run())
        await asyncio.sleep(3.5)  # three steps were made, and the fourth turn is answered
        assert (one.drawn, one.snapshot is not None) == (4, True)
        task.cancel()
        await asyncio.wait({task})
        other = runner_of(manager, Remembering, "agent-1", **keys)
        work = [asyncio.create_task(other.run()), asyncio.create_task(beats_of(manager, other, "agent-1"))]
        await asyncio.wait_for(all_ended(manager), 100.0)
        for each in work:
            each.cancel()
        await asyncio.wait(work)

    run_virtual(scenario())
    assert one.ended is not None
    assert (one.ended["outcome"], one.ended["reward"]) == ("scored", 1.5)
    assert (one.drawn, one.claims, len(resets)) == (6, 2, 1)
    said = [message["content"] for message in one.asked[-1]["messages"] if message["role"] == "assistant"]
    assert said == ["one", *(f"turn {n}" for n in range(1, 6))]


def test_a_snapshot_is_read_as_it_was_written_and_anything_else_refused() -> None:
    messages: list[Any] = [{"role": "user", "content": "ä"}]
    assert unpack_snapshot(pack_snapshot(messages, 3, 0.5, b"\x00\xff")) == (messages, 3, 0.5, b"\x00\xff")
    for wrong in (b"", b"{}", b"[1]", b'{"messages": 1, "turns": 0, "reward": 0, "state": ""}'):
        with pytest.raises(ValueError, match="cannot be read"):
            unpack_snapshot(wrong)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "7"])
def test_arguments_that_are_no_object_are_the_policy_s_fault(text: str) -> None:
    with pytest.raises(PolicyFault, match="malformed call"):
        arguments_of({"function": {"name": "x", "arguments": text}})


def test_too_large_a_snapshot_says_so() -> None:
    class Large(Remembering):
        def snapshot(self) -> bytes:
            return bytes(2 << 20)

    ended = end_of(Large, limits={"task": {"who": "you"}}, recovery="snapshot")
    assert ended["outcome"] == "infra_fault"
    assert "take config.agent.recovery: replayable" in ended["reason"]
