"""Sessions over real sockets and a real ledger: handed out, turned, ended, delivered; and what deaths do to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from gyre.agents import Session
from gyre.agents.client import Claimed, SessionClient
from gyre.request_body import RequestRefused
from gyre.rollouts.plane.session_ledger import SessionEnded, TurnAsked
from gyre.rollouts.plane.session_tree import SessionOutcome
from gyre.rollouts.protocol.frames import GroupsStored
from gyre.rollouts.sample_checks import problem_with_group
from tests.sessions.session_machine import SessionWorld
from tests.sessions.session_plane import (
    GENERATE,
    SessionPlane,
    drawn,
    generate_body,
    ids_of,
    session_plane,
    until,
)

PROMPT = [7, 8]


async def test_a_rollout_of_two_turns_is_one_row(plane: SessionPlane) -> None:
    trainer = await plane.asked([4])
    agent = await plane.working("a")
    (session,) = await plane.claim()
    assert (session["group"], session["index"], session["prompt_ids"]) == (4, 0, PROMPT)
    first = plane.turning(session, PROMPT)
    assert await drawn(agent, 3) == [1, 2, 3]
    status, told = await first
    assert (status, ids_of(told)) == (200, [1, 2, 3])
    second = plane.turning(session, [*PROMPT, 1, 2, 3, 40, 41])
    await drawn(agent, 2)
    assert ids_of((await second)[1]) == [1, 2]
    assert await plane.end(session, reward=0.5) == (200, {"id": session["id"], "outcome": "scored"})
    group = (await trainer.groups(1))[4]
    assert group.prompt_ids.tolist() == PROMPT
    (row,) = group.samples
    assert row.token_ids.tolist() == [1, 2, 3, 40, 41, 1, 2]
    assert row.mask is not None
    assert row.mask.tolist() == [True, True, True, False, False, True, True]
    assert row.logprobs.tolist() == [-1.0, -2.0, -3.0, 0.0, 0.0, -1.0, -2.0]
    assert (row.reward, row.rollout, row.finish_reason) == (0.5, 0, "stop")


async def test_the_same_request_gets_the_same_bytes(plane: SessionPlane) -> None:
    await plane.asked([0])
    agent = await plane.working("a")
    (session,) = await plane.claim()
    first = plane.turning(session, PROMPT)
    await drawn(agent)
    before = await first
    headers = {"x-stainless-retry-count": "1", "Authorization": "Bearer secret"}
    async with plane.session().post(
        f"{plane.url}{session['path']}{GENERATE}",
        data=json.dumps(generate_body(PROMPT)).encode(),
        headers=headers,
    ) as reply:
        assert (reply.status, await reply.json()) == before
    assert plane.manager.groups.account.generated == 3


async def test_a_prompt_that_does_not_go_on_from_its_parent_is_refused(plane: SessionPlane) -> None:
    """Whoever asks: not a token of the path may differ, drawn or not."""
    await plane.asked([0])
    agent = await plane.working("a")
    (session,) = await plane.claim()
    first = plane.turning(session, PROMPT)
    assert await drawn(agent, 3) == [1, 2, 3]
    await first
    path = np.array([*PROMPT, 1, 2, 3], np.int32)
    for at in (0, len(path) - 1):
        other = np.append(path, np.int32(40))
        other[at] += 1
        with pytest.raises(RequestRefused, match="does not go on from turn 0"):
            plane.manager.shell.handle(TurnAsked(session["id"], f"key-{at}", other, {}, 0.0, parent=0))
    plane.exact()


async def test_a_branch_is_a_row_of_the_same_rollout(plane: SessionPlane) -> None:
    trainer = await plane.asked([0])
    agent = await plane.working("a")
    (session,) = await plane.claim()
    first = plane.turning(session, PROMPT)
    await drawn(agent, 2)
    await first
    for added in (50, 60):
        again = plane.turning(session, [*PROMPT, 1, 2, added])
        await drawn(agent, 1)
        await again
    await plane.end(session)
    group = (await trainer.groups(1))[0]
    assert not problem_with_group(group, vocabulary=100), "the trainer takes no such group"
    rows = group.samples
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 50, 1], [1, 2, 60, 1]]
    assert [row.logprobs.tolist() for row in rows] == [[-1.0, -2.0, 0.0, -1.0], [0.0, 0.0, 0.0, -1.0]]
    assert [row.mask.tolist() for row in rows if row.mask is not None] == [
        [True, True, False, True],
        [False, False, False, True],
    ]
    assert {row.rollout for row in rows} == {0}


async def test_what_infrastructure_ended_is_drawn_again(plane: SessionPlane) -> None:
    trainer = await plane.asked([0])
    agent = await plane.working("a")
    (session,) = await plane.claim()
    first = plane.turning(session, PROMPT)
    await drawn(agent, 4)
    await first
    assert (await plane.end(session, "infra_fault", reason="the sandbox is gone"))[0] == 200
    (again,) = await plane.claim()
    assert (again["attempt"], again["index"]) == (1, 0)
    assert plane.told("SessionFault")[0]["reason"] == "the sandbox is gone"
    second = plane.turning(again, PROMPT)
    await drawn(agent, 1)
    await second
    await plane.end(again)
    group = (await trainer.groups(1))[0]
    assert [row.token_ids.tolist() for row in group.samples] == [[1]]
    assert plane.manager.groups.account.discarded["session"] == 4


async def test_sessions_outlive_their_manager(plane: SessionPlane) -> None:
    trainer = await plane.asked([0], n=2)
    agent = await plane.working("a")
    mine = await plane.claim(most=2)
    first = plane.turning(mine[0], PROMPT)
    await drawn(agent, 3)
    told = await first
    under_way = plane.turning(mine[1], PROMPT)
    (sample,) = await agent.work(1)
    await agent.report({sample.work.row: 2})
    await plane.settled()
    await plane.kill()
    assert (await under_way)[0] == 503
    await plane.start()
    await agent.back()
    assert await plane.turn(mine[0], PROMPT) == told
    again = plane.turning(mine[1], PROMPT)
    (row,) = agent.samples
    await agent.report({row: 1}, {row: "stop"})
    assert ids_of((await again)[1]) == [1, 2, 3]
    for session in mine:
        assert (await plane.end(session))[0] == 200
    trainer = await plane.trainer(term=2)
    await trainer.ask([0], n=2)
    group = (await trainer.groups(1))[0]
    assert [row.token_ids.tolist() for row in group.samples] == [[1, 2, 3], [1, 2, 3]]


async def test_equal_requests_are_told_apart_over_a_managers_death(plane: SessionPlane) -> None:
    """By Gyre's own client, which counts them: an agent that is run again finds the first answer first."""
    await plane.asked([0])
    agent = await plane.working("a")
    client = SessionClient(lambda: (plane.url, "secret"), worker="w")

    async def run(claimed: Claimed, tokens: list[int]) -> list[list[int]]:
        session, told = Session(claimed, client), []
        for count in tokens:
            turn = asyncio.create_task(session.generate(PROMPT))
            if count:
                await drawn(agent, count)
            told.append((await turn).token_ids)
        return told

    try:
        (claimed,) = await client.claim(1)
        assert await run(claimed, [3, 2]) == [[1, 2, 3], [1, 2]]
        await plane.settled()
        await plane.kill()
        await plane.start()
        await agent.back()
        assert await run(claimed, [0, 0, 1]) == [[1, 2, 3], [1, 2], [1]]
        plane.exact()
    finally:
        await client.close()


async def test_a_silent_worker_loses_its_sessions(tmp_path: Path) -> None:
    async with session_plane(tmp_path, worker_silence_s=0.2) as plane:
        await plane.asked([0])
        agent = await plane.working("a")
        (session,) = await plane.claim("dead")
        first = plane.turning(session, PROMPT)
        await drawn(agent, 3)
        told = await first
        (again,) = await plane.claim("alive")
        assert (again["id"], again["turns"]) == (session["id"], 1)
        assert again["path"] != session["path"]
        assert (await plane.turn(session, PROMPT))[0] == 410
        assert await plane.turn(again, PROMPT) == told
        assert (await plane.end(again))[0] == 200
        plane.exact()


async def test_a_body_that_comes_after_its_session_was_handed_on_is_refused(tmp_path: Path) -> None:
    """It would count for the one who has the session now: as an answer that they have heard."""
    async with session_plane(tmp_path, worker_silence_s=0.2) as plane:
        await plane.asked([0])
        agent = await plane.working("a")
        (session,) = await plane.claim("slow")
        first = plane.turning(session, PROMPT)
        await drawn(agent, 3)
        told = await first
        body = json.dumps(generate_body(PROMPT)).encode()
        is_handed_on = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:10]
            await is_handed_on.wait()
            yield body[10:]

        headers = {"Authorization": "Bearer secret"}
        url = f"{plane.url}{session['path']}{GENERATE}"
        late = asyncio.ensure_future(plane.session().post(url, data=slowly(), headers=headers))
        await until(lambda: plane.front._asking)
        (again,) = await plane.claim("alive")
        is_handed_on.set()
        async with await late as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (410, "lost")
        assert await plane.turn(again, PROMPT) == told
        assert plane.manager.groups.account.generated == 3


def test_who_ran_a_session_of_a_group_that_is_asked_for_again_has_not_the_new_one() -> None:
    """Its sessions have the same names."""
    world = SessionWorld()
    world.attach()
    world.publish()
    for worker in ("late", "w"):
        world.ask_groups("train", [0], 1, min_version=0, pinned=False)
        world.claim(worker, 1)
        world.commit()
        if worker == "late":
            world.tell(GroupsStored(purpose="train", ids=[0]))
            world.pass_time(0.1)
    late, new = world.witness.claims
    assert late.session == new.session
    with pytest.raises(RequestRefused, match="handed to another worker"):
        world.do(SessionEnded(late.session, SessionOutcome.INFRA_FAULT, None, claim=late.number))
    world.do(SessionEnded(new.session, SessionOutcome.INFRA_FAULT, None, claim=new.number))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"token_ids": list(range(5000))}, 422),
        ({"token_ids": []}, 422),
        ({"token_ids": "text"}, 422),
    ],
)
async def test_what_cannot_be_is_refused(plane: SessionPlane, body: dict[str, object], status: int) -> None:
    await plane.asked([0])
    (session,) = await plane.claim()
    got, told = await plane.post(
        f"{session['path']}/inference/v1/generate", {"sampling_params": {"max_tokens": 4}, **body}
    )
    assert got == status, told
    assert told["error"]["message"]


async def test_a_session_that_is_not_there(plane: SessionPlane) -> None:
    await plane.asked([0])
    (session,) = await plane.claim()
    assert (await plane.turn({"path": "/s/forged.1"}, PROMPT))[0] == 404
    assert (await plane.turn({"path": f"/s/{session['id']}.9"}, PROMPT))[0] == 410
    assert (await plane.end(session, "infra_fault"))[0] == 200
    assert (await plane.turn(session, PROMPT))[0] == 404


async def test_workers_wait_for_sessions(plane: SessionPlane) -> None:
    waiting = asyncio.create_task(plane.claim(wait_s=20.0))
    await until(lambda: "claims" in plane.front._waiting)
    await plane.asked([0])
    assert len(await waiting) == 1
    assert await plane.claim(wait_s=0.0) == []


async def test_a_group_waits_for_its_last_session(plane: SessionPlane) -> None:
    trainer = await plane.asked([0], n=2)
    agent = await plane.working("a")
    one, other = await plane.claim()
    for session in (one, other):
        turn = plane.turning(session, PROMPT)
        await drawn(agent)
        await turn
    await plane.end(one, reward=0.0)
    await plane.settled()
    assert plane.ledger.complete_groups() == []
    await plane.end(other, reward=1.0)
    rows = (await trainer.groups(1))[0].samples
    assert [(row.rollout, row.reward) for row in rows] == [(0, 0.0), (1, 1.0)]


async def test_what_waits_for_the_next_policy_takes_no_place_of_what_that_policy_waits_for(
    plane: SessionPlane,
) -> None:
    """A pinned evaluation keeps the next version from being served. Workers whose places were full of sessions that
    wait for it would never run the evaluation's."""
    trainer = await plane.asked([-1], purpose="evaluate/0/held_out", pinned=True)
    agent = await plane.working("a")
    await trainer.ask([4], min_version=1)
    (session,) = await plane.claim(most=8)
    assert session["purpose"] == "evaluate/0/held_out"
    assert await plane.claim("other", wait_s=0.0) == []
    later = asyncio.create_task(plane.claim("other"))
    first = plane.turning(session, PROMPT)
    await drawn(agent)
    await first
    assert not later.done()
    await plane.end(session)
    (kept_back,) = await later
    assert (kept_back["purpose"], kept_back["group"]) == ("train", 4)
