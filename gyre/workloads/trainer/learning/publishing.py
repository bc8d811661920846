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
    """A policy version that is served. `bundle` stands for its weights in calls."""

    version: int
    checksum: str
    bundle: Any

    @property
    def identity(self) -> tuple[int, str]:
        """Version and checksum, since neither is enough: a step without gradient makes a new version of the same bytes,
        and a replay that diverged makes other bytes of the same version."""
        return self.version, self.checksum


class OtherBytes(Exception):
    """A version that was published would be published again with other bytes; the text says which."""


class ServedPolicies:
    """`report` sends an event to the journal; `plane` is the rollout plane where there is one."""

    def __init__(
        self,
        directory: Path,
        transport: Transport,
        *,
        report: Callable[..., None],
        plane: RolloutRequests | None,
        timeout_s: float,
    ) -> None:
        self.published: Published | None = None
        self.initial: Published | None = None
        """The policy that training began with, for reference models; kept in a file, since the actor moves on."""
        self._file = directory / INITIAL_POLICY
        self._transport = transport
        self._report = report
        self._plane = plane
        self._timeout_s = timeout_s
        self._publisher: Member | None = None
        """The rank that instances fetch the newest version from, where there is a rollout plane."""
        self._served_checksum = ""
        """The checksum of that version as instances get it."""

    def are_served(self, gang: Gang) -> bool:
        """Whether the newest version outlived the gang before `gang`. The weights that calls carry are with the
        trainer; those that instances fetch are with the rank that published them, and go with its process."""
        return self._plane is None or self._publisher == gang.members[0]

    def publish(self, gang: Gang, manifest: dict[str, Any], buffer: bytes) -> None:
        """Serve `manifest["version"]`; its number may have been published before. Raises OtherBytes, as well as the
        gang's calls."""
        before, version = self.published, manifest["version"]
        is_new = before is None or before.version < version
        served = manifest
        if self._plane is not None:
            served = gang.call_rank0("publish_model", version=version, timeout_s=self._timeout_s)
            if not is_new and served["checksum"] != self._served_checksum:
                raise OtherBytes(
                    f"version {version} was published with checksum {self._served_checksum}, now "
                    f"{served['checksum']}"
                )
            self._plane.publish(served)
            self._publisher, self._served_checksum = gang.members[0], served["checksum"]
            if is_new:
                self._plane.step_done()
        self.published = self._shared(manifest, buffer)
        if is_new:
            self._report(
                "WeightsPublished",
                version=version,
                step=manifest["step"],
                checksum=served["checksum"],
                size_bytes=served["size_bytes"],
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
            self.initial = self._shared(*msgpack.unpackb(self._file.read_bytes()))

    def _shared(self, manifest: dict[str, Any], buffer: bytes) -> Published:
        bundle = self._transport.share((manifest, buffer))
        return Published(manifest["version"], manifest["checksum"], bundle)
