"""Jobs that were written for DLRover's unified API (0.6.1), as jobs of Gyre's.

A job changes its imports, `dlrover.python.unified` to `gyre_dlrover`, and nothing else: the modules below have the
names that it imports. What each name is here, and what differs, stands in docs/from-dlrover.md.

`api.builder` compiles a job to Gyre's `JobSpec`; `conductor` is its trainer, which runs the job's own trainer if it has
one, begins the workers, and carries their calls; `worker` is a vertex with the user's entrypoint in it. There is no
other runtime: scheduling, journal and failover are Gyre's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre_dlrover.api.builder import DLJob, DLJobBuilder, RLJob, RLJobBuilder
    from gyre_dlrover.api.runtime import (
        DataQueue,
        FutureSequence,
        RoleActor,
        RoleGroup,
        create_rpc_proxy,
        current_worker,
        export_rpc_instance,
        export_rpc_method,
        rpc,
    )
    from gyre_dlrover.common.enums import RLRoleType
    from gyre_dlrover.notes import HasNoMeaning

__all__ = [
    "DLJob",
    "DLJobBuilder",
    "DataQueue",
    "FutureSequence",
    "HasNoMeaning",
    "RLJob",
    "RLJobBuilder",
    "RLRoleType",
    "RoleActor",
    "RoleGroup",
    "create_rpc_proxy",
    "current_worker",
    "export_rpc_instance",
    "export_rpc_method",
    "rpc",
]

_MODULES = {
    **dict.fromkeys(("DLJob", "DLJobBuilder", "RLJob", "RLJobBuilder"), "api.builder"),
    "RLRoleType": "common.enums",
    "HasNoMeaning": "notes",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'api.runtime')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
