"""The builders. Nothing of it imports Ray or torch."""

from __future__ import annotations

from gyre_dlrover.api.builder.base import DLJob, DLJobBuilder
from gyre_dlrover.api.builder.rl import RLJob, RLJobBuilder
from gyre_dlrover.common.enums import RLRoleType

__all__ = ["DLJob", "DLJobBuilder", "RLJob", "RLJobBuilder", "RLRoleType"]
