"""DLRover's enumerations, as far as jobs use them."""

from __future__ import annotations

from enum import Enum, StrEnum


class ACCELERATOR_TYPE(StrEnum):
    """What a device is."""

    CPU = "CPU"
    GPU = "GPU"
    TPU = "TPU"
    """Known by name, and refused: Gyre places CPUs and GPUs."""


class DLStreamType(Enum):
    """How DLRover feeds a job."""

    TASK_STREAM = "TASK_STREAM"
    DATA_STREAM = "DATA_STREAM"


class RLRoleType(StrEnum):
    """The roles of `RLJobBuilder`, as the job names them."""

    TRAINER = "TRAINER"
    ACTOR = "ACTOR"
    ROLLOUT = "ROLLOUT"
    REFERENCE = "REFERENCE"
    REWARD = "REWARD"
    CRITIC = "CRITIC"


class MasterStage(StrEnum):
    """How far a job is, in DLRover's words."""

    INIT = "INIT"
    READY = "READY"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


class ExecutionResult(StrEnum):
    """How a worker's entrypoint ended."""

    SUCCESS = "SUCCESS"
    FAIL = "FAIL"


class WorkloadEntrypointType(StrEnum):
    """What an entrypoint names: a function or a class of a module, or a script with its arguments."""

    MODULE_FUNC = "MODULE_FUNC"
    PY_CMD = "PY_CMD"
