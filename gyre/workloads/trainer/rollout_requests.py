"""What the built-in trainer requests of the rollout plane, and which requests are still open.

A firing of a plane's operator is a request for its groups, or one for each held-out set; a request ends when all of its
groups are delivered. Its `purpose` is `train`, or `evaluate/7/aime` for an evaluation of the set `aime` by policy
version 7.

Invariants:
- *requested once, delivered once*: a firing that is requested again, after a restart of either side, is the same
  request, and each of its groups is counted once;
- *acknowledged after recorded*: the plane may forget a group only when the trainer has recorded it.

This module must not know how the plane generates, or what the flow does with a firing that has ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre.config.sections import EvaluationSettings, WorkloadSettings
from gyre.errors import GyreError
from gyre.graph.elements import Dispatch, Operator
from gyre.graph.flow import Firing, Flow
from gyre.rollouts.protocol.endpoint import JobEndpoint
from gyre.rollouts.protocol.frames import (
    DevicesReturned,
    LendDevices,
    ReclaimDevices,
    SampleCounts,
    WindowStatus,
)
from gyre.rollouts.samples import Group, Sample, SampleKey
from gyre.rollouts.trainer.plane_client import HearsOfRollouts, RolloutClient
from gyre.workloads.trainer.device_lending import DeviceLending
from gyre.workloads.trainer.evaluation.held_out import EvaluationKey
from gyre.workloads.trainer.inbox_messages import (
    DevicesRegained,
    GroupsDelivered,
    Inbox,
    RolloutsFailed,
    SamplesFinished,
)
from gyre.workloads.trainer.wait_causes import Shares, plane_shares
from gyre.workloads.trainer.wait_stats import Starvation

TRAIN = "train"
"""The purpose of a request for samples to train on."""


WITH_AGENT = "waiting for agents and their tools"
FOR_AGENT = "queued for a free agent"
UNDERWAY_WORDS = {
    "generating": "generating",
    "at_engine": "queued at an engine",
    "for_place": "queued for a free engine",
    "for_weights": "loading weights",
    "for_engine": "starting an engine",
    "for_devices": "waiting for devices",
    "for_instance": "waiting for an instance",
    "with_agent": WITH_AGENT,
    "for_agent": FOR_AGENT,
}
"""The fields of `SampleCounts` in words."""

MANAGER_AWAY = "waiting for the rollout manager"

UNDERWAY_HOLDS_S = 3.0
"""How long what the manager said counts; it says it twice a second."""


def purpose_of(evaluation: EvaluationKey) -> str:
    """The purpose of a request for an evaluation."""
    return f"evaluate/{evaluation.version}/{evaluation.set}"


def evaluation_in(purpose: str) -> EvaluationKey | None:
    """What a request with this purpose evaluates; None where it is for training."""
    if purpose == TRAIN:
        return None
    _, version, name = purpose.split("/", 2)
    return EvaluationKey(int(version), name)


@dataclass(slots=True)
class _OpenRequest:
    firing: Firing
    ids: list[int]
    """In the order of the firing's groups."""
    delivered: dict[int, Group] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.delivered) == len(self.ids)

    @property
    def groups(self) -> list[Group]:
        return [self.delivered[group_id] for group_id in self.ids]


class RolloutRequests(HearsOfRollouts):
    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        *,
        term: int,
        stop_token_ids: Sequence[int],
        inbox: Inbox,
        wants_samples: bool = False,
        last_share: float | None = None,
    ) -> None:
        """Whether somebody `wants_samples` that have finished before their groups. `last_share` is the part of a step's
        training that can begin only after its last sample is delivered; None where no engine generates on the trainer's
        devices."""
        self._inbox = inbox
        self._settings = WorkloadSettings.read(config)
        self._stops = list(stop_token_ids)
        self._open: dict[str, dict[int, _OpenRequest]] = {}
        """By purpose and group."""
        self._starvation = Starvation()
        self._underway: tuple[SampleCounts, float] | None = None
        """What the manager said last of samples that have not ended, and when."""
        self.lending: DeviceLending | None = None
        if last_share is not None:
            self.lending = DeviceLending(self, last_share=last_share, now=time.monotonic())
        self._client = RolloutClient(JobEndpoint(directory), self, term=term, samples_ahead=wants_samples)

    # -- what the plane says, on the connection's thread ---------------------------------------------

    def groups_delivered(self, purpose: str, groups: list[Group]) -> None:
        self._inbox.put(GroupsDelivered(purpose, groups))

    def failed(self, error: GyreError) -> None:
        """A request, or the connection, failed for good."""
        self._inbox.put(RolloutsFailed(error))

    def samples_finished(self, purpose: str, samples: dict[SampleKey, Sample]) -> None:
        if purpose == TRAIN:
            self._inbox.put(SamplesFinished(samples))

    # -- the trainer's devices ----------------------------------------------------------------------

    def window_changed(self, frame: DevicesReturned | WindowStatus) -> None:
        """On the connection's thread."""
        if self.lending is not None:
            self.lending.on_frame(frame)
            if isinstance(frame, DevicesReturned):
                self._inbox.put(DevicesRegained())

    def lend(self, frame: LendDevices | ReclaimDevices) -> bool:
        """Tell the rollout manager that it has the trainer's devices, or is to give them back. Whether it could be
        told."""
        return self._client.lend(frame)

    @property
    def devices_lent(self) -> bool:
        """Whether local engines generate on the trainer's devices, so that nothing may be trained."""
        return self.lending is not None and self.lending.is_lent

    def take_back_devices(self) -> bool:
        """Ask for lent devices back. Whether the trainer has its devices."""
        return self.lending is None or self.lending.take_back(time.monotonic())

    # -- what the plane does ------------------------------------------------------------------------

    def counted(self, frame: SampleCounts) -> None:
        """On the connection's thread."""
        self._underway = (frame, time.monotonic())

    @property
    def generating(self) -> Shares | None:
        """What the plane does with the samples that it was asked for, as shares; None where it has not said for
        long."""
        heard = self._underway
        if heard is None or time.monotonic() - heard[1] > UNDERWAY_HOLDS_S:
            return None if self._client.connected else {MANAGER_AWAY: 1.0}
        return plane_shares({words: getattr(heard[0], field) for field, words in UNDERWAY_WORDS.items()})

    # -- requests -----------------------------------------------------------------------------------

    def request(self, requested: Sequence[tuple[Firing, list[Group]]], *, min_version: int) -> None:
        """Request samples to train on, from policies of `min_version` and newer."""
        for firing, groups in requested:
            self._expect(TRAIN, _OpenRequest(firing, [group.id for group in groups]))
        self._send(TRAIN, [group for _, groups in requested for group in groups], min_version)

    def request_instead(self, group_id: int, by: Group, *, min_version: int) -> None:
        """A requested group cannot be generated; `by` takes its place in the firing."""
        request = self._open[TRAIN].pop(group_id)
        request.ids[request.ids.index(group_id)] = by.id
        self._expect(TRAIN, request)
        self._client.taken(TRAIN, [group_id])
        self._send(TRAIN, [by], min_version)

    def request_evaluation(
        self,
        firing: Firing,
        prompts: Sequence[Group],
        *,
        evaluation: EvaluationKey,
        settings: EvaluationSettings,
    ) -> None:
        """Request the answers of exactly this policy version to the prompts of one held-out set."""
        purpose = purpose_of(evaluation)
        self._expect(purpose, _OpenRequest(firing, [prompt.id for prompt in prompts]))
        self._send(purpose, prompts, evaluation.version, by=settings, pinned=True)

    def leave_out(self, purpose: str, group_id: int) -> tuple[Firing, list[Group]] | None:
        """This group cannot be generated, and its firing does without it. Returns the firing and its other groups where
        all of them are delivered."""
        open_requests = self._open[purpose]
        request = open_requests.pop(group_id)
        request.ids.remove(group_id)
        self._client.taken(purpose, [group_id])
        if not request.is_complete:
            return None
        self._close(purpose, request)
        return request.firing, request.groups

    def is_open(self, purpose: str, group_id: int) -> bool:
        """Whether this group is requested and neither delivered with its firing nor given up."""
        return group_id in self._open.get(purpose, {})

    def _expect(self, purpose: str, request: _OpenRequest) -> None:
        missing = (group_id for group_id in request.ids if group_id not in request.delivered)
        self._open.setdefault(purpose, {}).update(dict.fromkeys(missing, request))

    def _close(self, purpose: str, request: _OpenRequest) -> None:
        open_requests = self._open[purpose]
        for group_id in request.ids:
            open_requests.pop(group_id, None)
        if not open_requests:
            del self._open[purpose]

    def _send(
        self,
        purpose: str,
        groups: Sequence[Group],
        min_version: int,
        *,
        by: EvaluationSettings | None = None,
        pinned: bool = False,
    ) -> None:
        sampling = self._settings.sampling
        drawn = by or sampling
        self._client.request(
            purpose,
            [Group(group.id, group.prompt_ids, group.meta) for group in groups],
            n=drawn.n,
            sampling={
                "temperature": drawn.temperature,
                "max_new_tokens": drawn.max_new_tokens or sampling.max_new_tokens,
                "stop_token_ids": self._stops,
            },
            seed=self._settings.seed,
            min_version=min_version,
            pinned=pinned,
        )

    # -- deliveries ---------------------------------------------------------------------------------

    def delivered(
        self, purpose: str, groups: Sequence[Group]
    ) -> tuple[list[tuple[Firing, list[Group]]], list[int]]:
        """Take groups in. Returns the firings that they complete, each with its groups in order, and the ids that no
        open request waits for: they answer an earlier trainer, or are delivered for the second time."""
        if self.lending is not None and purpose == TRAIN:
            self.lending.delivered(sum(group.token_count for group in groups))
        open_requests = self._open.get(purpose, {})
        completed = []
        unrequested = []
        for group in groups:
            request = open_requests.get(group.id)
            if request is None:
                unrequested.append(group.id)
                continue
            request.delivered[group.id] = group
            if request.is_complete:
                self._close(purpose, request)
                completed.append((request.firing, request.groups))
        return completed, unrequested

    def acknowledge(self, ids: Sequence[int]) -> None:
        """The trainer's ledger has these training groups: the plane may forget them."""
        self._client.taken(TRAIN, list(ids))

    def acknowledge_evaluation(self, evaluation: EvaluationKey, ids: Sequence[int]) -> None:
        """The evaluation is recorded: the plane may forget its groups."""
        self._client.taken(purpose_of(evaluation), list(ids))

    # -- the trainer's steps ------------------------------------------------------------------------

    def publish(self, model: dict[str, Any]) -> None:
        """Publish what the actor's `publish_model` returned; again where the rank that served a version has died."""
        self._client.publish(
            model["version"],
            model["checksum"],
            Path(model["path"]),
            sources=[model["source"]],
            model=model["model"],
        )

    def step_done(self) -> None:
        """The optimizer has stepped, and its weights are published."""
        if self.lending is not None:
            self.lending.step_done()

    def observe(
        self, flow: Flow, operators: Mapping[str, Operator], *, wanted: Mapping[str, int], could_train: bool
    ) -> None:
        """Called in every turn of the trainer's loop: report starvation, and lend devices that have nothing to do.
        `wanted` is how many vertices each role of instances should have; `could_train` is whether there is something
        for the gangs to do, or no gang."""
        now = time.monotonic()
        pulse = self._starvation.observe(flow, operators, wanted=wanted, now=now)
        if pulse is not None:
            self._client.pulse(pulse)
        if self.lending is not None:
            gangs = [ref for ref, operator in operators.items() if operator.dispatch is Dispatch.GANG]
            self.lending.observe(
                now,
                training=any(flow.running(ref) for ref in gangs),
                could_train=could_train,
                waits=any(self._open.values()),
            )

    def close(self) -> None:
        self._client.close()
