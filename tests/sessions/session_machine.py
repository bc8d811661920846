"""A rollout manager with sessions and without sockets, store or clock; an engine's agents, a trainer and workers that
do what a test says; and a witness, which knows only what each of them was told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from gyre.philox import words
from gyre.request_body import RequestRefused
from gyre.rollouts.plane.events import (
    AgentDialled,
    AgentGone,
    AgentSent,
    Committed,
    DispatchDue,
    LedgerFree,
    Restored,
    RoomFor,
    Ticked,
)
from gyre.rollouts.plane.groups import MOST_RESETS
from gyre.rollouts.plane.instructions import (
    Close,
    Deliver,
    DispatchSoon,
    Refuse,
    ReportEvent,
    Send,
    WakeWaiters,
    Write,
)
from gyre.rollouts.plane.machine import handle
from gyre.rollouts.plane.peers import Caller
from gyre.rollouts.plane.requests import InFlightRequest
from gyre.rollouts.plane.session_ledger import SessionEnded, TurnAsked, _turn_id
from gyre.rollouts.plane.session_trainer import SessionsClaimed, SessionTrainer, SnapshotKept, WorkerBeat
from gyre.rollouts.plane.session_tree import ASKED, ROOT, LedgerSession, SessionOutcome
from gyre.rollouts.plane.settings import ManagerSettings, SessionSettings
from gyre.rollouts.plane.state import Plane
from gyre.rollouts.plane.stored_account import account_in
from gyre.rollouts.plane.trainer import TrainerDialled, TrainerGone, TrainerSent
from gyre.rollouts.protocol.codec import encode, unpack
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Attach,
    Done,
    EngineDied,
    Failed,
    Frame,
    GroupsStored,
    Loaded,
    Publish,
    Request,
)
from gyre.rollouts.sample_checks import problem_with_sample
from gyre.rollouts.samples import Group, Sample, pack_groups, unpack_groups
from gyre.rollouts.token_log.write_buffer import WriteBatch
from gyre.store import RolloutRows
from gyre.store.tables import encode_body
from tests.rollouts.machine.simulated_agents import logprob_of, mix, picture, token_of
from tests.rollouts.machine.world import Agent

SEED, LIMIT = 5, 12
SILENCE_S, SECONDS = 15.0, 400.0


class Rows:
    """The ledger of one manager after another."""

    def __init__(self) -> None:
        self.counters: dict[str, Any] = {}
        self.groups: dict[int, bytes] = {}
        self.deltas: dict[int, bytes] = {}
        self.sessions: dict[str, bytes] = {}

    def commit(self, batch: WriteBatch) -> None:
        self.counters = msgspec.json.decode(encode_body(dict(batch.counters), "the counters"))
        self.groups |= batch.opened
        self.deltas |= dict(batch.encoded())
        for key in batch.closed:
            self.groups.pop(key, None)
        for key in batch.forgotten:
            self.deltas.pop(key, None)
        for name, body in batch.sessions.items():
            if body is None:
                self.sessions.pop(name, None)
            else:
                self.sessions[name] = body

    def load(self) -> RolloutRows:
        groups, deltas = dict(sorted(self.groups.items())), sorted(self.deltas.items())
        return RolloutRows(1, self.counters, groups, deltas, dict(sorted(self.sessions.items())))


class Peer:
    """Reads at once."""

    def __init__(self, name: str, hear: Callable[[Frame], None]) -> None:
        self.name, self.host, self.closing, self.hear = name, "", False, hear


@dataclass
class Claim:
    """A session as a worker was given it."""

    session: str
    number: int
    worker: str
    purpose: str
    group: int
    index: int
    is_told: bool = False


@dataclass
class Asked:
    """A turn that a worker asked for, and was not refused."""

    key: str
    prompt: list[int]
    request: int
    told: tuple[list[int], list[float]] | None = None


@dataclass
class Witness:
    """What was told, by which everything else is judged."""

    seen: Counter[str] = field(default_factory=Counter)
    claims: list[Claim] = field(default_factory=list)
    turns: dict[str, dict[str, Asked]] = field(default_factory=dict)
    """By session and key."""
    ends: dict[str, tuple[SessionOutcome, float | None]] = field(default_factory=dict)
    """Of sessions whose end was told."""
    wanted: dict[tuple[str, int], int] = field(default_factory=dict)
    """The groups that the trainer asked for, with their n."""
    delivered: dict[tuple[str, int], bytes] = field(default_factory=dict)
    failed: set[tuple[str, int]] = field(default_factory=set)
    stored: set[tuple[str, int]] = field(default_factory=set)
    trained: int = 0
    """Tokens in the masks of rows that the trainer has stored."""
    masked: dict[tuple[str, int], int] = field(default_factory=dict)


class SessionWorld:
    """`settings` are those of `SessionSettings`."""

    def __init__(self, **settings: Any) -> None:
        sessions = SessionSettings(worker_silence_s=SILENCE_S, seconds=SECONDS, max_tokens=200, **settings)
        self.settings = ManagerSettings(sessions=sessions, restart_grace_s=0.5, vocabulary=1 << 23)
        self.rows, self.witness = Rows(), Witness()
        self.now, self.term, self.incarnations, self.version = 1000.0, 0, 0, -1
        self.trainer_term = 0
        self.agents: dict[str, Agent] = {}
        self.peers: dict[str, Peer] = {}
        self.trainer: Peer | None = None
        self.batch: WriteBatch | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.woken: set[str] = set()
        self.start()

    # -- the manager --------------------------------------------------------------------------------

    def start(self) -> None:
        """A manager over what was committed; nothing else of the one before it is there."""
        self.term += 1
        self.plane = Plane(self.settings, [SessionTrainer], epoch=self.term, now=self.now)
        self.batch, self.trainer, self.is_due = None, None, False
        self.witness.claims = [one for one in self.witness.claims if one.is_told]
        for agent in self.agents.values():
            agent.connected = False
        self.do(Restored(self.rows.load()))
        self.check_told()

    @property
    def requester(self) -> SessionTrainer:
        return next(one for one in self.plane.requesters if isinstance(one, SessionTrainer))

    @property
    def ledger(self) -> Any:
        return self.requester.sessions

    def do(self, event: object) -> None:
        """Raises GyreError where the event is refused."""
        self._handle(event)
        for _ in range(3):
            if self.is_due:
                self.is_due = False
                self._handle(DispatchDue())
        self.check()

    def _handle(self, event: object) -> bool:
        done = handle(self.plane, event, self.now)
        for one in done:
            if isinstance(one, Send):
                one.peer.hear(one.frame)  # type: ignore[attr-defined]
            elif isinstance(one, Close):
                one.peer.closing = True
            elif isinstance(one, Deliver):
                while self._handle(RoomFor(one.peer)):
                    pass
            elif isinstance(one, DispatchSoon):
                self.is_due = True
            elif isinstance(one, Write):
                self.batch = one.batch
            elif isinstance(one, WakeWaiters):
                self.woken |= set(one.names)
            elif isinstance(one, ReportEvent):
                self.events.append((one.kind, one.fields))
            elif isinstance(one, Refuse):
                raise one.error
        return bool(done)

    def begin_commit(self) -> None:
        if self.batch is None:
            self.do(LedgerFree())

    def end_commit(self) -> None:
        batch, self.batch = self.batch, None
        if batch is not None:
            self.rows.commit(batch)
            self.do(Committed(batch))
            self.hear_answers()

    def commit(self) -> None:
        self.end_commit()
        self.begin_commit()
        self.end_commit()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.do(Ticked())

    # -- what must hold -----------------------------------------------------------------------------

    def check(self) -> None:
        assert self.plane.groups.missing_tokens() == 0, self.plane.groups.counters()
        workers = self.ledger.workers
        for name, session in self.ledger.sessions.items():
            places = (name in workers._queue_of) + sum(name in one for one in workers._running.values())
            assert places == (session.outcome is None), f"{name} is in {places} places"
            if session.worker and session.outcome is None:
                assert name in workers._running[session.worker]
        members = [one for group in self.ledger.by_number.values() for one in group.members]
        assert sorted(one.id for one in members) == sorted(self.ledger.sessions)
        pins = [
            one.asked.min_version
            for one in self.ledger.by_number.values()
            if one.asked.pinned and not one.failed and not one.is_complete
        ]
        assert self.plane.groups.served_version <= min(pins, default=1 << 30), "a pinned group is overtaken"

    def check_told(self) -> None:
        """A new manager knows all that an earlier one told."""
        for name, asked in self.witness.turns.items():
            session = self.ledger.sessions.get(name)
            if session is None:
                continue
            for one in asked.values():
                turn = session.turn_of(one.key)
                if one.told is not None:
                    assert turn is not None, f"a turn of {name} that was told is gone"
                    assert turn.is_written
                    assert (turn.sample.tokens()[0].tolist(), turn.sample.tokens()[1].tolist()) == one.told
        for claim in self.witness.claims:
            session = self.ledger.sessions.get(claim.session)
            if session is not None and claim.is_told:
                assert session.claim >= claim.number
        for name, (outcome, reward) in self.witness.ends.items():
            session = self.ledger.sessions.get(name)
            if session is not None:
                assert (session.outcome, session.reward) == (outcome, reward), f"the end of {name} is lost"

    def check_fold(self) -> bool:
        """The rows give what is there, where nothing waits to be written. Whether that was so."""
        if self.batch is not None or self.plane.groups.is_dirty or self.plane.versions.changed:
            return False
        live = (sessions_of(self.plane), picture(self.plane.groups))
        again = Plane(self.settings, [SessionTrainer], epoch=99, now=self.now)
        for one in handle(again, Restored(self.rows.load()), self.now):
            assert not isinstance(one, Refuse)
        assert live == (sessions_of(again), picture(again.groups)), "the fold is not the state"
        stored = account_in(again.groups)
        assert stored["missing"] == 0
        assert stored["generated"] == self.plane.groups.account.generated
        return True

    # -- the trainer --------------------------------------------------------------------------------

    def attach(self) -> None:
        self.trainer_term += 1
        self.trainer = Peer("the trainer", self.trainer_hears)
        self.do(TrainerDialled(self.trainer, Attach(protocol=PROTOCOL, term=self.trainer_term)))

    def detach(self) -> None:
        trainer, self.trainer = self.trainer, None
        if trainer is not None:
            self.do(TrainerGone(trainer))

    def tell(self, frame: Frame) -> None:
        if self.trainer is not None:
            self.do(TrainerSent(self.trainer, frame))

    def publish(self) -> None:
        if self.trainer is not None:
            self.version = self.plane.versions.newest + 1
            self.tell(Publish(version=self.version, checksum=f"c{self.version}", path=""))

    def ask_groups(self, purpose: str, ids: Sequence[int], n: int, *, min_version: int, pinned: bool) -> None:
        if self.trainer is None:
            return
        groups = [Group(at, np.array([7, 8, 9][: 1 + abs(at) % 3], np.int32)) for at in ids]
        for at in ids:
            self.witness.wanted.setdefault((purpose, at), n)
        self.tell(
            Request(
                purpose=purpose,
                groups=pack_groups(groups),
                n=n,
                sampling={"max_new_tokens": LIMIT},
                seed=SEED,
                min_version=min_version,
                pinned=pinned,
            )
        )

    def trainer_hears(self, frame: Frame) -> None:
        if isinstance(frame, Failed):
            self.witness.failed |= {(frame.purpose, one) for one in frame.ids}
            self.witness.seen["failed"] += 1
        elif isinstance(frame, Done):
            for group in unpack_groups(frame.groups):
                self.delivered(frame.purpose, group)

    def store(self, purpose: str, group_id: int) -> None:
        if self.trainer is not None:
            named = purpose, group_id
            self.tell(GroupsStored(purpose=purpose, ids=[group_id]))
            if named not in self.witness.stored:
                self.witness.stored.add(named)
                self.witness.trained += self.witness.masked[named]

    def delivered(self, purpose: str, group: Group) -> None:
        named = purpose, group.id
        assert named in self.witness.wanted
        bare = [
            replace(sample, extras={}) for sample in group.samples
        ]  # how long a turn took is of one manager
        told = pack_groups([Group(group.id, group.prompt_ids, {}, bare)])
        assert self.witness.delivered.setdefault(named, told) == told, "a group came again with other rows"
        self.witness.seen["delivered"] += 1
        self.witness.masked[named] = self.check_rows(purpose, group)

    def check_rows(self, purpose: str, group: Group) -> int:
        """Every token that the loss sees was drawn for a turn that somebody asked for, as its engine says, once; and
        nothing that was told is missing. Returns how many there are."""
        assert group.meta[ASKED].tolist() == [7, 8, 9][: 1 + abs(group.id) % 3]
        rollouts = {sample.rollout for sample in group.samples}
        assert rollouts == set(range(self.witness.wanted[purpose, group.id]))
        count = 0
        used: set[tuple[str, str]] = set()
        for sample in group.samples:
            assert not (problem := problem_with_sample(sample, vocabulary=None)), problem
            name, rows = self._session_of(purpose, group, sample), self._drawn_runs(group, sample)
            assert rows or sample.mask is not None
            for prompt, tokens, logprobs, versions in rows:
                assert logprobs == [logprob_of(token) for token in tokens]
                found = [
                    (name, one.key)
                    for one in self.witness.turns.get(name, {}).values()
                    if one.prompt == prompt
                    and (name, one.key) not in used
                    and self._drew(name, one, tokens, versions)
                ]
                assert found, f"nobody drew {tokens} after {prompt} for {name}"
                used.add(found[0])
                count += len(tokens)
            outcome, reward = self.witness.ends.get(name, (None, sample.reward))
            assert outcome is not SessionOutcome.INFRA_FAULT
            assert sample.reward == reward
        for index in rollouts:
            name = self._member(purpose, group.id, index)
            for one in self.witness.turns.get(name, {}).values():
                assert one.told is None or (name, one.key) in used, (
                    f"a turn of {name} that was told is in no row"
                )
        return count

    def _session_of(self, purpose: str, group: Group, sample: Sample) -> str:
        assert sample.rollout is not None
        return self._member(purpose, group.id, sample.rollout)

    def _member(self, purpose: str, group_id: int, index: int) -> str:
        members = self.ledger._by_name[purpose, group_id].members
        return str(members[index].id)

    def _drawn_runs(
        self, group: Group, sample: Sample
    ) -> list[tuple[list[int], list[int], list[float], list[int]]]:
        """Of each run of tokens in the mask: all that stands before, its tokens, log-probs and versions."""
        assert sample.mask is not None
        before = len(group.prompt_ids)
        path = [*group.prompt_ids.tolist(), *sample.token_ids.tolist()]
        version = [run.version for run in sample.versions for _ in range(run.start, run.end)]
        assert len(version) == len(sample.token_ids)
        runs, at, mask = [], 0, sample.mask.tolist()
        while at < len(mask):
            end = at
            while end < len(mask) and mask[end] == mask[at]:
                end += 1
            if mask[at]:
                logprobs = sample.logprobs[at:end].tolist()
                runs.append(
                    (path[: before + at], path[before + at : before + end], logprobs, version[at:end])
                )
            at = end
        return runs

    def _drew(self, name: str, one: Asked, tokens: list[int], versions: list[int]) -> bool:
        """Whether an engine draws these tokens for the turn, which may have been begun anew where engines died with it:
        what a simulated one draws follows from the seed and all before it."""
        turn_id = _turn_id(LedgerSession(name, "", 0, 0, 0), one.key)
        seeds = [int(words(SEED, 32, turn_id, 0, resets)) & 0x7FFFFFFF for resets in range(MOST_RESETS + 1)]
        return any(_draws(mix(seed, *one.prompt), tokens, versions) for seed in seeds)

    # -- engines ------------------------------------------------------------------------------------

    def dial(self, name: str) -> None:
        agent = self.agents.get(name)
        if agent is None or agent.draining:
            self.incarnations += 1
            agent = self.agents[name] = Agent(name, 0, self.incarnations)
        agent.due, agent.connected = [], True
        peer = self.peers[name] = Peer(name, agent.hear)
        self.do(AgentDialled(peer, agent.hello(), Caller()))

    def says(self, name: str, data: bytes) -> None:
        agent, peer = self.agents.get(name), self.peers.get(name)
        link = self.plane.links.get(name)
        if agent is None or peer is None or link is None or link.connection is not peer or peer.closing:
            if agent is not None:
                agent.connected = False
            return
        self.do(AgentSent(link, unpack(data)))

    def load(self, name: str) -> None:
        agent = self.agents.get(name)
        if agent is None or not agent.connected or agent.weights is None:
            return
        weights, agent.weights = agent.weights, None
        agent.version, agent.checksum = weights.version, weights.checksum
        loaded = Loaded(version=weights.version, checksum=weights.checksum, fetch_s=0.1, load_s=0.1)
        self.says(name, encode(loaded))

    def draw(self, name: str, tokens: int, *, whole: bool = True) -> None:
        """The engine draws so many tokens for each of its samples, and its agent reports them, or some of them."""
        agent = self.agents.get(name)
        if agent is None or not agent.connected:
            return
        agent.read()
        if agent.version >= 0:
            for sim in agent.samples.values():
                sim.advance(tokens, agent.version, agent.maker)
        for _ in range(4 if whole else 1):  # tokens of several versions go out one after another
            if agent.connected:
                self.says(name, agent.report(lambda sim: None if whole else 2))

    def engine_dies(self, name: str) -> None:
        agent = self.agents.get(name)
        if agent is None or not agent.connected or agent.version < 0:
            return
        agent.read()
        agent.version, agent.checksum = -1, ""
        for sim in agent.samples.values():
            sim.end = sim.end or "died"
        for _ in range(4):
            if agent.connected:
                self.says(name, agent.report(lambda sim: None))
        if agent.connected:
            self.says(name, encode(EngineDied(message="killed", tail="")))
        agent.weights = None
        self.witness.seen["engine died"] += 1

    def lose(self, name: str, *, process: bool) -> None:
        """The connection ends, and with `process` the agent and what it had drawn."""
        link, peer = self.plane.links.get(name), self.peers.get(name)
        agent = self.agents.get(name)
        if agent is not None and process:
            self.incarnations += 1
            self.agents[name] = Agent(name, 0, self.incarnations)
        elif agent is not None:
            agent.connected = False
        if link is not None and peer is not None and link.connection is peer:
            self.do(AgentGone(link))

    # -- workers ------------------------------------------------------------------------------------

    def claim(self, worker: str, most: int) -> None:
        self.do(SessionsClaimed(worker, most, self.now))
        for session in self.ledger.given:
            claim = Claim(session.id, session.claim, worker, session.purpose, session.group_id, session.index)
            self.witness.claims.append(claim)

    def beat(self, worker: str, ids: Sequence[str]) -> list[str]:
        self.do(WorkerBeat(worker, ids))
        return list(self.ledger.workers.lost(worker, ids))

    def runs(self, worker: str) -> list[str]:
        """The sessions that the manager takes it to run."""
        return list(self.ledger.workers._running.get(worker, {}))

    def ask(self, claim: Claim, key: str, added: Sequence[int], parent: str | None) -> str:
        """A turn that goes on from one that was told, or from the root. Returns why it was refused, "" if not."""
        known = self.witness.turns.get(claim.session, {})
        told = known.get(parent) if parent is not None else None
        path = [] if told is None or told.told is None else [*told.prompt, *told.told[0]]
        prompt = np.array([*path, *added], np.int32)
        session = self.ledger.sessions.get(claim.session)
        before = session.parent_of(prompt) if session is not None else ROOT
        try:
            self.do(TurnAsked(claim.session, key, prompt, {}, self.now, before, claim.number))
        except RequestRefused as error:
            return str(error.details["reason"])
        assert session is not None
        assert claim.number == session.claim, "an older claim was heard"
        turn = session.turn_of(key)
        assert turn is not None
        asked = self.witness.turns.setdefault(claim.session, {})
        again = asked.get(key)
        if again is None or again.told is None:
            # what was asked of a manager that died before it was written is forgotten
            asked[key] = Asked(key, turn.prompt_ids.tolist(), turn.request.number)
        else:
            assert turn.prompt_ids.tolist() == again.prompt, "the same key has another prompt"
        self.hear_answers()
        return ""

    def hear_answers(self) -> None:
        """Clients hear of what the ledger has; what they heard once never changes."""
        for claim in self.witness.claims:
            session = self.ledger.sessions.get(claim.session)
            claim.is_told |= session is not None and session.is_written
        for name, session in self.ledger.sessions.items():
            for turn in session.turns:
                asked = self.witness.turns.get(name, {}).get(turn.key)
                if asked is None or not turn.is_written:
                    continue
                told = turn.sample.tokens()[0].tolist(), turn.sample.tokens()[1].tolist()
                assert told[0]
                if asked.told is None:
                    assert turn.request.number in self.rows.groups, "told before it was written"
                    asked.told, asked.prompt = told, turn.prompt_ids.tolist()
                    self.witness.seen["turn"] += 1
                    assert turn.name in self.woken or self.term > 1, "nobody was woken"
                assert asked.told == told, "the same request has other bytes"

    def end(self, claim: Claim, outcome: SessionOutcome, reward: float) -> str:
        """Returns why it was refused, "" if not."""
        given = None if outcome is SessionOutcome.INFRA_FAULT else reward
        try:
            self.do(SessionEnded(claim.session, outcome, given, "said so", {}, claim.number))
        except RequestRefused as error:
            return str(error.details["reason"])
        session = self.ledger.sessions[claim.session]
        self.commit()
        if session.is_written or self.ledger.sessions.get(claim.session) is not session:
            self.witness.ends[claim.session] = (session.outcome, session.reward)
        self.witness.seen[f"end {session.outcome}"] += 1
        return ""

    def snapshot(self, claim: Claim, body: bytes) -> None:
        try:
            self.do(SnapshotKept(claim.session, claim.number, body))
        except RequestRefused:
            self.witness.seen["snapshot refused"] += 1


def sessions_of(plane: Plane) -> dict[str, Any]:
    """Everything of sessions that a restart must bring back."""
    ledger = next(one for one in plane.requesters if isinstance(one, SessionTrainer)).sessions
    sessions = {
        name: [
            *(one.purpose, one.group_id, one.index, one.attempt, one.claim, one.worker, one.faults),
            *(one.losses, one.turns_at_loss, one.snapshot, one.began_at, one.outcome, one.reward),
            *(one.reason, one.extras, one.is_written),
            [
                [
                    *(turn.number, turn.parent, turn.key, turn.prompt_length, turn.note, turn.is_written),
                    *(turn.prompt_ids.tolist(), _prompt_to_draw(turn.request), turn.sample.finish),
                ]
                for turn in one.turns
            ],
        ]
        for name, one in ledger.sessions.items()
    }
    groups = {
        one.name: (one.number, one.failed, [member.id for member in one.members], one.is_complete)
        for one in ledger.by_number.values()
    }
    return {
        "sessions": sessions,
        "groups": groups,
        "pins": sorted(plane.groups.pins.values()),
        "waiting": {
            queue: [session.id for _, session in waiting]
            for queue, waiting in ledger.workers._waiting.items()
        },
        "running": {worker: sorted(one) for worker, one in ledger.workers._running.items()},
    }


def _prompt_to_draw(request: InFlightRequest) -> tuple[list[int], int] | None:
    """What an engine gets, and what is reckoned with; None where it is drawn."""
    if not request.left:
        return None
    return request.group.prompt_ids.tolist(), request.samples[0].placed.prompt_tokens


__all__ = ["Claim", "SessionWorld"]


def _draws(state: int, tokens: list[int], versions: list[int]) -> bool:
    """Whether a simulated engine in this state draws these tokens."""
    for token, version in zip(tokens, versions, strict=True):
        if token_of(state, version, 0) != token:
            return False
        state = mix(state, token)
    return True
