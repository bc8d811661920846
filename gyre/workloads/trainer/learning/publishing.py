"""The policies that are served: the newest published one, and the one that training began with.

Invariants:
- *the version never falls*: the journal hears of each version once, also where it is published again because its
  publisher died or because a new trainer has nothing to serve;
- *one number, one policy*: a version is published again with the bytes that it had, or not at all.

This module must not know when a policy is published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from gyre.workloads.gang.gang import Gang
from gyre.workloads.trainer.rollout_requests import RolloutRequests
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.transport import Transport

INITIAL_POLICY = "initial_policy.msgpack"


@dataclass(frozen=True, slots=True)
class Published:
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
class Prepared:
    """A policy version that is ready to be published, of which nobody has heard.

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


class OtherBytes(Exception):
    """A version that was published would be published again with other bytes; the text says which."""


class ServedPolicies:
    """`report` sends an event to the journal; `plane` is the rollout plane where there is one; `in_calls` is whether an
    operator gets the newest weights with its calls, as they all do without a plane."""

    def __init__(
        self,
        directory: Path,
        transport: Transport,
        *,
        report: Callable[..., None],
        plane: RolloutRequests | None,
        in_calls: bool,
        timeout_s: float,
    ) -> None:
        self.published: Published | None = None
        self.initial: Published | None = None
        """The policy that training began with, for reference models; kept in a file, since the actor moves on."""
        self._file = directory / INITIAL_POLICY
        self._transport = transport
        self._report = report
        self._plane = plane
        self._in_calls = in_calls
        self._timeout_s = timeout_s
        self._publisher: Member | None = None
        """The rank that instances fetch the newest version from, where there is a rollout plane."""
        self._served_checksum = ""
        """The checksum of that version as instances get it."""

    def are_served(self, gang: Gang) -> bool:
        """Whether the newest version outlived the gang before `gang`. The weights that calls carry are with the
        trainer; those that instances fetch are with the rank that published them, and go with its process."""
        return self._plane is None or self._publisher == gang.members[0]

    def prepare(self, gang: Gang, version: int) -> Prepared:
        """Make the gang's weights ready to be published as this version. Raises like the gang's calls.

        The rollout plane fetches them from the first rank. They pass the trainer only where calls carry them.
        """
        served = weights = None
        if self._plane is not None:
            served = gang.call_rank0("publish_model", version=version, timeout_s=self._timeout_s)
        if self._plane is None or self._in_calls:
            weights = gang.call_rank0("export_weights", version=version, timeout_s=self._timeout_s)
        return Prepared(version, served, weights)

    def publish(self, gang: Gang, prepared: Prepared) -> None:
        """Serve what was prepared; its version may have been published before. Raises OtherBytes."""
        before, version = self.published, prepared.version
        is_new = before is None or before.version < version
        if self._plane is not None and prepared.served is not None:
            if not is_new and prepared.checksum != self._served_checksum:
                raise OtherBytes(
                    f"version {version} was published with checksum {self._served_checksum}, now "
                    f"{prepared.checksum}"
                )
            self._plane.publish(prepared.served)
            self._publisher, self._served_checksum = gang.members[0], prepared.checksum
            if is_new:
                self._plane.step_done()
        bundle = self._transport.share(prepared.weights) if prepared.weights is not None else None
        self.published = Published(version, prepared.checksum, bundle)
        if is_new:
            self._report(
                "WeightsPublished",
                version=version,
                step=version,
                checksum=prepared.checksum,
                size_bytes=prepared.told["size_bytes"],
                base=before.version if before else None,
            )

    def keep_initial(self, gang: Gang) -> None:
        """Save the initial policy. Called before the first checkpoint commits, so that whoever finds a checkpoint finds
        this file too."""
        bundle = gang.call_rank0("export_weights", version=0, timeout_s=self._timeout_s)
        partial = self._file.with_suffix(".partial")
        partial.write_bytes(msgpack.packb(bundle))
        partial.rename(self._file)

    def serve_initial(self) -> None:
        if self.initial is None and self._file.exists():
            manifest, buffer = msgpack.unpackb(self._file.read_bytes())
            bundle = self._transport.share((manifest, buffer))
            self.initial = Published(manifest["version"], manifest["checksum"], bundle)
