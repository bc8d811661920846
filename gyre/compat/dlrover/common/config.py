"""DLRover's names for what a builder makes, and for the options of a submission."""

from __future__ import annotations

from gyre.compat.dlrover.api.builder.base import DLJob
from gyre.compat.dlrover.api.builder.options import JobConfig
from gyre.compat.dlrover.common.enums import ACCELERATOR_TYPE

DLConfig = DLJob

__all__ = ["ACCELERATOR_TYPE", "DLConfig", "JobConfig"]
