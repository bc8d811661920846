"""Gyre: an elastic control plane for the RL post-training of large language models.

Users import from here what a job and its classes are made of, and from these packages what goes further:

| package | what |
| --- | --- |
| `gyre.api` | the builder, jobs, their handles, the client of a master |
| `gyre.errors` | every error that Gyre raises on purpose |
| `gyre.workloads` | base classes; its `torch`, `megatron`, `fsdp`, `rewards` and `tasks` have the built-in classes |
| `gyre.config` | the job as data; its `sections` have the keys below `config`, for classes of one's own |
| `gyre.data` | prepared data sets |
| `gyre.graph` | operators, edges and recipes, for a job's own graph |
| `gyre.testing` | jobs in one process and contract checks, for tests of one's own classes |

A module that no page of the documentation names is internal: it may change with any version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.lazy_exports import lazy
from gyre.version import __version__

if TYPE_CHECKING:
    from gyre.api.definition.builder import RLJobBuilder
    from gyre.api.definition.rl_job import RLJob
    from gyre.api.handle import JobHandle
    from gyre.errors import GyreError
    from gyre.rollouts.samples import Group, Sample, VersionRun
    from gyre.workloads.base import BaseTrainer, BaseWorkload, Progress, WorkloadContext, operator

__all__ = [
    "BaseTrainer",
    "BaseWorkload",
    "Group",
    "GyreError",
    "JobHandle",
    "Progress",
    "RLJob",
    "RLJobBuilder",
    "Sample",
    "VersionRun",
    "WorkloadContext",
    "__version__",
    "operator",
]

_MODULES = {
    "BaseTrainer": "gyre.workloads.base",
    "BaseWorkload": "gyre.workloads.base",
    "Group": "gyre.rollouts.samples",
    "GyreError": "gyre.errors",
    "JobHandle": "gyre.api.handle",
    "Progress": "gyre.workloads.base",
    "RLJob": "gyre.api.definition.rl_job",
    "RLJobBuilder": "gyre.api.definition.builder",
    "Sample": "gyre.rollouts.samples",
    "VersionRun": "gyre.rollouts.samples",
    "WorkloadContext": "gyre.workloads.base",
    "operator": "gyre.workloads.base",
}

__getattr__ = lazy(__name__, _MODULES)
