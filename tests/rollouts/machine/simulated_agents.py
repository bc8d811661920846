"""Agents that generate nothing, for open groups without engines: what they call a token is a hash of everything before
it, of the policy's version and of who made it. So a sample that was put together from pieces that do not belong
together shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.requests import seed_of
from gyre.rollouts.protocol.codec import encode
from gyre.rollouts.protocol.columns import lineage
from gyre.rollouts.protocol.frames import Held, Hello, Keep
from gyre.rollouts.protocol.progress import End, GenerationProgress

MASK = (1 << 64) - 1


def mix(state: int, *more: int) -> int:
    for value in more:
        state = ((state ^ (value & MASK)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & MASK
        state ^= state >> 29
    return state


def token_of(state: int, version: int, maker: int) -> int:
    return mix(state, version + 1, maker) & 0x3FFFFF


def logprob_of(token: int) -> float:
    return -(token % 1000) / 64


def goal_of(seed: int, limit: int) -> int:
    """How long the sample is to be; at the limit it ends by `length`."""
    return min(limit, 1 + seed % (limit + 2))


@dataclass(eq=False)
class Sim:
    """A sample at an agent."""

    key: int
    row: int
    lease: int
    prompt: Any
    seed: int
    limit: int
    tokens: list[int]
    start: int
    versions: list[int] = field(default_factory=list)
    sent: int = 0
    end: str = ""
    end_seq: int = 0

    def __post_init__(self) -> None:
        self.state = mix(self.seed, *(int(token) for token in self.prompt))
        for token in self.tokens:
            self.state = mix(self.state, token)

    def advance(self, count: int, version: int, maker: int) -> None:
        goal = goal_of(self.seed, self.limit)
        while count and not self.end:
            token = token_of(self.state, version, maker)
            self.state = mix(self.state, token)
            self.tokens.append(token)
            self.versions.append(version)
            count -= 1
            if len(self.tokens) >= goal:
                self.end = "stop" if goal < self.limit else "length"


@dataclass(eq=False)
class SimAgent:
    name: str
    maker: int
    incarnation: int
    version: int = -1
    connected: bool = False
    draining: bool = False
    seq: int = 0
    samples: dict[int, Sim] = field(default_factory=dict)
    """By lease."""
    inbox: list[Any] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    """Reported over this connection."""

    def hello(self) -> Hello:
        return Hello(
            protocol=1,
            instance=self.name,
            incarnation=str(self.incarnation),
            model="unset",
            engine="sim",
            max_running=4,
            kv_tokens=4096,
            version=self.version,
            held=[
                Held(key=sim.key, lease=lease, start=sim.start, length=len(sim.tokens))
                for lease, sim in self.samples.items()
            ],
        )

    def welcomed(self, keep: list[Keep]) -> None:
        self.connected, self.seq, self.frames, self.inbox = True, 0, [], []
        kept = {one.key: one for one in keep}
        mine, self.samples = self.samples, {}
        for sim in mine.values():
            one = kept.get(sim.key)
            if one is None:
                continue
            sim.row, sim.lease, sim.end_seq = one.row, one.lease, 0
            sim.sent = one.known - sim.start
            if (
                lineage(np.array(sim.prompt, np.int32), sim.seed, np.array(sim.tokens[: one.known], np.int32))
                != one.lineage
            ):
                sim.tokens, sim.versions, sim.sent, sim.end = sim.tokens[: sim.start], [], 0, "released"
            self.samples[sim.lease] = sim

    def read(self) -> None:
        inbox, self.inbox = self.inbox, []
        for frame in inbox:
            if isinstance(frame, tuple):  # an assignment
                prompt, work = frame
                prior = np.frombuffer(work.prior, "<i4").tolist()
                sim = Sim(
                    work.key,
                    work.row,
                    work.lease,
                    np.frombuffer(prompt.tokens, "<i4"),
                    work.seed,
                    prompt.sampling["max_new_tokens"],
                    prior,
                    len(prior),
                )
                if self.version < 0 or self.draining:
                    sim.end = "released"
                self.samples[sim.lease] = sim
            else:  # a cancelled lease
                sim_or_none = self.samples.get(frame)
                if sim_or_none is not None and not sim_or_none.end:
                    sim_or_none.end = "released"

    def report(self, choose: Callable[[Sim], int | None]) -> bytes:
        """`choose` says of each sample how many of its unsent tokens go out; None for all, and its end."""
        self.seq += 1
        rows: list[tuple[Sim, int, int]] = []
        ends = []
        for sim in sorted(self.samples.values(), key=lambda sim: sim.row):
            made = len(sim.tokens) - sim.start
            if rows and rows[-1][0].row == sim.row:
                continue  # one of them was called off, and its row has been given again
            some = choose(sim)
            if some is None and sim.end and not sim.end_seq:
                # Of several versions, those before the last went out in a frame before.
                pass
            count = made - sim.sent if some is None else min(some, max(made - sim.sent - 1, 0))
            if count:
                version = sim.versions[sim.sent]
                same = 1
                while same < count and sim.versions[sim.sent + same] == version:
                    same += 1
                rows.append((sim, same, version))
                sim.sent += same
            if some is None and sim.sent == made and sim.end and not sim.end_seq:
                sim.end_seq = self.seq
                ends.append(End(sim.row, sim.lease, sim.end, "sim", ()))
        tokens = [
            t for sim, n, _ in rows for t in sim.tokens[sim.start + sim.sent - n : sim.start + sim.sent]
        ]
        frame = GenerationProgress(
            self.seq,
            np.array([sim.row for sim, _, _ in rows], np.uint32),
            np.array([sim.lease for sim, _, _ in rows], np.uint64),
            np.array([sim.start + sim.sent - n for sim, n, _ in rows], np.uint32),
            np.array([n for _, n, _ in rows], np.uint32),
            np.array([version for _, _, version in rows], np.int32),
            np.array(tokens, np.int32),
            np.array([logprob_of(token) for token in tokens], np.float32),
            ends,
            rate_tokens_s=10.0,
        )
        data = encode(frame)
        self.frames.append(data)
        return data

    def acknowledged(self, seq: int) -> None:
        for lease in [lease for lease, sim in self.samples.items() if sim.end_seq and sim.end_seq <= seq]:
            del self.samples[lease]


@dataclass
class Rows:
    """What is in the ledger."""

    counters: dict[str, Any] = field(default_factory=dict)
    groups: dict[int, bytes] = field(default_factory=dict)
    deltas: dict[int, bytes] = field(default_factory=dict)
    newest: int = 0
    served: int = 0

    def restored(self, epoch: int) -> OpenGroups:
        open_groups = OpenGroups(epoch=epoch)
        open_groups.newest_version = self.newest
        open_groups.promote(self.served)
        open_groups.restore(self.counters, dict(sorted(self.groups.items())), sorted(self.deltas.items()))
        return open_groups


def picture(open_groups: OpenGroups) -> dict[str, Any]:
    """Everything that a restart must bring back."""
    return {
        "account": {k: v for k, v in open_groups.counters().items() if not k.startswith("next_")},
        "samples": {
            state.key: (
                state.length,
                state.finish,
                state.resets,
                state.tokens()[0].tolist(),
                state.tokens()[1].tobytes(),
                [run for run in state.runs if run[1] != run[2]],
                state.instances,
                seed_of(state),
                state.record,
                state.evidence,
            )
            for state in open_groups.samples()
        },
        "left": {number: request.left for number, request in open_groups.requests.items()},
        "missing": open_groups.missing_tokens(),
    }
