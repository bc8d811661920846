"""Messages between a vertex's host, the master and the trainer: plain data, the same for every transport.

A call's outcome is a tuple, `("ok", value)` or `("error", Failure)`: exceptions of user classes would need
those classes to unpickle, and a failure must be readable anywhere.
"""

from __future__ import annotations

import errno
import math
import os
import re
import sys
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gyre.errors import (
    NO_SPACE,
    OUT_OF_MEMORY,
    ConfigError,
    GyreError,
    RanksMissing,
    UserCodeError,
    is_no_space,
    says_no_space,
)
from gyre.users_code import is_gyres, is_gyres_module
from gyre.workloads.plain_data import plain_text
from gyre.workloads.vertex.disk_room import DiskRoom
from gyre.workloads.vertex.memory_kills import MemoryKills

if TYPE_CHECKING:
    from gyre.graph.devices import Neighbour

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

_COLLECTIVE_SIGNS = ("connection closed by peer", "connection reset by peer", "broken pipe", "gloo", "nccl")

_MEMORY_SIGNS = ("out of memory", "failed to cuda calloc")
"""The second is NCCL's, of an allocation of its own."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as plain data. `user_code` says that code outside of Gyre raised it."""

    error: str
    traceback: str
    user_code: bool
    collective: bool = False
    """Whether a peer of a collective went away: a symptom, whose cause is elsewhere."""
    fenced: bool = False
    code: str = ""
    """See `code_of`."""
    place: str = ""
    """`file.py:12`, the user's line that raised or returned; "" where it is not the user's, or not known."""
    method: str = ""
    """`module:Class.method`, where it is the user's."""


def failure_of(error: BaseException, *, module: str = "gyre.workloads", method: str = "") -> Failure:
    """The failure of an exception. Frames of Gyre's own host are left out of the traceback.

    `module` is the workload's, `method` the name of what was called. A module outside of Gyre answers for everything
    that is raised in it, also while it is loaded: a SyntaxError or a missing class leaves no frame of the user's.
    Gyre's own errors, raised by its own code, are Gyre's wherever they pass. A ConfigError says that what the user
    wrote cannot be a job: no code failed, and trying again does not help. A disk without room is not the user's code
    either, whoever wrote to it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not is_gyres(frame.filename)]
    shown = frames[_first_beyond_host(frames) :] or frames
    text = "Traceback (most recent call last):\n" + "".join(traceback.format_list(shown))
    text += "".join(traceback.format_exception_only(error))
    own = [frame for frame in outside if not _is_library(frame.filename)]
    place = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
    theirs = bool(own)
    if isinstance(error, UserCodeError) or not is_gyres_module(module):
        theirs = True
    if isinstance(error, GyreError) and not isinstance(error, UserCodeError) and _raised_by_gyre(frames):
        theirs = False  # a store that is full, a vertex that was lost: the user's line only waited for it
    if isinstance(error, SyntaxError) and error.filename and not _is_library(error.filename):
        place = f"{os.path.basename(error.filename)}:{error.lineno}"
    code = code_of(error)
    if isinstance(error, ConfigError | RanksMissing) or is_no_space(code):
        theirs = False
    message = _text_of(error)
    if isinstance(error, UserCodeError):
        told = str(error.details.get("traceback", ""))  # of another process
        # Of what was returned there is no line that raised, but one of ours.
        text = "" if "returned" in error.details else f"{told}\n{text}".lstrip()
        place = str(error.details.get("place", "")) or _place_in(told) or place
        method = str(error.details.get("method", "")) or method
        raised = told.strip().rpartition("\n")[2] if "Traceback (most recent" in told else ""
        if raised not in message:
            message = f"{raised}: {message}"
    elif not isinstance(error, ConfigError):  # as that of a UserCodeError a whole sentence
        message = f"{type(error).__name__}: {message}"
    return Failure(
        error=plain_text(message),
        traceback=plain_text(text),
        user_code=theirs,
        collective=_is_collective(error, message),
        code=code,
        place=plain_text(place) if theirs else "",
        method=method if theirs else "",
    )


def _is_collective(error: BaseException, message: str) -> bool:
    """Whether it says that ranks did not meet, and so nothing of the rank that raised it."""
    return isinstance(error, RanksMissing) or (
        not isinstance(error, ValueError | TypeError | KeyError)
        and any(word in message.lower() for word in _COLLECTIVE_SIGNS)
    )


def _raised_by_gyre(frames: traceback.StackSummary) -> bool:
    return bool(frames) and is_gyres(frames[-1].filename)


def _place_in(told: str) -> str:
    """The user's last line in the text of a traceback; "" where it has none."""
    own = [one for one in _FRAME.findall(told) if not is_gyres(one[0]) and not _is_library(one[0])]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


def code_of(error: BaseException) -> str:
    """The stable code of one of Gyre's errors, of an allocation or a write that failed; "" for any other."""
    if _is_no_space(error):
        return NO_SPACE
    if isinstance(error, GyreError):
        return error.code
    # By name: torch raises these, and CUDA's libraries a RuntimeError with such a text; none is imported here.
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    told = isinstance(error, RuntimeError) and any(sign in _text_of(error).lower() for sign in _MEMORY_SIGNS)
    return OUT_OF_MEMORY if out_of_memory or told else ""


def _is_no_space(error: BaseException) -> bool:
    """Whether the exception, or one that led to it, is a write that found no room."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if isinstance(found, OSError) and found.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(found, GyreError) and (
            is_no_space(found.code) or says_no_space(str(found.details.get("traceback", "")))
        ):
            return True
        seen.append(found)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return False


def _text_of(error: BaseException) -> str:
    """The text of an exception, whose `str()` may be the user's and raise anything."""
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be told: str() raised {type(second).__name__})"


def _is_library(filename: str) -> bool:
    return (
        filename.startswith("<")
        or "site-packages" in filename
        or os.path.abspath(filename).startswith(os.path.dirname(os.__file__))
    )


def _first_beyond_host(frames: list[traceback.FrameSummary]) -> int:
    for index, frame in enumerate(frames):
        if os.path.basename(frame.filename) not in ("host.py", "runtime.py") or not is_gyres(frame.filename):
            return index
    return len(frames)


@dataclass(frozen=True, slots=True)
class Binding:
    """The arguments of a vertex's `bind`: plain data, which a journal could hold."""

    job_id: str
    job_name: str
    role: str
    rank: int
    world_size: int
    local_rank: int
    incarnation: int
    module: str
    name: str
    file: str | None
    config: dict[str, Any]
    env: dict[str, str]
    python_path: list[str]
    directory: str
    log_path: str
    orphan_timeout_s: float
    """Infinite for a host whose process goes on without a master."""
    master_hung_after_s: float = math.inf
    master_addr: str | None = None
    master_port: int | None = None
    spec: dict[str, Any] | None = None
    """The whole job, for the trainer only."""
    store_url: str = ""
    """The store, for the trainer and the rollout manager, which write to it."""
    store_hold_s: float = 0.0
    """How long their writes wait for a store that is lost: `store.lost_timeout_s`."""
    rollouts: dict[str, Any] = field(default_factory=dict)
    """The job's `rollouts` section."""
    weights: dict[str, Any] = field(default_factory=dict)
    """The job's `weights` section."""
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For the rollout manager: by role of instances its `count`, its `elastic` section, None where there is
    none, its `price_per_hour`, and its `engine`."""
    neighbours: list[Neighbour] = field(default_factory=list)
    """The other roles on this one's devices."""
    local: bool = False
    """Whether a rollout instance is on the trainer's devices and generates in windows."""
    gpus: tuple[int, ...] = ()
    """The numbers of its GPUs on its machine, whose use it tells; empty where its devices are none."""


GangCallId = tuple[int, int, int]
"""The trainer's term, the number of its gang, and the number of the call in that gang. They grow in this order."""


@dataclass(frozen=True, slots=True)
class CallPosition:
    """A rank's position among the calls of its gang: the last call that began there."""

    call: GangCallId = (0, 0, 0)
    """Zeros if none has begun."""
    method: str = ""
    inside: bool = False
    """Whether the call still runs."""
    failed: bool = False
    """Whether the call raised."""


@dataclass(slots=True)
class VertexReport:
    """The result of a watch call. `outbox` holds the reports that the master has not yet acknowledged."""

    ticks: int
    fields: dict[str, Any]
    busy: str
    still_s: float
    """Seconds since progress last moved or a call last began or ended."""
    version: int | None
    unhealthy: str = ""
    """What the workload's `health()` raised, if it did."""
    outbox: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    memory_kills: MemoryKills | None = None
    """How many processes of the vertex's control group the kernel has killed for want of memory, where it tells."""
    disks: tuple[DiskRoom, ...] = ()
    """The room that is left where the vertex writes."""


def thread_stacks() -> str:
    """The Python stack of every thread of this process, the busiest last."""
    import threading

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        head = f"Thread {names.get(ident, ident)}:\n"
        parts.append(head + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)
