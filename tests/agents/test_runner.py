"""Sessions in one process: how each ends, what one does to another, and what becomes of them when their worker dies."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import numpy as np
import pytest

from gyre.agents import BlockingSession, InfraFault, Outcome, PolicyFault, Session
from gyre.agents.runner import LEAVE_S, PAUSE_S, SessionRunner, agent_of, hand_back, keep_beating
from gyre.config.sections import AgentRoleSettings
from gyre.testing.clock import VirtualClock, run_virtual
from tests.agents.manager import Direct, Manager


def settings_of(found: Any, **keys: Any) -> AgentRoleSettings:
    kind = "environment" if isinstance(found, type) else "function"
    return AgentRoleSettings.model_validate({kind: "tests.agents:given", **keys})


def runner_of(manager: Manager, found: Any, worker: str = "agent-0", **keys: Any) -> SessionRunner:
    settings = settings_of(found, **keys)
    return SessionRunner(Direct(manager, worker), agent_of(found, settings, {}), settings)


async def run_until_ended(
    manager: Manager, found: Any, *, within_s: float = 3600.0, **keys: Any
) -> SessionRunner:
    """Run a worker until every session has ended."""
    runner = runner_of(manager, found, **keys)
    work = [asyncio.create_task(runner.run()), asyncio.create_task(beats_of(manager, runner))]
    try:
        async with asyncio.timeout(within_s):
            while any(one.ended is None for one in manager.sessions.values()):
                done, _ = await asyncio.wait(work, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
    finally:
        for task in work:
            task.cancel()
        await asyncio.wait(work)
    return runner


async def all_ended(manager: Manager) -> None:
    while any(one.ended is None for one in manager.sessions.values()):  # noqa: ASYNC110 - time is virtual
        await asyncio.sleep(0.5)


def beats_of(manager: Manager, runner: SessionRunner, worker: str = "agent-0") -> Any:
    return keep_beating(Direct(manager, worker), lambda: runner.held, runner.lose)


def end_of(
    found: Any, manager: Manager | None = None, limits: dict[str, Any] | None = None, **keys: Any
) -> dict[str, Any]:
    """How a single session of this agent ends."""
    manager = manager or Manager()
    (one,) = manager.add(**(limits or {}))
    run_virtual(run_until_ended(manager, found, **keys))
    assert one.ended is not None
    return {key: one.ended[key] for key in ("outcome", "reward", "reason", "extras")}


# -- functions ---------------------------------------------------------------------------------------


async def scores_one(session: Session) -> float:
    assert (await session.chat([{"role": "user", "content": "hello"}])).content == "yes"
    return 1


async def returns_a_mapping(session: Session) -> dict[str, float]:
    return {"reward": 0.5, "format": 1}


async def returns_an_outcome(session: Session) -> Outcome:
    return Outcome("truncated", 0.25, "enough")


def plain_function(session: BlockingSession) -> float:
    first = session.chat([{"role": "user", "content": "a"}])
    assert session.turns_left == 15
    return 1.0 if first.content == "yes" and session.generate([1, 2]).token_ids == [3, 2] else 0.0


class Malformed(PolicyFault):
    pass


async def faults(session: Session) -> float:
    raise Malformed


async def faults_with_words(session: Session) -> float:
    try:
        raise KeyError("x")
    except KeyError as error:
        raise PolicyFault("no such tool") from error


async def breaks(session: Session) -> float:
    return 1 / 0


async def leaves(session: Session) -> float:
    sys.exit(3)


async def returns_nothing(session: Session) -> None:
    return None


async def returns_nan(session: Session) -> float:
    return float("nan")


async def returns_several(session: Session) -> Any:
    return np.ones(3)


async def returns_more_than_is_taken(session: Session) -> float:
    return 1e31


async def cancels_itself(session: Session) -> float:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("found", "outcome", "reward", "reason"),
    [
        (scores_one, "scored", 1.0, ""),
        (returns_a_mapping, "scored", 0.5, ""),
        (returns_an_outcome, "truncated", 0.25, "enough"),
        (plain_function, "scored", 1.0, ""),
        (faults, "policy_fault", 0.0, "Malformed"),
        (faults_with_words, "policy_fault", 0.0, "no such tool"),
        (breaks, "infra_fault", 0.0, "ZeroDivisionError: division by zero"),
        (leaves, "infra_fault", 0.0, "SystemExit: 3"),
        (returns_nothing, "infra_fault", 0.0, "the agent returned None as reward"),
        (returns_nan, "infra_fault", 0.0, "the agent returned nan"),
        (returns_several, "infra_fault", 0.0, "the agent returned array([1., 1., 1.]) as reward"),
        (returns_more_than_is_taken, "infra_fault", 0.0, "refuses: no: reward"),
        (cancels_itself, "infra_fault", 0.0, "CancelledError"),
    ],
)
def test_how_a_session_ends(found: Any, outcome: str, reward: float, reason: str) -> None:
    ended = end_of(found)
    assert (ended["outcome"], ended["reward"]) == (outcome, reward)
    assert ended["reason"] == reason if reason in ("", "enough", "Malformed") else reason in ended["reason"]


def test_a_mapping_s_other_numbers_go_with_the_reward() -> None:
    assert end_of(returns_a_mapping)["extras"] == {"format": 1.0}


async def never_stops(session: Session) -> float:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go on"}]
    while True:
        reply = await session.chat(messages)
        messages += [reply.message, {"role": "user", "content": "go on"}]


def test_turns_are_a_limit_and_what_is_cut_off_is_not_asked_for() -> None:
    manager = Manager()
    ended = end_of(never_stops, manager, {"max_turns": 3})
    assert (ended["outcome"], ended["reward"]) == ("truncated", 0.0)
    assert "had its 3 turns" in ended["reason"]
    assert next(iter(manager.sessions.values())).drawn == 3


def test_a_budget_that_the_manager_keeps_is_a_limit_too() -> None:
    manager = Manager()
    manager.add()
    one = next(iter(manager.sessions.values()))

    async def spends(session: Session) -> float:
        one.max_turns = 0  # as where its tokens are spent
        await session.chat([])
        return 1.0

    run_virtual(run_until_ended(manager, spends))
    assert one.ended is not None
    assert (one.ended["outcome"], one.ended["reason"]) == ("truncated", "no: budget")


async def sleeps(session: Session) -> float:
    await asyncio.sleep(10_000)
    return 1.0


def test_time_is_a_limit() -> None:
    clock = VirtualClock()
    manager = Manager()
    (one,) = manager.add(seconds=30.0)
    run_virtual(run_until_ended(manager, sleeps), clock)
    assert one.ended is not None
    assert (one.ended["outcome"], one.ended["reason"]) == ("truncated", "it had its 30 s")
    assert 30.0 <= clock.monotonic() < 32.0


def test_a_turn_that_does_not_come_in_time_cuts_the_session_off() -> None:
    manager = Manager()
    manager.latency_s = 1000.0
    ended = end_of(scores_one, manager, {"seconds": 20.0})
    assert ended["outcome"] == "truncated"


async def will_not_leave(session: Session) -> float:
    while True:
        try:
            await asyncio.sleep(50.0)
        except asyncio.CancelledError:
            if session.over:
                raise


def test_code_that_does_not_leave_is_left_behind() -> None:
    clock = VirtualClock()
    manager = Manager()
    (one,) = manager.add(seconds=30.0)
    runner = run_virtual(run_until_ended(manager, will_not_leave), clock)
    assert one.ended is not None
    assert one.ended["outcome"] == "truncated"
    assert runner.counts.left_behind == 1
    assert clock.monotonic() < 30.0 + LEAVE_S + 2.0


# -- the manager is away -----------------------------------------------------------------------------


def test_a_session_outlives_its_manager() -> None:
    manager = Manager()
    (one,) = manager.add()

    async def scenario() -> None:
        async def away() -> None:
            await asyncio.sleep(1.0)
            manager.away = True
            await asyncio.sleep(120.0)
            manager.away = False
            manager.heard = dict.fromkeys(manager.heard, asyncio.get_running_loop().time())

        async def talks(session: Session) -> float:
            for turn in range(5):
                await session.chat([{"role": "user", "content": str(turn)}])
                await asyncio.sleep(0.5)
            return 1.0

        gone = asyncio.create_task(away())
        await run_until_ended(manager, talks)
        await gone

    run_virtual(scenario())
    assert one.ended is not None
    assert one.ended["outcome"] == "scored"
    assert (one.drawn, one.claims) == (5, 1)


# -- one worker dies ---------------------------------------------------------------------------------


async def guesses(session: Session) -> float:
    """Three turns, each of which asks for what the dice say."""
    messages: list[dict[str, Any]] = []
    for _ in range(3):
        messages.append({"role": "user", "content": f"{session.rng.random()} {session.seed}"})
        reply = await session.chat(messages)
        messages.append(reply.message)
        await asyncio.sleep(10.0)
    return float(len(messages))


def test_a_session_of_a_worker_that_is_killed_is_run_again_and_gets_the_same_turns() -> None:
    drawn: list[str] = []

    def policy(messages: list[dict[str, Any]]) -> str:
        drawn.append(f"answer {len(drawn)}")
        return drawn[-1]

    manager = Manager(policy)
    (one,) = manager.add()

    async def scenario() -> float:
        killed = runner_of(manager, guesses, "agent-0")
        code = asyncio.create_task(killed.run())
        beating = asyncio.create_task(beats_of(manager, killed))
        await asyncio.sleep(12.0)  # in the middle of its second turn
        beating.cancel()
        code.cancel()  # the process is gone: nothing is ended, and nobody hears of it
        await asyncio.wait({code, beating})
        at = asyncio.get_running_loop().time()
        other = runner_of(manager, guesses, "agent-1")
        work = [asyncio.create_task(other.run()), asyncio.create_task(beats_of(manager, other, "agent-1"))]
        await asyncio.wait_for(all_ended(manager), 200.0)
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        return asyncio.get_running_loop().time() - at

    took_s = run_virtual(scenario())
    assert one.ended is not None
    assert (one.ended["outcome"], one.ended["reward"]) == ("scored", 6.0)
    assert (one.claims, one.drawn) == (2, 3), "no turn was drawn twice"
    assert drawn == ["answer 0", "answer 1", "answer 2"]
    last = one.asked[-1]["messages"]
    assert [message["content"] for message in last if message["role"] == "assistant"] == drawn[:2]
    assert took_s < 60.0


def test_a_session_that_another_worker_has_is_stopped_and_not_ended() -> None:
    manager = Manager()
    (one,) = manager.add()
    stopped: list[str] = []

    async def waits(session: Session) -> float:
        try:
            await asyncio.sleep(1000.0)
        finally:
            stopped.append(session.id)
        return 1.0

    async def scenario() -> SessionRunner:
        runner = runner_of(manager, waits)
        work = [asyncio.create_task(runner.run()), asyncio.create_task(beats_of(manager, runner))]
        await asyncio.sleep(6.0)
        one.owner = "agent-1"
        manager.heard["agent-1"] = 1e9
        await asyncio.sleep(6.0)
        assert runner.held == []
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        return runner

    runner = run_virtual(scenario())
    assert (stopped, one.ended, runner.counts.lost) == ([one.id], None, 1)


def test_a_worker_that_leaves_hands_its_sessions_back() -> None:
    manager = Manager()
    (one,) = manager.add()

    async def scenario() -> None:
        runner = runner_of(manager, sleeps)
        task = asyncio.create_task(runner.run())
        await asyncio.sleep(1.0)
        assert one.owner
        task.cancel()
        await asyncio.wait({task})
        await hand_back(Direct(manager), runner.interrupted)

    run_virtual(scenario())
    assert (one.owner, one.ended) == ("", None)


# -- several at once ---------------------------------------------------------------------------------


def test_sessions_run_beside_each_other_up_to_the_limit() -> None:
    manager = Manager()
    manager.add(10)
    at_once = 0
    most = 0

    async def counted(session: Session) -> float:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(10.0)
        at_once -= 1
        return 1.0

    clock = VirtualClock()
    run_virtual(run_until_ended(manager, counted, concurrency=4), clock)
    assert most == 4
    assert clock.monotonic() < 40.0


def test_a_fault_of_one_session_hurts_no_other() -> None:
    manager = Manager()
    manager.add(8)

    async def mixed(session: Session) -> float:
        await asyncio.sleep(1.0)
        if session.claimed.index % 2:
            sys.exit(1)
        await asyncio.sleep(5.0)
        return 1.0

    run_virtual(run_until_ended(manager, mixed, breaker=100))
    ended = [one.ended["outcome"] for one in manager.sessions.values() if one.ended]
    assert ended == ["scored", "infra_fault"] * 4


def test_a_thread_that_hangs_costs_its_own_session_alone() -> None:
    """Real time: a thread cannot wait in virtual time."""
    manager = Manager()
    manager.add(2, seconds=600.0)

    def plain(session: BlockingSession) -> float:
        if session.claimed.index == 0:
            session.tool(time.sleep, 1.5)
        return 1.0

    runner = asyncio.run(run_until_ended(manager, plain, tool_timeout_s=0.2, within_s=60.0))
    first, second = manager.sessions.values()
    assert first.ended is not None
    assert second.ended is not None
    assert (first.ended["outcome"], second.ended["outcome"]) == ("infra_fault", "scored")
    assert "tool: " in first.ended["reason"]
    assert "took longer than 0.2 s" in first.ended["reason"]
    assert runner.counts.ended["infra_fault"] == 1


class Heard:
    """What a worker's owner hears: its pauses, and how many sessions have ended, each time."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.ended: list[int] = []

    def noted(self, kind: str, details: dict[str, Any]) -> None:
        self.events.append((kind, details))

    def progressed(self, fields: dict[str, Any]) -> None:
        self.ended.append(fields["sessions"])


# -- the breaker -------------------------------------------------------------------------------------


def test_a_worker_whose_sessions_fail_one_after_another_pauses_and_tries_one() -> None:
    manager = Manager()
    manager.add(40)
    tried: list[float] = []
    heard = Heard()
    events = heard.events
    mended = False

    async def sandboxed(session: Session) -> float:
        tried.append(asyncio.get_running_loop().time())
        if not mended:
            raise InfraFault("the sandbox is away")
        return 1.0

    settings = settings_of(sandboxed, concurrency=4, breaker=3)
    runner = SessionRunner(
        Direct(manager),
        agent_of(sandboxed, settings, {}),
        settings,
        owner=heard,
    )

    async def scenario() -> None:
        nonlocal mended
        work = [asyncio.create_task(runner.run()), asyncio.create_task(beats_of(manager, runner))]
        await asyncio.sleep(PAUSE_S * 2)
        assert runner.paused_s > 0
        assert len(tried) <= 5, "a pause burns no prompts"
        assert [kind for kind, _ in events][:1] == ["AgentPaused"]
        assert "the sandbox is away" in events[0][1]["last_fault"]
        mended = True
        await all_ended(manager)
        for task in work:
            task.cancel()
        await asyncio.wait(work)

    run_virtual(scenario())
    assert events[-1][0] == "AgentResumed"
    assert heard.ended == list(range(1, len(manager.sessions) + 1)), "each once, as it ends"
    faults = [one.ended["outcome"] for one in manager.sessions.values() if one.ended].count("infra_fault")
    assert faults <= 6
    assert runner.counts.ended["scored"] == 40 - faults
    assert (runner.faults, runner.paused_s) == (0, 0.0)


def test_the_first_pause_is_short_however_many_sessions_failed_at_once() -> None:
    manager = Manager()
    manager.add(40)
    heard = Heard()

    async def sandboxed(session: Session) -> float:
        await asyncio.sleep(1.0)
        raise InfraFault("the sandbox is away")

    settings = settings_of(sandboxed, concurrency=16, breaker=3)
    runner = SessionRunner(Direct(manager), agent_of(sandboxed, settings, {}), settings, owner=heard)

    async def scenario() -> None:
        work = [asyncio.create_task(runner.run()), asyncio.create_task(beats_of(manager, runner))]
        await asyncio.sleep(PAUSE_S * 7)
        for task in work:
            task.cancel()
        await asyncio.wait(work)

    run_virtual(scenario())
    pauses = [(told["faults"], told["pause_s"]) for kind, told in heard.events if kind == "AgentPaused"]
    assert pauses == [(16, PAUSE_S), (17, PAUSE_S * 2), (18, PAUSE_S * 4)]


def test_a_score_between_faults_keeps_the_worker_at_work() -> None:
    manager = Manager()
    manager.add(20)
    heard = Heard()

    async def every_other(session: Session) -> float:
        if session.claimed.index % 3:
            raise InfraFault("once")
        return 1.0

    settings = settings_of(every_other, concurrency=1, breaker=3)
    runner = SessionRunner(
        Direct(manager),
        agent_of(every_other, settings, {}),
        settings,
        owner=heard,
    )

    async def scenario() -> None:
        task = asyncio.create_task(runner.run())
        beating = asyncio.create_task(beats_of(manager, runner))
        await all_ended(manager)
        for one in (task, beating):
            one.cancel()
        await asyncio.wait({task, beating})

    run_virtual(scenario())
    assert heard.events == []


def test_a_worker_that_is_given_nothing_after_its_pause_does_not_pause_again() -> None:
    manager = Manager()
    manager.add(3)
    heard = Heard()
    mended = False

    async def sandboxed(session: Session) -> float:
        if not mended:
            raise InfraFault("the sandbox is away")
        return 1.0

    settings = settings_of(sandboxed, concurrency=4, breaker=3)
    runner = SessionRunner(Direct(manager), agent_of(sandboxed, settings, {}), settings, owner=heard)

    async def scenario() -> None:
        nonlocal mended
        work = [asyncio.create_task(runner.run()), asyncio.create_task(beats_of(manager, runner))]
        await asyncio.sleep(PAUSE_S * 20)
        mended = True
        (late,) = manager.add(group=1)
        await asyncio.sleep(1.0)
        assert late.ended is not None, "it has waited for the session"
        for task in work:
            task.cancel()
        await asyncio.wait(work)

    run_virtual(scenario())
    assert [kind for kind, _ in heard.events] == ["AgentPaused", "AgentResumed"]


def test_what_a_worker_runs_can_be_asked_while_a_session_ends() -> None:
    """Its beats ask on another thread."""
    settings = settings_of(sleeps)
    runner = SessionRunner(Direct(Manager()), agent_of(sleeps, settings, {}), settings)

    class Ending:
        id = "train-0-0-0"

        @property
        def session(self) -> Any:
            runner._running.popitem()
            return self

    runner._running = {name: Ending() for name in "ab"}  # type: ignore[misc]
    assert runner.held == ["train-0-0-0", "train-0-0-0"]
