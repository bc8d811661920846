"""A session, which is a rollout of several turns: the tree of its turns, and the rows to train on.

A turn adds tokens to those of its parent: what an agent, a tool or a template put there (`added`), then what an engine
drew. The first turn has no parent, and neither has one that begins anew because its history was edited. A row is a path
from the root to a leaf.

Invariants:
- *drawn once, trained once*: each drawn token is in the mask of exactly one row, the first that has it;
- *never encoded again*: a turn's prompt begins with its parent's tokens, bit for bit;
- *a turn is asked for once*: whoever asks with the key of a turn that is there gets that turn.

This module must not know what a message is, who runs the agent, or how a turn is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.plane.requests import InFlightRequest, InFlightSample
from gyre.rollouts.samples import MORE, Group, InstanceRun, Sample, VersionRun
from gyre.rollouts.session_extras import ASKED, ENGINE_S, OUTCOME, PATH, REASON, TOOL_S, TURNS, RowTurn, spent

ROOT = -1
"""The parent of a turn that begins a branch of its own."""


class SessionOutcome(StrEnum):
    """How a session ended."""

    SCORED = "scored"
    """Its reward is what the agent says."""
    TRUNCATED = "truncated"
    """A budget was spent; its reward is what the agent says of what is there."""
    POLICY_FAULT = "policy_fault"
    """The policy did what it must not: the reward says so."""
    INFRA_FAULT = "infra_fault"
    """A machine, a tool or a grader failed: there is no reward, and another attempt is made."""


@dataclass(eq=False, slots=True)
class LedgerTurn:
    """`request` is a group of one sample, whose prompt is the path before it and what the turn adds. `note` is what its
    front wants to find again. `prompt_length` is that of the whole prompt, in tokens."""

    number: int
    parent: int
    key: str
    request: InFlightRequest
    prompt_length: int
    note: bytes = b""
    is_written: bool = False
    """Its end is in the ledger, so that it may be told."""
    asked_at: float | None = None
    told_at: float | None = None
    """When it was asked for, and when it could be told, monotonic, in seconds; None before that, and of what an earlier
    manager saw."""

    @property
    def name(self) -> str:
        """Who waits for it waits for this name."""
        return f"turn/{self.request.number}"

    @property
    def sample(self) -> InFlightSample:
        return self.request.samples[0]

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """int32 `[p]`: every token before the drawn ones, from the root on."""
        return self.request.prompt()

    @property
    def length(self) -> int:
        """Of its path, in tokens."""
        return self.prompt_length + self.sample.length

    def path(self) -> NDArray[np.int32]:
        """int32: every token from the root to its last one."""
        return np.concatenate([self.prompt_ids, self.sample.token_ids()])

    def own(self) -> bytes:
        """What it has after its parent's path, as int32."""
        return self.request.added.tobytes() + self.sample.token_ids().tobytes()


@dataclass(eq=False, slots=True)
class LedgerSession:
    """One attempt at one member of a group. `claim` grows each time that it is handed out, and is of
    that time, so that it has none of a session that had its name before."""

    id: str
    purpose: str
    group_id: int
    index: int
    attempt: int
    claim: int = 0
    worker: str = ""
    """Who runs it; "" while it waits for somebody."""
    given_at: float = 0.0
    """When it was handed to them, monotonic, in seconds; 0 where an earlier manager did."""
    ended_at: float | None = None
    """When its end was in the ledger, monotonic; None before, and where an earlier manager wrote it."""
    seen_at: float = 0.0
    """When its worker last said that it runs it, monotonic, in seconds."""
    faults: int = 0
    """Attempts at this member that infrastructure ended before."""
    losses: int = 0
    """Workers that it has lost since it had its `turns_at_loss`, those of attempts before it that a worker's loss ended
    included."""
    turns_at_loss: int = 0
    """The most turns that it had at one of these losses."""
    turns: list[LedgerTurn] = field(default_factory=list)
    """In the order of their numbers, which have no gaps while it is open."""
    snapshot: bytes = b""
    began_at: float | None = None
    """When it was first handed out, in seconds since 1970."""
    outcome: SessionOutcome | None = None
    reward: float | None = None
    reason: str = ""
    extras: dict[str, float] = field(default_factory=dict)
    is_written: bool = False
    """The ledger has all of it but its turns' tokens."""
    _by_key: dict[str, LedgerTurn] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """It has ended, and not by a fault of infrastructure."""
        return self.outcome not in (None, SessionOutcome.INFRA_FAULT)

    @property
    def drawn(self) -> int:
        """Tokens that engines drew for it."""
        return sum(turn.sample.length for turn in self.turns)

    @property
    def is_trainable(self) -> bool:
        """Whether a finished turn of it has drawn tokens."""
        return any(turn.sample.finish and turn.sample.length for turn in self.turns)

    def add(self, turn: LedgerTurn) -> None:
        self.turns.append(turn)
        self._by_key[turn.key] = turn

    def forget(self, turns: Sequence[LedgerTurn]) -> None:
        """Drop these turns."""
        for turn in turns:
            del self._by_key[turn.key]
        self.turns = [turn for turn in self.turns if turn.key in self._by_key]

    def turn(self, number: int) -> LedgerTurn:
        """Of an open session, or of one whose unfinished turns are gone."""
        if number < len(self.turns) and self.turns[number].number == number:
            return self.turns[number]
        return next(one for one in self.turns if one.number == number)

    def turn_of(self, key: str) -> LedgerTurn | None:
        return self._by_key.get(key)

    def parent_of(self, prompt_ids: NDArray[np.int32]) -> int:
        """The finished turn with the longest path that the prompt begins with; ROOT where there is none. Each token of
        the tree is compared at most once, int32 `[p]`, as bytes."""
        told = prompt_ids.tobytes()
        best, length = ROOT, 0
        ends: dict[int, int] = {ROOT: 0}
        """Where the paths end that the prompt begins with, by turn's number, in bytes."""
        for turn in self.turns:
            start = ends.get(turn.parent)
            if start is None or not turn.sample.finish or not told.startswith(own := turn.own(), start):
                continue
            end = ends[turn.number] = start + len(own)
            if end > length:
                best, length = turn.number, end
        return best

    def goes_on(self, turn: LedgerTurn, prompt_ids: NDArray[np.int32]) -> bool:
        """Whether the turn is finished, and the prompt, int32 `[p]`, begins with its path."""
        told = prompt_ids.tobytes()
        end = turn.length * prompt_ids.itemsize
        if not turn.sample.finish or end > len(told):
            return False
        while True:
            own = turn.own()
            end -= len(own)
            if not told.startswith(own, end):
                return False
            if turn.parent == ROOT:
                return True
            turn = self.turn(turn.parent)


@dataclass(slots=True)
class _Row:
    """A path: `token_ids` int32 `[p + t]`, `logprobs` float32, 0 where `mask`, bool, is false, with the first turn's
    prompt."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    mask: NDArray[np.bool_]
    versions: list[VersionRun]
    instances: list[InstanceRun]
    finish: str
    turns: list[RowTurn]

    @property
    def prompt(self) -> NDArray[np.int32]:
        """What stands before the first drawn token."""
        drawn = np.flatnonzero(self.mask)
        return self.token_ids[: int(drawn[0])] if len(drawn) else self.token_ids


def group_of(group: Group, sessions: Sequence[LedgerSession]) -> Group:
    """The group with a sample for each row of its sessions, which have all ended. Its prompt is what the rows have in
    common before anything was drawn."""
    rows = [(session, row) for session in sessions for row in _rows_of(session)]
    prompt = _common([row.prompt for _, row in rows]) if rows else group.prompt_ids
    samples = [_sample_of(session, at, row, len(prompt)) for at, session, row in _numbered(rows, sessions)]
    seen: set[int | None] = set()
    for sample, (session, _) in zip(samples, rows, strict=True):
        if sample.rollout not in seen:
            sample.extras |= _numbers(session)
        seen.add(sample.rollout)
    return Group(group.id, prompt, {**group.meta, ASKED: group.prompt_ids}, samples)


def asked_prompt(group: Group) -> Group:
    """The group as it was asked for, where it was delivered before and is asked for again."""
    meta = dict(group.meta)
    prompt = meta.pop(ASKED, group.prompt_ids)
    return Group(group.id, np.asarray(prompt, np.int32), meta)


def _numbered(
    rows: Sequence[tuple[LedgerSession, _Row]], sessions: Sequence[LedgerSession]
) -> Sequence[tuple[int, LedgerSession, _Row]]:
    places = {session.id: at for at, session in enumerate(sessions)}
    return [(places[session.id], session, row) for session, row in rows]


def _common(prompts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """The longest prefix that all have."""
    length = min(map(len, prompts))
    first = prompts[0][:length]
    for other in prompts[1:]:
        different = np.flatnonzero(first != other[: len(first)])
        if len(different):
            first = first[: int(different[0])]
    return first


def _sample_of(session: LedgerSession, rollout: int, row: _Row, prompt: int) -> Sample:
    runs = [VersionRun(one.version, max(one.start - prompt, 0), one.end - prompt) for one in row.versions]
    parts = [InstanceRun(one.name, one.start - prompt, one.end - prompt) for one in row.instances]
    return Sample(
        row.token_ids[prompt:],
        row.logprobs[prompt:],
        tuple(run for run in runs if run.end > run.start),
        "length" if session.outcome is SessionOutcome.TRUNCATED else row.finish,
        session.reward,
        {f"{MORE}{name}": value for name, value in session.extras.items()} | _said(session, row, prompt),
        tuple(parts),
        mask=row.mask[prompt:],
        rollout=rollout,
    )


def _said(session: LedgerSession, row: _Row, prompt: int) -> dict[str, Any]:
    """What each row says of its session. What of a turn is within the group's prompt is left out, as of one that drew
    nothing it may be all."""
    path = [
        [
            turn.number,
            *(max(place - prompt, 0) for place in (turn.start, turn.drawn, turn.end)),
            turn.waited_s,
        ]
        for turn in row.turns
    ]
    reason = {REASON: session.reason} if session.reason else {}
    return {PATH: path, OUTCOME: str(session.outcome or ""), **reason}


def _numbers(session: LedgerSession) -> dict[str, Any]:
    """What its first row says of all of it."""
    times = spent([(turn.asked_at, turn.told_at) for turn in session.turns])
    return {TURNS: len(session.turns)} | ({} if times is None else {TOOL_S: times[0], ENGINE_S: times[1]})


def _waits(session: LedgerSession) -> dict[int, float]:
    """By turn's number: seconds from the answer before it to its request, where there was one and nothing was generated
    then."""
    found: dict[int, float] = {}
    told: float | None = None
    for turn in session.turns:
        if told is not None and turn.asked_at is not None and turn.asked_at >= told:
            found[turn.number] = turn.asked_at - told
        if turn.told_at is None:
            break  # an earlier manager saw it, and what was waited for since then is nobody's
        told = turn.told_at if told is None else max(told, turn.told_at)
    return found


def _rows_of(session: LedgerSession) -> list[_Row]:
    inner: set[int] = set()
    """Turns after which more was drawn: what an engine ended before it drew anything ends no row."""
    for turn in reversed(session.turns):
        if turn.sample.length or turn.number in inner:
            inner.add(turn.parent)
    covered: set[int] = set()
    waits = _waits(session)
    rows = []
    for leaf in session.turns:
        if leaf.number not in inner and leaf.sample.length:
            rows.append(_row_of(session, leaf, covered, waits))
    return rows


def _row_of(session: LedgerSession, leaf: LedgerTurn, covered: set[int], waits: Mapping[int, float]) -> _Row:
    """The path to the leaf. Turns in `covered` are in the mask of another row; those of this one are added to it."""
    way = [leaf]
    while way[-1].parent != ROOT:
        way.append(session.turn(way[-1].parent))
    ids: list[NDArray[Any]] = []
    logprobs: list[NDArray[Any]] = []
    mask: list[NDArray[Any]] = []
    versions: list[VersionRun] = []
    instances: list[InstanceRun] = []
    turns: list[RowTurn] = []
    length = 0
    for turn in reversed(way):
        added, (drawn, told) = turn.request.added, turn.sample.tokens()
        is_new = turn.number not in covered
        ids += [added, drawn]
        logprobs += [np.zeros(len(added), np.float32), told if is_new else np.zeros_like(told)]
        mask += [np.zeros(len(added), np.bool_), np.full(len(drawn), is_new)]
        since = turn.prompt_length
        for version, _, end in turn.sample.runs:
            versions.append(VersionRun(version, versions[-1].end if versions else 0, since + end))
        instances += [
            InstanceRun(one.name, since + one.start, since + one.end) for one in turn.sample.instances
        ]
        covered.add(turn.number)
        turns.append(RowTurn(turn.number, length, since, since + len(drawn), waits.get(turn.number)))
        length = since + len(drawn)
    return _Row(
        np.concatenate(ids),
        np.concatenate(logprobs),
        np.concatenate(mask),
        versions,
        instances,
        leaf.sample.finish,
        turns,
    )
