"""The policies that may be served: the newest published one, and the one that training began with.

Invariant *the version never falls*: what is published again, for a new trainer has nothing to hand out, is told once.

This module must not know when a policy is due.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from gyre.workloads.gang.gang import Gang
from gyre.workloads.trainer.rollout_requests import RolloutRequests
from gyre.workloads.vertex.transport import Transport

INITIAL_POLICY = "initial_policy.msgpack"


@dataclass(frozen=True, slots=True)
class Published:
    """A policy version that may be served, and what stands for its weights in calls."""

    version: int
    checksum: str
    bundle: Any

    @property
    def identity(self) -> tuple[int, str]:
        """Both: a step without gradient makes a new version of the same bytes, and a replay that diverged
        would make other bytes of the same version."""
        return self.version, self.checksum


class ServedPolicies:
    """`report` tells the journal of an event; `plane` is the rollout plane where there is one."""

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
        """What training began with, for reference models; kept in a file, for the actor moves on."""
        self._file = directory / INITIAL_POLICY
        self._transport = transport
        self._report = report
        self._plane = plane
        self._timeout_s = timeout_s

    def publish(self, gang: Gang, manifest: dict[str, Any], buffer: bytes) -> None:
        before, version = self.published, manifest["version"]
        served = manifest
        if self._plane is not None:
            served = gang.call_rank0("publish_model", version=version, timeout_s=self._timeout_s)
            self._plane.publish(served)
        self.published = self._shared(manifest, buffer)
        if before is None or before.version < version:
            self._report(
                "WeightsPublished",
                version=version,
                step=manifest["step"],
                checksum=served["checksum"],
                size_bytes=served["size_bytes"],
                base=before.version if before else None,
            )

    def keep_initial(self, gang: Gang) -> None:
        """Before the first checkpoint commits, so that whoever finds that one finds this too."""
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
