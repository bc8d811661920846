"""What users touch: the builder, jobs, their handles, the client of a master, REST and the command line.

The names exported here are public; the modules of this package are internal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.lazy_exports import lazy

if TYPE_CHECKING:
    from gyre.api.client import GyreClient
    from gyre.api.definition.builder import RLJobBuilder
    from gyre.api.definition.jobfile import load_job_file
    from gyre.api.definition.rl_job import RLJob
    from gyre.api.handle import AsyncJobHandle, JobHandle

__all__ = ["AsyncJobHandle", "GyreClient", "JobHandle", "RLJob", "RLJobBuilder", "load_job_file"]

_MODULES = {
    "AsyncJobHandle": "gyre.api.handle",
    "GyreClient": "gyre.api.client",
    "JobHandle": "gyre.api.handle",
    "RLJob": "gyre.api.definition.rl_job",
    "RLJobBuilder": "gyre.api.definition.builder",
    "load_job_file": "gyre.api.definition.jobfile",
}

__getattr__ = lazy(__name__, _MODULES)
