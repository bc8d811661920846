"""The builders. Nothing of it imports Ray or torch."""

from __future__ import annotations

from gyre.compat.dlrover.api.builder.base import DLJob, DLJobBuilder
from gyre.compat.dlrover.api.builder.rl import RLJob, RLJobBuilder
from gyre.compat.dlrover.common.enums import RLRoleType

__all__ = ["DLJob", "DLJobBuilder", "RLJob", "RLJobBuilder", "RLRoleType"]
