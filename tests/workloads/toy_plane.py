"""A rollout plane of whole numbers, for trainers in this process: it keeps its word as the real one does.

What is asked for is generated in any order, by the newest policy (a pinned request by its own), delivered until it is
taken, delivered again to each new connection, and asked for twice it is generated once. Some groups nobody can make.
No version newer than a pinned request's is served while that is open, and one for a version that was overtaken is
refused.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gyre.rollouts.samples import Group, Sample, VersionRun, unscored
from gyre.rollouts.session_extras import ASKED
from gyre.rollouts.trainer.plane_client import CannotGenerate, HearsOfRollouts
from gyre.workloads import rollout_vertices
from gyre.workloads.base import BaseWorkload, operator
from gyre.workloads.trainer import rollout_requests
from tests.waits import GENEROUS_S
from tests.workloads.toy_policy import TOKENS, ToyActor, ToyReward, mix

Key = tuple[str, int]


@dataclass
class Asked:
    group: Group
    n: int
    min_version: int
    pinned: bool
    begun_with: int | None = None


@dataclass
class ToyPlane:
    """`quarantined` are groups that nobody can generate. `held` ones are begun when they are asked for, and come when
    they are no longer held."""

    seed: int = 0
    poison: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    spoilt: set[int] = field(default_factory=set)
    """Groups whose first sample has tokens that no model has."""
    in_rows: bool = False
    """Whether each sample but the first of a group is two rows, none told ahead, and all begin with a token more than
    the prompt."""
    lies: bool = False
    """Whether what it tells ahead of a group begins anew before the group is delivered."""

    def __post_init__(self) -> None:
        self.weights: dict[int, list[int]] = {}
        self.published: list[tuple[int, str, str]] = []
        """Version, checksum and source of what it was told, in order."""
        self.newest = self.served = -1
        self.open: dict[Key, Asked] = {}
        self.delivered: dict[Key, Group] = {}
        self.generated = self.taken = 0
        self.asked: list[Key] = []
        self.client: ToyClient | None = None
        self._told: set[Key] = set()
        """The groups that nobody can generate, told since they were last asked for."""
        self._dice = random.Random(self.seed)
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="toy-plane", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(GENEROUS_S)

    def release(self) -> None:
        with self._changed:
            self.held.clear()
            self._changed.notify_all()

    def wait_for(self, keys: set[Key]) -> None:
        """Until these are generated. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: keys <= self.delivered.keys(), GENEROUS_S):
                raise TimeoutError(f"of {keys} only {keys & self.delivered.keys()} are generated")

    def break_off(self) -> None:
        """The connection breaks and comes back: all that was not taken is delivered again, all failures told again."""
        with self._changed:
            client, again = self.client, list(self.delivered.items())
            failed = [key for key in self.open if key[1] in self.poison]
        if client is not None:
            self._deliver(client, again)
            for key in failed:
                client.fail(key)

    # -- the trainer's side -------------------------------------------------------------------------

    def attach(self, client: ToyClient) -> None:
        with self._changed:
            if self.client is None or client.term >= self.client.term:
                self.client = client
                again = list(self.delivered.items())
        self._deliver(client, again)

    def ask(self, purpose: str, asked: list[Asked]) -> None:
        again, late, ahead = [], [], []
        with self._changed:
            for one in asked:
                key = (purpose, one.group.id)
                self.asked.append(key)
                self._told.discard(key)
                if (
                    one.pinned
                    and one.min_version < self.served
                    and key not in {**self.open, **self.delivered}
                ):
                    late.append(key)
                    continue
                if one.group.id in self.held:
                    one.begun_with = self.newest
                    if purpose == "train" and self.newest >= 0:
                        ahead.append(self._generate(one, self.newest))
                if key in self.delivered:
                    again.append((key, self.delivered[key]))
                else:
                    self.open.setdefault(key, one)
            self._changed.notify_all()
            client = self.client
        if client is None:
            return
        for group in ahead:
            self._tell_ahead(client, group)
        if again:
            self._deliver(client, again)
        for key in late:
            client.fail(key, "no newer policy, but a newer one is served")

    def take(self, purpose: str, ids: list[int]) -> None:
        with self._changed:
            for group_id in ids:
                self.open.pop((purpose, group_id), None)
                self.taken += self.delivered.pop((purpose, group_id), None) is not None
            self._promote()

    def publish(self, told: dict[str, Any]) -> None:
        version = told["version"]
        with self._changed:
            self.published.append((version, told["checksum"], told["source"]))
            self.weights[version] = list(EXPORTED[version])
            self.newest = max(self.newest, version)
            self._promote()
            self._changed.notify_all()

    def _promote(self) -> None:
        pins = [one.min_version for one in self.open.values() if one.pinned]
        self.served = max(self.served, min([self.newest, *pins]))

    # -- generating ---------------------------------------------------------------------------------

    def _ready(self) -> list[Key]:
        return [
            key
            for key, one in self.open.items()
            if one.min_version <= self.newest
            and key[1] not in self.held
            and one.min_version in (-1, *self.weights)
        ]

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or bool(set(self._ready()) - self._told), 5.0)
                if self._closing:
                    return
                ready = [key for key in self._ready() if key not in self._told]
                if not ready:
                    continue
                key = self._dice.choice(ready)
                client, one = self.client, self.open[key]
                if key[1] in self.poison:
                    self._told.add(key)
                    whole = None
                else:
                    version = one.min_version if one.pinned else self.newest
                    whole = self._generate(one, version if one.begun_with is None else one.begun_with)
                    del self.open[key]
                    self.delivered[key] = whole
                    self.generated += 1
                    self._promote()
                    self._changed.notify_all()
            if client is None:
                continue
            if whole is None:
                client.fail(key)
                continue
            if key[0] == "train" and self._dice.random() < 0.5:
                self._tell_ahead(client, whole)
            self._deliver(client, [(key, whole)])

    def _tell_ahead(self, client: ToyClient, group: Group) -> None:
        if client.samples_ahead and not self.in_rows:
            told = {
                (group.id, index): unscored(sample.token_ids + self.lies, sample.finish_reason)
                for index, sample in enumerate(group.samples[:-1])
            }
            client.owner.samples_finished("train", told)

    def _generate(self, one: Asked, version: int) -> Group:
        weights = self.weights[version]
        samples = [
            Sample(
                np.array([mix(*weights, one.group.id, number, at) % 1000 for at in range(TOKENS)], np.int32),
                np.zeros(TOKENS, np.float32),
                (VersionRun(version, 0, TOKENS),),
            )
            for number in range(one.n)
        ]
        if one.group.id in self.spoilt:
            samples[0].token_ids = samples[0].token_ids - 5000
        if self.in_rows:
            rows = [row for at, one in enumerate(samples) for row in _rows_of(at, one)]
            meta = {**one.group.meta, ASKED: one.group.prompt_ids}
            return Group(one.group.id, np.append(one.group.prompt_ids, TOLD), meta, rows)
        return Group(one.group.id, one.group.prompt_ids, one.group.meta, samples)

    def _deliver(self, client: ToyClient, groups: list[tuple[Key, Group]]) -> None:
        for (purpose, _), group in groups:
            copy = [replace(sample, reward=None, extras={}) for sample in group.samples]
            client.owner.groups_delivered(purpose, [Group(group.id, group.prompt_ids, group.meta, copy)])


TOLD = np.int32(7)
"""The token after the prompt of groups in rows."""


def _rows_of(rollout: int, sample: Sample) -> list[Sample]:
    """The sample, and but for the first rollout before it a row of its first token alone, which is read in it."""
    last = np.arange(TOKENS) > 0
    if not rollout:
        return [replace(sample, rollout=0)]
    first = Sample(sample.token_ids[:1], sample.logprobs[:1], (VersionRun(sample.versions[0].version, 0, 1),))
    return [replace(first, rollout=rollout), replace(sample, mask=last, rollout=rollout)]


class ToyClient:
    """In the place of `RolloutClient`."""

    plane: ToyPlane
    connected = True

    def __init__(
        self,
        endpoint: Any,
        owner: HearsOfRollouts,
        *,
        term: int,
        samples_ahead: bool = False,
    ) -> None:
        self.owner, self.term, self.samples_ahead = owner, term, samples_ahead
        self.plane.attach(self)

    def fail(self, key: Key, why: str = "sample 0 failed: the engine's last words") -> None:
        purpose, group_id = key
        self.owner.failed(
            CannotGenerate(
                f"Group {group_id} cannot be generated; {why}",
                details={"purpose": purpose, "ids": [group_id]},
            )
        )

    def request(
        self,
        purpose: str,
        groups: list[Group],
        *,
        n: int,
        min_version: int,
        pinned: bool = False,
        **others: Any,
    ) -> None:
        self.plane.ask(purpose, [Asked(group, n, min_version, pinned) for group in groups])

    def taken(self, purpose: str, ids: list[int]) -> None:
        self.plane.take(purpose, ids)

    def pulse(self, pulse: Any) -> None:
        pass

    def close(self) -> None:
        pass


class ToyVertex(BaseWorkload):
    """In the place of the rollout manager's vertex and of the instances'."""


EXPORTED: dict[int, list[int]] = {}

DIVERGES: set[tuple[str, int]] = set()
"""Ranks, by vertex and incarnation, whose weights of a version are not what they were."""


READY = threading.Event()
READY.set()


class PlaneActor(ToyActor):
    """It publishes in the background, on whose side `READY` stands: clear it, and nothing gets published."""

    @operator(kind="weights")
    def publish_model(self, *, version: int, background: bool = False) -> dict[str, Any] | None:
        self._told = self._published(version)
        return None if background else self._told

    @operator(kind="weights", control=True)
    def model_published(self, *, version: int, timeout_s: float) -> dict[str, Any]:
        if not READY.wait(GENEROUS_S):
            raise TimeoutError(version)
        assert self._told["version"] == version
        return self._told

    def _published(self, version: int) -> dict[str, Any]:
        EXPORTED[version] = list(self.weights)
        source = f"{self.role}-{self.rank}.{self.context.incarnation}"
        diverged = (source, version) in DIVERGES
        told = "of other bytes" if diverged else self.export_weights(version=version)[0]["checksum"]
        return {"version": version, "checksum": told, "size_bytes": 8, "source": source}


SCORED: list[list[tuple[int, tuple[int, ...]]]] = []
"""Of each call of a `SampleReward`: the group and the tokens of each sample."""


class SampleReward(ToyReward):
    SCORES_EACH_SAMPLE = True

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        samples = [(group.id, sample) for group in groups for sample in group.samples]
        SCORED.append([(group_id, tuple(sample.token_ids.tolist())) for group_id, sample in samples])
        assert all(np.isnan(sample.logprobs).all() for group_id, sample in samples if group_id >= 0)
        return super().score(groups)


def install(plane: ToyPlane, monkeypatch: Any) -> None:
    """Trainers that are started from now on meet this plane."""
    EXPORTED.clear()
    SCORED.clear()
    monkeypatch.setattr(ToyClient, "plane", plane, raising=False)
    monkeypatch.setattr(rollout_requests, "RolloutClient", ToyClient)
    monkeypatch.setattr(rollout_vertices, "RolloutInstance", ToyVertex)
    monkeypatch.setattr(rollout_vertices, "RolloutManagerVertex", ToyVertex)
    monkeypatch.setattr(
        rollout_requests.RolloutRequests,
        "publish",
        lambda calls, told: plane.publish(told),
    )
