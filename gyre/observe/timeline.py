"""Who did what from when to when, and for whom it waited: lanes of vertices and instances, with flags.

From when to when a vertex ran, started or was down is in the journal, to the event. What it did while it ran is in the
job's numbers, tick by tick: of a trainer's roles the seconds spent on each activity, counted from their begin to their
end, and so of the only instance of its role; of several instances the state in which each was when it was looked at,
which is an estimate. Within a tick the shares are known and not their order, so they are laid side by side, and every
second tick the other way round, which joins equal ones.

Invariants:
- *whole*: the spans of a lane do not overlap, and what they add up to is what was spent, or looked at;
- *joined*: no two neighbours of a lane have the same state and cause;
- *bounded*: at most `MOST_SPANS` spans and `MOST_FLAGS` flags. Where there would be more, spans are given at a coarser
  width, of which each has the state that took the most of it, but being down is never left out.

This module must not know how lanes are drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gyre.config import TRAINER
from gyre.failover import VertexPhase
from gyre.observe.chapters import COMMAND, INCIDENT, Flag, PhaseChange, spread
from gyre.observe.history import JobHistory
from gyre.observe.series import Series, read_series
from gyre.observe.series.thinning import TICK_S
from gyre.store import Store

MOST_SPANS = 5000
MOST_LANES = 500
MOST_FLAGS = 1000
WIDTHS = 1000
"""Into so many parts a lane is divided at first, where exact spans are too many: about the pixels of a page."""

LEAST_SHARE = 0.02
"""Of a tick: what took less is given to what took the most."""

TRAIN, GENERATE, WAIT, LOAD, REWARD = "train", "generate", "wait", "load", "reward"
CHECKPOINT, EVALUATE, START, DOWN, IDLE = "checkpoint", "evaluate", "start", "down", "idle"

_WAITS = "waits for "
_OF_ACTIVITY = {
    "training": TRAIN,
    "stepping the optimizer": TRAIN,
    "computing log-probs": TRAIN,
    "computing values": TRAIN,
    "generating": GENERATE,
    "evaluating": EVALUATE,
    "scoring": REWARD,
    "publishing": LOAD,
    "writing a checkpoint": CHECKPOINT,
    "getting ready": START,
    "nothing to do": IDLE,
    "loading weights": LOAD,
    "starting an engine": START,
    "queued at an engine": WAIT,
    "queued for a free engine": WAIT,
    "waiting for devices": WAIT,
    "waiting for an instance": WAIT,
    "waiting for agents and their tools": WAIT,
    "queued for a free agent": WAIT,
    "waiting for the rollout manager": WAIT,
    "delivering": WAIT,
}
_PLAIN = frozenset({"training", "generating", "evaluating", "scoring", "nothing to do", "loading weights"})
"""Activities that their state says in full."""

_OF_INSTANCE = {"working": GENERATE, "loading": LOAD, "draining": DOWN, "cut": DOWN}
_OF_CALL = {
    "generate": GENERATE,
    "evaluate": EVALUATE,
    "score": REWARD,
    "accumulate": TRAIN,
    "apply": TRAIN,
    "publish": LOAD,
    "save": CHECKPOINT,
}


class Span(NamedTuple):
    begin: float
    end: float
    state: str
    cause: str


class Lane(NamedTuple):
    id: str
    role: str
    kind: str
    spans: list[Span]


class Timeline(NamedTuple):
    """Times in seconds since 1970. `first` and `last` are of the job. `cut`: there are more lanes."""

    since: float
    until: float
    first: float
    last: float
    lanes: list[Lane]
    flags: list[Flag]
    cut: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "since": self.since,
            "until": self.until,
            "first": self.first,
            "last": self.last,
            "lanes": [
                {**lane._asdict(), "spans": [list(span) for span in lane.spans]} for lane in self.lanes
            ],
            "flags": [flag._asdict() for flag in self.flags],
            "cut": self.cut,
        }


def timeline_from(data: Mapping[str, Any]) -> Timeline:
    """The inverse of `Timeline.as_dict`, as it comes back over REST."""
    lanes = [
        Lane(lane["id"], lane["role"], lane["kind"], [Span(*span) for span in lane["spans"]])
        for lane in data["lanes"]
    ]
    flags = [Flag(flag["at"], flag["kind"], flag["text"], flag["seq"]) for flag in data["flags"]]
    return Timeline(
        data["since"], data["until"], data["first"], data["last"], lanes, flags, bool(data.get("cut"))
    )


Shares = dict[tuple[str, str], float]
"""By state and cause."""

Tick = tuple[float, float, Shares]
"""From when to when, and the shares of that time."""


def read_timeline(
    store: Store, history: JobHistory, *, since: float | None = None, until: float | None = None
) -> Timeline:
    """The lanes and flags of a job between two times; without them of all its life so far."""
    first, last = _extent(store, history)
    since = first if since is None else min(max(since, first), last)
    until = last if until is None else max(min(until, last), since)
    past = history.between(since, until)
    begun = history.at(time=since).state.vertices
    moves: dict[str, list[PhaseChange]] = {
        vertex.id: [PhaseChange(since, vertex.id, vertex.role, vertex.phase.value, vertex.reason.value)]
        for vertex in begun.values()
    }
    for move in past.moves:
        moves.setdefault(move.vertex, []).append(move)
    ids = sorted(moves, key=lambda one: _order(moves[one][0].role, one))
    numbers = store.series(history.job_id)
    ran = Activities(
        lambda prefix: read_series(numbers, prefix=prefix, since=since - 60.0, until=until, points=WIDTHS),
        len(ids),
    )
    instances = ran.instances
    kept = ids[:MOST_LANES]
    lanes = []
    for vertex in kept:
        role = moves[vertex][0].role
        kind = "instance" if vertex in instances else "vertex"
        lanes.append(Lane(vertex, role, kind, spans_of(moves[vertex], ran.of(vertex, role), since, until)))
    for name in sorted(instances):
        if name not in moves and len(lanes) < MOST_LANES:  # one that came by itself
            always = [PhaseChange(since, name, "", VertexPhase.RUNNING.value, "")]
            lanes.append(Lane(name, "", "instance", spans_of(always, ran.of(name, ""), since, until)))
    cut = len(ids) + len(instances - moves.keys()) > len(lanes)
    return Timeline(since, until, first, last, bounded(lanes, since, until), bounded_flags(past.flags), cut)


def _extent(store: Store, history: JobHistory) -> tuple[float, float]:
    journal = store.journal(history.job_id)
    last_seq = journal.last_seq()
    if not last_seq:
        created = store.job(history.job_id).created_at
        return created, created
    first = journal.events(until=1)[0].at
    last = journal.events(after=last_seq - 1)[-1].at
    ticks = [one.last + resolution for resolution, one in store.series(history.job_id).extents().items()]
    row = store.job(history.job_id)
    # Coarse rows reach beyond the end of a job that is over.
    return first, max(first, last, min(ticks, default=last) if row.live else last)


def _order(role: str, vertex: str) -> tuple[bool, str, int, str]:
    rank = vertex.rpartition("-")[2]
    return role != TRAINER, role, int(rank) if rank.isdecimal() else 0, vertex


# -- what the numbers say ---------------------------------------------------------------------------


class Activities:
    """The ticks of each lane, from the job's numbers, which `read` gives by their prefix."""

    def __init__(self, read: Callable[[str], Series], lanes: int) -> None:
        trainer = read("trainer")
        numbers = trainer.series.get("trainer", {})
        self._roles = role_ticks(numbers, trainer.resolution_s)
        self._leader = next(iter(numbers_order(numbers)), "")
        found = read("instance")
        self._instances = {
            source.partition("/")[2]: instance_ticks(values, found.resolution_s)
            for source, values in found.series.items()
        }
        self._calls: dict[str, list[Tick]] = {}
        if lanes <= MOST_LANES:
            calls = read("vertex")
            self._calls = {
                source.partition("/")[2]: call_ticks(values, calls.resolution_s)
                for source, values in calls.series.items()
            }

    @property
    def instances(self) -> set[str]:
        return set(self._instances)

    def of(self, vertex: str, role: str) -> list[Tick]:
        if vertex in self._instances:
            alone = len(self._instances) == 1 and role in self._roles
            return self._roles[role] if alone else self._instances[vertex]
        if role == TRAINER and self._leader:
            return self._roles[self._leader]
        return self._roles.get(role) or self._calls.get(vertex, [])


def numbers_order(numbers: Mapping[str, Sequence[tuple[float, float]]]) -> list[str]:
    """The roles that the trainer reports; the one first that the others work for, which is the one that trains."""
    seconds: dict[str, float] = defaultdict(float)
    for name, values in numbers.items():
        if name.startswith("spent_s/") and values:
            _, role, what = name.split("/", 2)
            seconds[role] += values[-1][1] if _OF_ACTIVITY.get(what) == TRAIN else 0.0
    return sorted(seconds, key=lambda role: -seconds[role])


def role_ticks(
    numbers: Mapping[str, Sequence[tuple[float, float]]], resolution_s: float
) -> dict[str, list[Tick]]:
    """The ticks of each role, from the seconds that it has spent up to each: what has grown is what was done. Less than
    before means that another trainer began to count."""
    counters: dict[str, dict[str, dict[float, float]]] = defaultdict(dict)
    times: dict[str, set[float]] = defaultdict(set)
    for name, values in numbers.items():
        if name.startswith("spent_s/") and name.count("/") >= 2:
            _, role, what = name.split("/", 2)
            counters[role][what] = dict(values)
            times[role].update(at for at, _ in values)
    found: dict[str, list[Tick]] = {}
    # A row of several ticks has the mean of their counts, which is the count in its middle.
    middle_s = (resolution_s - TICK_S) / 2
    for role, by_activity in counters.items():
        ticks: list[Tick] = []
        before: dict[str, float] = {}
        last_at: float | None = None
        for at in sorted(times[role]):
            now = {what: values[at] for what, values in by_activity.items() if at in values}
            is_new = sum(now.values()) < sum(before.values())
            grown = {what: value - (0.0 if is_new else before.get(what, 0.0)) for what, value in now.items()}
            begin = at - resolution_s if last_at is None or at - last_at > 3 * resolution_s else last_at
            ticks.append((begin + middle_s, at + middle_s, _shares_of(grown)))
            before, last_at = now, at
        found[role] = ticks
    return found


def _shares_of(seconds: Mapping[str, float]) -> Shares:
    total = sum(value for value in seconds.values() if value > 0)
    shares: Shares = defaultdict(float)
    for what, value in seconds.items():
        if value > 0:
            shares[state_of(what)] += value / total
    return dict(shares)


def state_of(activity: str) -> tuple[str, str]:
    """State and cause of an activity, as the trainer words it."""
    if activity.startswith(_WAITS):
        return WAIT, activity.removeprefix(_WAITS)
    state = _OF_ACTIVITY.get(activity, TRAIN)
    return state, "" if activity in _PLAIN else activity


def instance_ticks(numbers: Mapping[str, Sequence[tuple[float, float]]], resolution_s: float) -> list[Tick]:
    """The ticks of an instance, from the shares of its states."""
    return _of_shares(numbers, "state/", _OF_INSTANCE, resolution_s)


def call_ticks(numbers: Mapping[str, Sequence[tuple[float, float]]], resolution_s: float) -> list[Tick]:
    """The ticks of a vertex of which no trainer reports: which call it was in, when it was looked at."""
    return _of_shares(numbers, "in/", _OF_CALL, resolution_s, rest=(IDLE, ""))


def _of_shares(
    numbers: Mapping[str, Sequence[tuple[float, float]]],
    prefix: str,
    states: Mapping[str, str],
    resolution_s: float,
    *,
    rest: tuple[str, str] | None = None,
) -> list[Tick]:
    found: dict[float, Shares] = {}
    for name, values in numbers.items():
        if not name.startswith(prefix):
            continue
        what = name.removeprefix(prefix)
        state = states.get(what, TRAIN if rest else IDLE)
        cause = "" if what in ("working", "loading", "idle") or what in _OF_CALL else what
        for at, share in values:
            if share > 0:
                shares = found.setdefault(at, {})
                shares[state, cause] = shares.get((state, cause), 0.0) + share
    if rest is not None:
        for shares in found.values():
            if (left := 1.0 - sum(shares.values())) > LEAST_SHARE:
                shares[rest] = shares.get(rest, 0.0) + left
    return [(at, at + resolution_s, found[at]) for at in sorted(found)]


# -- spans ------------------------------------------------------------------------------------------


def spans_of(moves: Sequence[PhaseChange], ticks: Sequence[Tick], since: float, until: float) -> list[Span]:
    """The spans of one lane: its phases, and what it did in its ticks while it ran."""
    spans: list[Span] = []
    place = 0
    for number, move in enumerate(moves):
        begin = max(move.at, since)
        end = min(moves[number + 1].at if number + 1 < len(moves) else until, until)
        if end <= begin or move.phase == VertexPhase.STOPPED:
            continue
        if move.phase != VertexPhase.RUNNING:
            spans.append(Span(begin, end, *_of_phase(move)))
            continue
        while place < len(ticks) and ticks[place][1] <= begin:
            place += 1
        at = begin
        look = place
        while look < len(ticks) and ticks[look][0] < end:
            tick_begin, tick_end, shares = ticks[look]
            if tick_begin > at:
                spans.append(Span(at, min(tick_begin, end), IDLE, ""))
                at = min(tick_begin, end)
            stop = min(tick_end, end)
            if stop > at and shares:
                spans += _laid(shares, at, stop, is_reversed=look % 2 == 1)
                at = stop
            look += 1
        if begin < at < end <= at + 2 * TICK_S:  # it ended between two ticks
            spans += _laid(ticks[look - 1][2], at, end, is_reversed=look % 2 == 1)
        elif at < end:
            spans.append(Span(at, end, IDLE, ""))
    return joined(spans)


_FIRST_STARTS = ("submitted", "scaled", "continued")


def _of_phase(move: PhaseChange) -> tuple[str, str]:
    if move.phase == VertexPhase.STARTING:
        return (START, "") if move.why in _FIRST_STARTS else (DOWN, move.why)
    return (DOWN if move.why == "drained" else IDLE), move.why


def _laid(shares: Shares, begin: float, end: float, *, is_reversed: bool) -> list[Span]:
    """The shares of a tick side by side."""
    large = {what: share for what, share in shares.items() if share >= LEAST_SHARE} or {(IDLE, ""): 1.0}
    total = sum(large.values())
    spans, at = [], begin
    for state, cause in sorted(large, reverse=is_reversed):
        stop = at + (end - begin) * large[state, cause] / total
        spans.append(Span(at, stop, state, cause))
        at = stop
    spans[-1] = spans[-1]._replace(end=end)
    return spans


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same spans, with neighbours of one state and cause as one."""
    out: list[Span] = []
    for span in spans:
        if out and out[-1].end == span.begin and out[-1][2:] == span[2:]:
            out[-1] = out[-1]._replace(end=span.end)
        elif span.end > span.begin:
            out.append(span)
    return out


def bounded(lanes: Sequence[Lane], since: float, until: float) -> list[Lane]:
    """The lanes with no more spans than an answer may have."""
    parts = WIDTHS
    told = list(lanes)
    while sum(len(lane.spans) for lane in told) > MOST_SPANS and parts >= 1:
        width = (until - since) / parts
        told = [lane._replace(spans=widened(lane.spans, since, width)) for lane in lanes]
        parts //= 2
    return told


def widened(spans: Sequence[Span], since: float, width: float) -> list[Span]:
    """Spans of whole widths, each with the state that took the most of it, or with being down."""
    took: dict[int, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        first, last = int((span.begin - since) / width), int((span.end - since) / width)
        for part in range(first, last + 1):
            begin, end = since + part * width, since + (part + 1) * width
            covered = min(end, span.end) - max(begin, span.begin)
            if covered > 0:
                took[part][span.state, span.cause] += covered
    out = []
    for part in sorted(took):
        shares = took[part]
        state, cause = max(shares, key=lambda what: (what[0] == DOWN, shares[what]))
        out.append(Span(since + part * width, since + (part + 1) * width, state, cause))
    if out and spans:
        out[-1] = out[-1]._replace(end=min(out[-1].end, max(spans[-1].end, out[-1].begin)))
    return joined(out)


def bounded_flags(flags: Sequence[Flag]) -> list[Flag]:
    """The flags, of each kind no more than its part of an answer; incidents and commands have half of it."""
    by_kind: dict[str, list[Flag]] = defaultdict(list)
    for flag in flags:
        by_kind[flag.kind].append(flag)
    kept = [
        flag
        for kind, found in by_kind.items()
        for flag in spread(found, MOST_FLAGS // 4 if kind in (INCIDENT, COMMAND) else MOST_FLAGS // 6)
    ]
    return sorted(kept, key=lambda flag: (flag.at, flag.seq))
