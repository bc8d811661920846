"""The policies that are served: the newest published one, and the one that training began with.

After a step its weights are made ready beside the next step's micro-batches (`PendingPublication`): the first rank
copies them out of training's way, and makes their checksums and offers them meanwhile. Only the next optimizer step
waits for that.

Invariants:
- *one on its way*: a step's weights are out, or its gang is given up, before the next step of the optimizer;
- *the version never falls*: the journal hears of each version once, also where it is published again because its
  publisher died or because a new trainer has nothing to serve;
- *one number, one policy*: a version is published again with the bytes that it had, or not at all.

This module must not know when a policy is published.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from gyre.graph.flow import Firing
from gyre.workloads.gang.gang import GangLost, Outcome, outcome_of
from gyre.workloads.gang.learner_gang import ActorGang, Sent
from gyre.workloads.owner import HearsEvents
from gyre.workloads.protocols import Actor, PublishesModel
from gyre.workloads.trainer.inbox_messages import Inbox, PublicationAnswered
from gyre.workloads.trainer.rollout_requests import RolloutRequests
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.messages import Failure
from gyre.workloads.vertex.transport import VertexTransport

PUBLISH, EXPORT = PublishesModel.publish_model.__name__, Actor.export_weights.__name__

INITIAL_POLICY = "initial_policy.msgpack"


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A policy version that is served. `bundle` stands for its weights in calls; None where no call carries them."""

    version: int
    checksum: str
    bundle: Any

    @property
    def identity(self) -> tuple[int, str]:
        """Version and checksum, since neither is enough: a step without gradient makes a new version of the same bytes,
        and a replay that diverged makes other bytes of the same version."""
        return self.version, self.checksum


@dataclass(frozen=True, slots=True)
class PreparedVersion:
    """A policy version that is ready to be published.

    `served` is what `publish_model` returned, where there is a rollout plane; `weights` is what `export_weights`
    returned, where calls carry them.
    """

    version: int
    served: dict[str, Any] | None
    weights: tuple[dict[str, Any], bytes] | None

    @property
    def told(self) -> dict[str, Any]:
        """`checksum` and `size_bytes` of what is served."""
        if self.served is not None:
            return self.served
        assert self.weights is not None, f"version {self.version} was prepared for nobody"
        return self.weights[0]

    @property
    def checksum(self) -> str:
        return str(self.told["checksum"])


@dataclass(slots=True)
class PendingPublication:
    """A step's weights, which the first rank of `gang` makes ready. `firing` is the step's; None where its version was
    published before, and is now by the rank that has taken the place of its publisher. `missing` are the methods that
    have not answered, `answers` what the others said, and `until` is the deadline in monotonic seconds."""

    gang: ActorGang
    version: int
    firing: Firing | None
    until: float
    missing: set[str]
    answers: dict[str, Any] = field(default_factory=dict)


class VersionDiverged(Exception):
    """A version that was published would be published again with other bytes; the text says which."""


class ServedPolicies:
    """`plane` is the rollout plane where there is one; `in_calls` is whether an operator gets the newest weights with
    its calls, as they all do without a plane."""

    def __init__(
        self,
        directory: Path,
        transport: VertexTransport,
        *,
        reports: HearsEvents,
        inbox: Inbox,
        plane: RolloutRequests | None,
        in_calls: bool,
        timeout_s: float,
    ) -> None:
        self.published: PublishedVersion | None = None
        self.initial: PublishedVersion | None = None
        """The policy that training began with, for reference models; kept in a file, since the actor moves on."""
        self._file = directory / INITIAL_POLICY
        self._transport = transport
        self._reports = reports
        self._inbox = inbox
        self._plane = plane
        self._in_calls = in_calls
        self._timeout_s = timeout_s
        self._publication: PendingPublication | None = None
        self._publisher: Member | None = None
        """The rank that instances fetch the newest version from, where there is a rollout plane."""
        self._served_checksum = ""
        """The checksum of that version as instances get it."""

    @property
    def in_calls(self) -> bool:
        """Whether the weights of a step pass the trainer and nothing else."""
        return self._plane is None

    def are_served(self, gang: ActorGang) -> bool:
        """Whether the newest version outlived the gang before `gang`. The weights that calls carry are with the
        trainer; those that instances fetch are with the rank that published them, and go with its process."""
        return self._plane is None or self._publisher == gang.members[0]

    def prepare(self, gang: ActorGang, version: int) -> PreparedVersion:
        """Make the gang's weights ready to be published as this version. Raises like the gang's calls.

        The rollout plane fetches them from the first rank. They pass the trainer only where calls carry them.
        """
        served = weights = None
        if self._plane is not None:
            served = gang.publish_model(version=version).first(timeout_s=self._timeout_s)
        if self._plane is None or self._in_calls:
            weights = gang.export_weights(version=version).first(timeout_s=self._timeout_s)
        return PreparedVersion(version, served, weights)

    # -- beside training ----------------------------------------------------------------------------

    def begin(self, gang: ActorGang, version: int, firing: Firing | None = None) -> None:
        """Begin to make the gang's weights ready, as `prepare` does, without waiting: see `PendingPublication`. What
        was begun before and is not ready is not waited for any more."""
        until = time.monotonic() + self._timeout_s
        calls: list[Sent[Any]] = []
        if self._plane is None or self._in_calls:
            calls.append(gang.export_weights(version=version))
        if self._plane is not None:
            calls.append(gang.publish_model(version=version, background=True))
        missing = {sent.method for sent in calls}
        publication = self._publication = PendingPublication(gang, version, firing, until, missing)
        for sent in calls:
            self._await(publication, sent, answers=sent.method)

    def _await(self, publication: PendingPublication, sent: Sent[Any], *, answers: str) -> None:
        """Hear the first rank's answer, as that of the method `answers`."""
        (future,) = sent.futures
        future.add_done_callback(
            lambda done: self._inbox.put(PublicationAnswered(publication, answers, outcome_of(done)))
        )

    def is_current(self, publication: PendingPublication) -> bool:
        """Whether the publication is still waited for, rather than one of a gang that was lost."""
        return self._publication is publication

    def answered(
        self, publication: PendingPublication, method: str, outcome: Outcome
    ) -> PreparedVersion | None:
        """Take an answer in. Returns what was prepared, None while there is more to come. Raises like the gang's
        calls."""
        (value,) = publication.gang.settle(method, [outcome])
        if method == PUBLISH and value is None:  # it goes on beside the calls that follow
            left_s = max(0.0, publication.until - time.monotonic())
            sent = publication.gang.model_published(version=publication.version, timeout_s=left_s)
            self._await(publication, sent, answers=PUBLISH)
            return None
        publication.missing.discard(method)
        publication.answers[method] = value
        if publication.missing:
            return None
        self._publication = None
        answers = publication.answers
        return PreparedVersion(publication.version, answers.get(PUBLISH), answers.get(EXPORT))

    def check_late(self, now: float) -> None:
        """Raises GangLost where the first rank did not answer in time."""
        late = self._publication
        if late is not None and now >= late.until:
            text = f"version {late.version} was not published within {self._timeout_s:g} s"
            failure = Failure(error=text, traceback="", user_code=False)
            raise GangLost((late.gang.members[0], min(late.missing), failure))

    def give_up(self) -> None:
        """The gang is lost, and with it what was on its way: the next one publishes the step again."""
        self._publication = None

    # -- to the instances ---------------------------------------------------------------------------

    def publish(self, gang: ActorGang, prepared: PreparedVersion) -> None:
        """Serve what was prepared; its version may have been published before. Raises VersionDiverged."""
        before, version = self.published, prepared.version
        is_new = before is None or before.version < version
        if self._plane is not None and prepared.served is not None:
            if not is_new and prepared.checksum != self._served_checksum:
                raise VersionDiverged(
                    f"version {version} was published with checksum {self._served_checksum}, now "
                    f"{prepared.checksum}"
                )
            self._plane.publish(prepared.served)
            self._publisher, self._served_checksum = gang.members[0], prepared.checksum
            if is_new:
                self._plane.step_done()
        bundle = self._transport.share(prepared.weights) if prepared.weights is not None else None
        self.published = PublishedVersion(version, prepared.checksum, bundle)
        if is_new:
            self._reports.report(
                "WeightsPublished",
                version=version,
                step=version,
                checksum=prepared.checksum,
                size_bytes=prepared.told["size_bytes"],
                base=before.version if before else None,
            )

    def keep_initial(self, gang: ActorGang) -> None:
        """Save the initial policy. Called before the first checkpoint commits, so that whoever finds a checkpoint finds
        this file too."""
        bundle = gang.export_weights(version=0).first(timeout_s=self._timeout_s)
        partial = self._file.with_suffix(".partial")
        partial.write_bytes(msgpack.packb(bundle))
        partial.rename(self._file)

    def serve_initial(self) -> None:
        if self.initial is None and self._file.exists():
            manifest, buffer = msgpack.unpackb(self._file.read_bytes())
            bundle = self._transport.share((manifest, buffer))
            self.initial = PublishedVersion(manifest["version"], manifest["checksum"], bundle)
