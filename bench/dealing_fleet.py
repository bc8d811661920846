"""The simulated fleet of `bench/dealing.py`: engines, agents and wires in virtual time under the product's scheduling.

What an engine does, and where the numbers are from:

- A decode step takes as long as `STEP_MS` says for the samples that run: nearly flat for few, and growing then. Of a
  0.6B model in SGLang on one GPU: 64 and 256 running from `bench/results/rollouts_gpu.json` (`bare_few`, `bare_fixed`:
  21,978 and 37,700 tokens/s), 512 from 55,800 tokens/s, as an H100
  once made in rounds of 512; between them by the line.
- Prompts are read in passes that stop the decoding: `PASS_S` each beside `PREFILL_TOKENS_S`. A prompt of a group is
  read once by an engine. That is slower than `RoutingSettings.prefill_cost` takes it to be at 512 running.
- A sample that is recalled ends at the next step, and each is an HTTP request of `ABORT_S` to the engine's one process.
  One that has not begun is handed back at once.

Only the speeds of steps are measured; the others are taken to be so. Agents report every 0.25 s, ends at once; a frame
takes `WIRE_S`; a sample that has tokens is given on `COMMIT_S` after it was handed back.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from gyre.rollouts.scheduling.fleet import Instance, PlacedSample
from gyre.rollouts.scheduling.placement import Placement
from gyre.rollouts.scheduling.rebalancing import Move, Rebalancing
from gyre.rollouts.scheduling.router import OpenInstances, Router
from gyre.rollouts.scheduling.routing_settings import RoutingSettings

SLOTS = 512
STEP_MS = ((1, 1.6), (64, 2.91), (256, 6.79), (512, 9.18))
PREFILL_TOKENS_S = 200_000.0
PASS_S = 0.01
PASS_TOKENS = 8192
ABORT_S = 0.001
WIRE_S = 0.001
COMMIT_S = 0.03
REPORT_S, TICK_S, REBALANCE_S = 0.25, 0.1, 1.0

FIRST_TAKES_ALL = RoutingSettings(cheap_moves=0)
"""With these, and without `deal`, only a gain of 2 s and of a fifth moves samples, 128 at once and 32 a second: that is
what the product did before."""


@dataclass(frozen=True)
class Case:
    name: str
    shape: str
    lengths: str
    groups: int
    samples: int
    prompt: int
    limit: int
    loads_s: tuple[float, ...]
    slow: tuple[float, ...]

    def drawn(self, step: int) -> list[int]:
        """The length of each sample of a step."""
        count = self.groups * self.samples
        if self.lengths == "equal":
            return [self.limit] * count
        random_ = random.Random(step)
        return [
            min(max(int(random_.lognormvariate(math.log(self.limit / 5), 0.6)), 1), self.limit)
            for _ in range(count)
        ]


@lru_cache(maxsize=SLOTS * 2)
def step_s(running: int) -> float:
    for (few, few_ms), (many, many_ms) in itertools.pairwise(STEP_MS):
        if running <= many:
            return (few_ms + (many_ms - few_ms) * (max(running, few) - few) / (many - few)) / 1000
    return STEP_MS[-1][1] / 1000


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), call))

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.now, _, call = heapq.heappop(self._heap)
            call()


@dataclass(eq=False)
class Sim:
    key: int
    group: int
    length: int
    done: int = 0
    stay: int = 0
    """Which of its stays at an engine this is."""
    arrived: int = 0
    """The last of them that has begun."""
    began_step: int = 0
    """The engine's step at which it would have had no token, while it runs."""


class Engine:
    """`ended(sim)` and `handed_back(sim)` are called when that happens."""

    def __init__(self, clock: Clock, slow: float, prompt: int, ended: Callable[[Sim], None]) -> None:
        self.clock, self.slow, self.prompt, self.ended = clock, slow, prompt, ended
        self.waiting: deque[Sim] = deque()
        self.running: dict[int, Sim] = {}
        self.prompts: set[int] = set()
        self.steps = 0
        self.made = 0
        self.read_tokens = 0
        self._ends: list[tuple[int, int, int]] = []
        self._busy = False
        self._recalled: list[tuple[Sim, Callable[[], None]]] = []
        self._aborts_until = 0.0

    def give(self, some: list[Sim]) -> None:
        self.waiting.extend(some)
        for sim in some:
            sim.arrived = sim.stay
        if not self._busy:
            self._turn()

    def recall(self, sim: Sim, handed_back: Callable[[], None]) -> None:
        if sim in self.waiting:
            self.waiting.remove(sim)
            handed_back()
        elif sim.key in self.running:
            self._aborts_until = max(self._aborts_until, self.clock.now) + ABORT_S
            self.clock.after(self._aborts_until - self.clock.now, lambda: self._abort(sim, handed_back))

    def _abort(self, sim: Sim, handed_back: Callable[[], None]) -> None:
        if self.running.get(sim.key) is sim:
            del self.running[sim.key]
            sim.done = self.steps - sim.began_step
            handed_back()

    def tokens_of(self, sim: Sim) -> int:
        return self.steps - sim.began_step if self.running.get(sim.key) is sim else sim.done

    def _turn(self) -> None:
        """Read prompts if there is a slot for them, else make a step."""
        self._busy = True
        batch: list[Sim] = []
        tokens = 0
        while self.waiting and len(self.running) + len(batch) < SLOTS and tokens < PASS_TOKENS:
            sim = self.waiting.popleft()
            tokens += sim.done + (0 if sim.group in self.prompts else self.prompt)
            self.prompts.add(sim.group)
            batch.append(sim)
        if batch:
            self.read_tokens += tokens
            took_s = (PASS_S + tokens / PREFILL_TOKENS_S) * self.slow
            for sim in batch:
                self.running[sim.key] = sim
                sim.began_step = self.steps - sim.done
                heapq.heappush(self._ends, (sim.began_step + sim.length, sim.key, sim.stay))
            self.clock.after(took_s, self._turn)
        elif self.running:
            self.clock.after(step_s(len(self.running)) * self.slow, self._stepped)
        else:
            self._busy = False

    def _stepped(self) -> None:
        self.steps += 1
        self.made += len(self.running)
        while self._ends and self._ends[0][0] <= self.steps:
            _, key, stay = heapq.heappop(self._ends)
            sim = self.running.get(key)
            if sim is not None and sim.stay == stay:
                del self.running[key]
                sim.done = sim.length
                self.ended(sim)
        self._turn()


@dataclass
class Outcome:
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    moved: int = 0
    most_moves: int = 0
    again_tokens: int = 0
    longest_wait_s: float = 0.0


@dataclass(eq=False)
class Agent:
    engine: Engine
    sent: int = 0
    """Tokens of the engine that were reported."""
    sent_at: float = 0.0


class Manager:
    """What `gyre.rollouts.plane.placement` does, over simulated agents."""

    def __init__(self, case: Case, *, dealing: bool) -> None:
        self.case, self.clock, self.deals = case, Clock(), dealing
        self.placement = Placement(settings=None if dealing else FIRST_TAKES_ALL)
        open_instances = OpenInstances(self.placement)
        self.router = Router(self.placement, open_instances)
        self.rebalancing = Rebalancing(self.placement, open_instances, self.router)
        self.outcome = Outcome()
        self.agents: dict[str, Agent] = {}
        self.sims: dict[int, Sim] = {}
        self.placed: dict[int, PlacedSample] = {}
        self.version = 0
        self._rebalanced_at = 0.0
        self._waits_since: float | None = None
        for at in range(len(case.loads_s)):
            self.join(f"i{at}", case.slow[at])

    def join(self, name: str, slow: float) -> None:
        engine = Engine(self.clock, slow, self.case.prompt, lambda sim: self._ended(name, sim))
        self.agents[name] = Agent(engine)
        self.placement.join(name, max_running=SLOTS, kv_tokens=1 << 40)
        self.clock.after(REPORT_S, lambda: self._report(name))

    def step(self, number: int) -> None:
        """One step: ask, load, generate all."""
        began, case = self.clock.now, self.case
        self.version += 1
        for at, length in enumerate(case.drawn(number)):
            key, group = number * 10_000 + at, number * 1_000 + at // case.samples
            self.sims[key] = Sim(key, group, length)
            sample = self.placed[key] = PlacedSample(key, group, case.prompt, case.limit, self.version)
            self.placement.enqueue(sample, 0)
            self.outcome.tokens += length
        for name, load_s in zip(self.agents, case.loads_s, strict=True):
            self.agents[name].engine.prompts.clear()
            if load_s < math.inf:
                self.clock.after(load_s, lambda name=name, version=self.version: self._loaded(name, version))
        self.clock.after(TICK_S, lambda version=self.version: self._tick(version))
        self.clock.run_until(lambda: not self.placed)
        self.outcome.seconds.append(self.clock.now - began)

    # -- what the manager does

    def _loaded(self, name: str, version: int) -> None:
        if version == self.version:
            self.placement.serve(self.placement.instances[name], version)
            self.clock.after(0.0, self.dispatch)  # once for all that the same turn of the loop brings

    def dispatch(self) -> None:
        given: dict[str, list[Sim]] = {}
        for sample, instance in self.router.assign():
            given.setdefault(instance.name, []).append(self.sims[sample.key])
        for name, some in given.items():
            self._send(name, some)
        if self.deals:
            self._move(self.rebalancing.deal(self.clock.now))
        self._look_for_waiting()

    def _send(self, name: str, some: list[Sim], after_s: float = 0.0) -> None:
        for sim in some:
            sim.stay += 1
        engine = self.agents[name].engine
        self.clock.after(WIRE_S + after_s, lambda: engine.give(some))

    def _tick(self, version: int) -> None:
        if version != self.version or not self.placed:
            return
        self.clock.after(TICK_S, lambda: self._tick(version))
        now = self.clock.now
        if now - self._rebalanced_at > REBALANCE_S:
            self._rebalanced_at = now
            self._move([*self.rebalancing.even_out(now), *self.rebalancing.relieve_stragglers(now)])
        self.dispatch()

    def _move(self, moves: list[Move]) -> None:
        for sample, source, _ in moves:
            self.outcome.moved += 1
            self.outcome.most_moves = max(self.outcome.most_moves, sample.moves)
            self.clock.after(WIRE_S, lambda sample=sample, source=source: self._recall(sample, source))

    def _recall(self, sample: PlacedSample, source: Instance) -> None:
        sim = self.sims[sample.key]
        stay = sim.stay

        def handed_back() -> None:
            self.clock.after(WIRE_S, lambda: self._handed_back(sample, sim, stay))

        if sim.arrived == stay:
            self.agents[source.name].engine.recall(sim, handed_back)
        else:  # what is sent to an instance behind work that waits for a commit waits too
            self.clock.after(WIRE_S, lambda: self._recall(sample, source))

    def _handed_back(self, sample: PlacedSample, sim: Sim, stay: int) -> None:
        if sim.stay != stay or sample.key not in self.placed:
            return
        target = sample.destination
        self.outcome.again_tokens += sim.done
        self.placement.take_away(sample)
        if target is not None and target.accepts(sample):
            self.placement.place(sample, target, sim.done)
            self._send(target.name, [sim], COMMIT_S if sim.done else 0.0)
        else:
            self.placement.enqueue(sample, sim.done)
        self.dispatch()

    # -- what agents report

    def _ended(self, name: str, sim: Sim) -> None:
        self.clock.after(WIRE_S, lambda: self._end(name, sim))

    def _end(self, name: str, sim: Sim) -> None:
        sample = self.placed.pop(sim.key, None)
        if sample is not None:
            self._take_in(name)
            self.placement.finish(sample, sim.length)
            self.dispatch()

    def _take_in(self, name: str) -> None:
        agent = self.agents[name]
        new, agent.sent = agent.engine.made - agent.sent, agent.engine.made
        self.placement.load.generated(self.placement.instances[name], new)

    def _report(self, name: str) -> None:
        agent, instance = self.agents[name], self.placement.instances[name]
        self.clock.after(REPORT_S, lambda: self._report(name))
        self._take_in(name)
        rate = (agent.engine.made - agent.sent_at) / REPORT_S
        agent.sent_at = agent.engine.made
        running = len(agent.engine.running) + len(agent.engine.waiting)
        self.placement.load.observe(instance, rate_tokens_s=rate, running=running, kv_used_tokens=0)

    def _look_for_waiting(self) -> None:
        """How long a sample has waited beside a free slot of somebody who may have it."""
        instances = self.placement.instances.values()
        free = [one for one in instances if one.has_free_slot and one.version == self.version]
        waits = bool(free) and (
            len(self.placement.queue) > 0 or any(len(one.counted) > one.max_running for one in instances)
        )
        if not waits:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = self.clock.now
        else:
            waited = self.clock.now - self._waits_since
            self.outcome.longest_wait_s = max(self.outcome.longest_wait_s, waited)


def run(case: Case, steps: int, *, dealing: bool) -> Outcome:
    manager = Manager(case, dealing=dealing)
    for number in range(steps):
        manager.step(number)
    return manager.outcome


def alone_s(case: Case, step: int) -> float:
    """The seconds that the best parts found take, where each engine begins its own when it has loaded."""
    return best_parts(case, step)[1]


def best_parts(case: Case, step: int) -> tuple[dict[int, int], float]:
    """How many of the groups each engine gets, one engine's after the other's, and the seconds that they take."""
    lengths = case.drawn(step)
    able = [at for at, load_s in enumerate(case.loads_s) if load_s < math.inf]
    parts = _first_parts(case, able, sum(lengths))
    ends = _ends(case, able, parts, lengths)
    while True:
        longest, shortest = max(able, key=ends.__getitem__), min(able, key=ends.__getitem__)
        better = None
        for count in (case.groups // 8, case.groups // 32, 1):
            if longest == shortest or parts[longest] < count:
                continue
            tried = parts | {longest: parts[longest] - count, shortest: parts[shortest] + count}
            tried_ends = _ends(case, able, tried, lengths)
            if max(tried_ends.values()) < max(ends.values()) - 1e-9:
                better = tried, tried_ends
                break
        if better is None:
            return parts, max(ends.values())
        parts, ends = better


def _first_parts(case: Case, able: list[int], tokens: float) -> dict[int, int]:
    """Groups of each engine, by how long it has and how fast it is with what runs there then."""
    full = SLOTS / step_s(SLOTS)
    low, high = 0.0, max(case.loads_s[at] for at in able) + tokens / full * max(case.slow)
    for _ in range(50):
        middle = (low + high) / 2
        made = sum(max(middle - case.loads_s[at], 0.0) * full / case.slow[at] for at in able)
        low, high = (low, middle) if made > tokens else (middle, high)
    shares = {at: max(high - case.loads_s[at], 0.0) / case.slow[at] for at in able}
    total = sum(shares.values())
    parts = {at: int(case.groups * share / total) for at, share in shares.items()}
    parts[able[0]] += case.groups - sum(parts.values())
    return parts


def _ends(case: Case, able: list[int], parts: dict[int, int], lengths: list[int]) -> dict[int, float]:
    """When each engine has made its part."""
    ends: dict[int, float] = {}
    first = 0
    for at in able:
        group_range = range(first, first + parts[at])
        first += parts[at]
        ends[at] = _alone(case, at, group_range, lengths)
    return ends


def _alone(case: Case, at: int, groups: range, lengths: list[int]) -> float:
    if not groups:
        return 0.0
    clock = Clock()
    left: set[int] = set()
    engine = Engine(clock, case.slow[at], case.prompt, lambda sim: left.discard(sim.key))
    some = []
    for group in groups:
        for index in range(case.samples):
            key = group * case.samples + index
            some.append(Sim(key, group, lengths[key]))
            left.add(key)
    clock.after(case.loads_s[at], lambda: engine.give(some))
    clock.run_until(lambda: not left)
    return clock.now
