"""What is seen of sessions: where they are, how they ended, and what each row says of its turns and their times."""

from __future__ import annotations

import asyncio
from typing import Any

from gyre.rollouts.session_extras import ENGINE_S, OUTCOME, PATH, REASON, TOOL_S, TURNS, row_turns
from tests.sessions.session_plane import SessionPlane, drawn, until

PROMPT = [7, 8]


def told(plane: SessionPlane) -> dict[str, Any]:
    sessions: dict[str, Any] = plane.manager.status()["sessions"]
    return sessions


async def test_where_sessions_are(plane: SessionPlane) -> None:
    await plane.asked([0, 1])
    agent = await plane.working("a")
    assert (told(plane)["waiting"], told(plane)["running"], told(plane)["workers"]) == (2, 0, 0)
    (session,) = await plane.claim(most=1)
    first = plane.turning(session, PROMPT)
    await until(lambda: told(plane)["at_engine"] == 1)
    assert (told(plane)["waiting"], told(plane)["running"], told(plane)["with_agent"]) == (1, 1, 0)
    await drawn(agent, 2)
    await first
    assert (told(plane)["at_engine"], told(plane)["with_agent"]) == (0, 1)
    assert told(plane)["since_start"]["turns"] == 1
    await plane.end(session, outcome="policy_fault", reward=0.0, reason="it called no tool")
    assert told(plane)["since_start"]["faults"] == []
    assert told(plane)["since_start"]["outcomes"] == {
        "scored": 0,
        "truncated": 0,
        "policy_fault": 1,
        "infra_fault": 0,
    }


async def test_a_fault_is_told_with_its_reason_and_counted_once(plane: SessionPlane) -> None:
    await plane.asked([0])
    (session,) = await plane.claim()
    await plane.end(session, outcome="infra_fault", reason="the sandbox is gone")
    (again,) = await plane.claim()
    assert again["attempt"] == 1
    since = told(plane)["since_start"]
    assert since["faults"] == [{"session": session["id"], "reason": "the sandbox is gone"}]
    assert (since["outcomes"]["infra_fault"], since["drawn_again"]) == (1, 1)


async def test_rows_say_their_turns_and_the_first_one_the_times(plane: SessionPlane) -> None:
    trainer = await plane.asked([0])
    agent = await plane.working("a")
    (session,) = await plane.claim()
    first = plane.turning(session, PROMPT)
    await drawn(agent, 2)
    await first
    waited = 0.05
    for added in ([50, 51], [60]):
        await asyncio.sleep(waited)
        again = plane.turning(session, [*PROMPT, 1, 2, *added])
        await drawn(agent, 1)
        await again
    await plane.end(session, outcome="truncated", reward=0.0, reason="no turn is left")
    rows = (await trainer.groups(1))[0].samples
    assert [[turn[:4] for turn in row_turns(row)] for row in rows] == [
        [(0, 0, 0, 2), (1, 2, 4, 5)],
        [(0, 0, 0, 2), (2, 2, 3, 4)],
    ]
    waits = [turn.waited_s for row in rows for turn in row_turns(row)]
    assert waits[0] is None
    assert all(one is not None and one >= waited for one in (waits[1], waits[3]))
    assert {(row.extras[OUTCOME], row.extras[REASON]) for row in rows} == {("truncated", "no turn is left")}
    numbers = rows[0].extras
    assert numbers[TURNS] == 3
    assert numbers[TOOL_S] >= 2 * waited
    assert numbers[ENGINE_S] > 0
    assert not {TURNS, TOOL_S, ENGINE_S} & rows[1].extras.keys()


async def test_no_time_is_made_up_where_a_manager_died(plane: SessionPlane) -> None:
    await plane.asked([0])
    agent = await plane.working("a")
    (session,) = await plane.claim()
    first = plane.turning(session, PROMPT)
    await drawn(agent, 2)
    await first
    await plane.kill()
    await plane.start()
    await agent.back()
    await plane.settled()
    second = plane.turning(session, [*PROMPT, 1, 2, 50])
    await drawn(agent, 1)
    await second
    await plane.end(session)
    trainer = await plane.trainer(term=2)
    await trainer.ask([0])
    (row,) = (await trainer.groups(1))[0].samples
    assert row.extras[TURNS] == 2
    assert [turn.waited_s for turn in row_turns(row)] == [None, None]
    assert not {TOOL_S, ENGINE_S} & row.extras.keys()
    assert len(row.extras[PATH]) == 2
    assert told(plane)["since_start"]["turns"] == 1  # since this manager began
