"""DLRover's names for what a builder makes, and for the options of a submission."""

from __future__ import annotations

from gyre_dlrover.api.builder.base import DLJob
from gyre_dlrover.api.builder.options import JobConfig
from gyre_dlrover.common.enums import ACCELERATOR_TYPE

DLConfig = DLJob

__all__ = ["ACCELERATOR_TYPE", "DLConfig", "JobConfig"]
