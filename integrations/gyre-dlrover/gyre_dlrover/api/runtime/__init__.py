"""What a job's workers import. Nothing of it imports Ray or torch."""

from __future__ import annotations

from gyre_dlrover.api.runtime.prime_master import PrimeMasterApi
from gyre_dlrover.api.runtime.queue import DataQueue
from gyre_dlrover.api.runtime.ray_dataloader_iter import RayDataLoaderIter, patch_dataloader_ray
from gyre_dlrover.api.runtime.rpc_helper import (
    FutureSequence,
    RoleActor,
    RoleGroup,
    UserRpcProxy,
    create_rpc_proxy,
    export_rpc_instance,
    export_rpc_method,
    rpc,
)
from gyre_dlrover.api.runtime.worker import ActorInfo, JobInfo, Worker, current_worker

__all__ = [
    "ActorInfo",
    "DataQueue",
    "FutureSequence",
    "JobInfo",
    "PrimeMasterApi",
    "RayDataLoaderIter",
    "RoleActor",
    "RoleGroup",
    "UserRpcProxy",
    "Worker",
    "create_rpc_proxy",
    "current_worker",
    "export_rpc_instance",
    "export_rpc_method",
    "patch_dataloader_ray",
    "rpc",
]
