"""Workloads: what users subclass, and the integrations that Gyre ships."""

from gyre.workloads.base import BaseTrainer, BaseWorkload, Progress, WorkloadContext, operator

__all__ = ["BaseTrainer", "BaseWorkload", "Progress", "WorkloadContext", "operator"]
