"""What happened while the loop waited: the messages that other threads put into its inbox, in the past tense.

This module must not know what the loop does about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gyre.errors import GyreError, VertexDied
from gyre.rollouts.samples import Group, Sample, SampleKey
from gyre.workloads.gang.gang import Outcome
from gyre.workloads.vertex.membership import Member

if TYPE_CHECKING:  # the parts, which import the messages that they put in
    from gyre.workloads.gang.spread import SpreadCall
    from gyre.workloads.trainer.evaluation.rollout_calls import EvaluationCall
    from gyre.workloads.trainer.evaluation.scoring import PartScoringCall as EvaluationScoringCall
    from gyre.workloads.trainer.firings.sample_scoring import ScoringCall
    from gyre.workloads.trainer.firings.vertex_firings import VertexCall
    from gyre.workloads.trainer.learning.gang_dispatch import GangCall
    from gyre.workloads.trainer.learning.publishing import PendingPublication


class Inbox(Protocol):
    """The loop's: a queue."""

    def put(self, message: Message, /) -> None:
        """From any thread; it waits for nobody."""


@dataclass(frozen=True, slots=True)
class VertexCallEnded:
    """A call to one vertex returned, raised, or was lost with its vertex."""

    call: VertexCall
    outcome: Outcome | VertexDied


@dataclass(frozen=True, slots=True)
class GangCallEnded:
    """One rank of a gang has ended a micro-batch or an optimizer's step."""

    call: GangCall
    rank: int
    outcome: Outcome | VertexDied


@dataclass(frozen=True, slots=True)
class PublicationAnswered:
    """The first rank has answered one of the calls that make a step's weights ready."""

    publication: PendingPublication
    method: str
    outcome: Outcome | VertexDied


@dataclass(frozen=True, slots=True)
class SpreadCallEnded:
    """One rank of a gang has ended its share of a call that is spread over all of them."""

    call: SpreadCall
    rank: int
    outcome: Outcome | VertexDied


@dataclass(frozen=True, slots=True)
class SamplesFinished:
    """Samples to train on have finished before their groups."""

    samples: dict[SampleKey, Sample]


@dataclass(frozen=True, slots=True)
class ScoringEnded:
    """The scoring of samples one by one returned, raised, or was lost with its vertex."""

    call: ScoringCall
    outcome: Outcome | VertexDied


@dataclass(frozen=True, slots=True)
class GroupsDelivered:
    """The rollout plane delivered groups, for training or for an evaluation."""

    purpose: str
    groups: list[Group]


@dataclass(frozen=True, slots=True)
class RolloutsFailed:
    """The rollout plane cannot generate some groups, or has failed for good."""

    error: GyreError


@dataclass(frozen=True, slots=True)
class EvaluationAnswered:
    """A call to a rollout class for an evaluation returned, raised, or was lost with its vertex."""

    call: EvaluationCall
    outcome: Outcome | VertexDied


@dataclass(frozen=True, slots=True)
class EvaluationScored:
    """The reward role has scored some groups of an evaluation, or failed to."""

    call: EvaluationScoringCall
    member: Member
    outcome: Outcome | VertexDied


@dataclass(frozen=True, slots=True)
class MembershipChanged:
    """The master announced other vertices than before."""


@dataclass(frozen=True, slots=True)
class DevicesRegained:
    """The rollout plane returned the devices that the trainer had lent."""


Message = (
    VertexCallEnded
    | GangCallEnded
    | PublicationAnswered
    | SpreadCallEnded
    | SamplesFinished
    | ScoringEnded
    | GroupsDelivered
    | RolloutsFailed
    | EvaluationAnswered
    | EvaluationScored
    | MembershipChanged
    | DevicesRegained
)
