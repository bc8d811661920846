"""What sessions cost the rollout manager: the time of a claim, a turn, an end and a tick where few and where many
sessions are open, and the bytes that a session's turns write into the ledger.

    python bench/sessions.py [--json FILE] [--open 100 1000 10000]

The machine of the plane is driven in this process, without sockets and without a store, by one instance that answers
at once. Each cost is the median of so many events of one kind, in microseconds; the smallest number of open sessions is
the baseline of the others. Bytes are those of all rows that are written, whole rows that replace others included,
beside the bytes of the tokens that the session adds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from typing import Any

import numpy as np

from gyre.rollouts.plane.events import (
    AgentDialled,
    AgentSent,
    Committed,
    DispatchDue,
    LedgerFree,
    Restored,
    Ticked,
)
from gyre.rollouts.plane.instructions import DispatchSoon, Refuse, Send, Write
from gyre.rollouts.plane.machine import handle
from gyre.rollouts.plane.peers import Caller
from gyre.rollouts.plane.session_ledger import SessionEnded, TurnAsked
from gyre.rollouts.plane.session_trainer import SessionsClaimed, SessionTrainer, WorkerBeat
from gyre.rollouts.plane.session_tree import ROOT, SessionOutcome
from gyre.rollouts.plane.settings import ManagerSettings, SessionSettings
from gyre.rollouts.plane.state import Plane
from gyre.rollouts.plane.trainer import TrainerDialled, TrainerSent
from gyre.rollouts.protocol.codec import encode, unpack
from gyre.rollouts.protocol.frames import PROTOCOL, Assign, Attach, Hello, Loaded, Publish, Request
from gyre.rollouts.protocol.progress import End, GenerationProgress
from gyre.rollouts.samples import Group, pack_groups
from gyre.store import RolloutRows

EVENTS = 200
"""Of each kind are timed."""

GROUP = 8
DRAWN = 500
"""Tokens of a turn that are drawn; as many are added before them."""


class Peer:
    name, host, closing = "peer", "", False


class Manager:
    """One manager with an instance that draws `DRAWN` tokens for whatever it is given, at once."""

    def __init__(self, sessions: int) -> None:
        settings = SessionSettings(max_turns=64, max_tokens=1 << 17)
        self.plane = Plane(ManagerSettings(sessions=settings), [SessionTrainer], epoch=1, now=0.0)
        self.now, self.seq, self.written = 0.0, 0, 0
        self.tokens: dict[int, Any] = {}
        """What the instance drew, by key."""
        self.agent, self.trainer = Peer(), Peer()
        self.do(Restored(RolloutRows(1, {}, {}, [])))
        self.do(TrainerDialled(self.trainer, Attach(protocol=PROTOCOL, term=1)))
        self.do(TrainerSent(self.trainer, Publish(version=0, checksum="c", path="")))
        self.commit()
        hello = Hello(
            protocol=PROTOCOL,
            instance="a",
            incarnation="1",
            model="unset",
            engine="bench",
            max_running=1 << 16,
            kv_tokens=1 << 30,
        )
        self.do(AgentDialled(self.agent, hello, Caller()))
        self.session = self.plane.links["a"]
        self.do(AgentSent(self.session, Loaded(version=0, checksum="c", fetch_s=0.0, load_s=0.0)))
        groups = [Group(at, np.arange(1, 501, dtype=np.int32)) for at in range(-(-sessions // GROUP))]
        asked = Request(
            purpose="train",
            groups=pack_groups(groups),
            n=GROUP,
            sampling={"max_new_tokens": DRAWN},
            seed=1,
            min_version=0,
        )
        self.do(TrainerSent(self.trainer, asked))
        self.commit()

    @property
    def ledger(self) -> Any:
        return next(one for one in self.plane.requesters if isinstance(one, SessionTrainer)).sessions

    def do(self, event: object) -> float:
        """Handles the event and returns how long that took, in seconds; what comes of it is not timed."""
        began = time.perf_counter()
        done = handle(self.plane, event, self.now)
        took = time.perf_counter() - began
        due = False
        for one in done:
            if isinstance(one, Refuse):
                raise one.error
            due |= isinstance(one, DispatchSoon)
            if isinstance(one, Write):
                batch = one.batch
                self.written += sum(map(len, batch.opened.values()))
                self.written += sum(len(body) for _, body in batch.encoded())
                self.written += sum(len(body) for body in batch.sessions.values() if body is not None)
                self.do(Committed(batch))
            elif isinstance(one, Send) and isinstance(one.frame, Assign):
                self.draw(one.frame)
        if due:
            self.do(DispatchDue())
        return took

    def commit(self) -> None:
        self.do(LedgerFree())

    def draw(self, frame: Assign) -> None:
        work = list(frame.work)
        self.seq += 1
        tokens = np.arange(1, DRAWN + 1, dtype=np.int32)
        count = len(work)
        for one in work:
            self.tokens[one.key] = tokens
        report = GenerationProgress(
            self.seq,
            np.array([one.row for one in work], np.uint32),
            np.array([one.lease for one in work], np.uint64),
            np.zeros(count, np.uint32),
            np.full(count, DRAWN, np.uint32),
            np.zeros(count, np.int32),
            np.tile(tokens, count),
            np.tile(np.full(DRAWN, -0.5, np.float32), count),
            [End(one.row, one.lease, "length", "", ()) for one in work],
        )
        self.do(AgentSent(self.session, unpack(encode(report))))

    def turn(self, name: str, number: int, path: Any) -> tuple[float, Any]:
        """The session's next turn, which adds `DRAWN` tokens to the path and draws as many. Returns how long asking
        took, in seconds, and the path after it."""
        prompt = np.concatenate([path, np.full(DRAWN, 7, np.int32)])
        took = self.do(TurnAsked(name, f"k{number}-0", prompt, {}, self.now, number - 1 if number else ROOT))
        self.commit()
        return took, np.concatenate([prompt, np.arange(1, DRAWN + 1, dtype=np.int32)])


def costs(sessions: int) -> dict[str, float]:
    """Microseconds of each kind of event, with so many sessions open."""
    manager = Manager(sessions)
    taken: dict[str, list[float]] = {kind: [] for kind in ("claim", "beat", "turn", "end", "tick")}
    given: list[str] = []
    while len(given) < sessions - EVENTS // 2:
        manager.do(SessionsClaimed(f"w{len(given) // 64}", 64, 0.0))
        given += [one.id for one in manager.ledger.given]
    manager.commit()
    nothing = np.empty(0, np.int32)
    paths = {name: manager.turn(name, 0, nothing)[1] for name in given[:EVENTS]}
    for _ in range(EVENTS // 2):
        taken["claim"].append(manager.do(SessionsClaimed("x", 1, 0.0)))
        taken["beat"].append(manager.do(WorkerBeat("w0", given[:64])))
    manager.commit()
    for name, path in paths.items():
        taken["turn"].append(manager.turn(name, 1, path)[0])
    for name in paths:
        taken["end"].append(
            manager.do(SessionEnded(name, SessionOutcome.SCORED, 1.0)) + manager.do(LedgerFree())
        )
    for _ in range(EVENTS):
        manager.now += 0.01
        taken["tick"].append(manager.do(Ticked()))
    return {kind: 1e6 * statistics.median(times) for kind, times in taken.items()}


def bytes_of_turns(turns: int) -> dict[str, int]:
    """What the turns of one session, each of 500 tokens added and 500 drawn, write."""
    manager = Manager(1)
    manager.do(SessionsClaimed("w", 1, 0.0))
    (name,) = (one.id for one in manager.ledger.given)
    manager.commit()
    before, path = manager.written, np.empty(0, np.int32)
    for number in range(turns):
        _, path = manager.turn(name, number, path)
    return {"turns": turns, "tokens": 4 * len(path), "written": manager.written - before}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write what was measured here")
    parser.add_argument("--open", type=int, nargs="+", default=[200, 1000, 10000])
    options = parser.parse_args()
    by_open = {count: costs(count) for count in options.open}
    kinds = list(next(iter(by_open.values())))
    print("open sessions  " + "".join(f"{kind:>12}" for kind in kinds) + "   (microseconds)")
    for count, found in by_open.items():
        print(f"{count:>13}  " + "".join(f"{found[kind]:>12.0f}" for kind in kinds))
    written = [bytes_of_turns(turns) for turns in (1, 8, 16)]
    print("\n       turns  bytes of tokens  bytes written")
    for one in written:
        print(f"{one['turns']:>12}{one['tokens']:>17}{one['written']:>15}")
    if options.json:
        machine = {
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        with open(options.json, "w") as file:
            json.dump({**machine, "microseconds": by_open, "bytes": written}, file, indent=1)


if __name__ == "__main__":
    main()
