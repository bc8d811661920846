"""Whether a job fits its devices, and what it takes of its machines' memory and of the disk: foretold from the model's
shape and the settings, before anything starts.

Invariant *known or said*: what is not known here is told as such, with the reason, and never guessed; and nothing is
refused for what is not known.

This module must not know how a number comes about: `gyre.workloads.memory` does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gyre.api.checks.findings import JobWarning, Note
from gyre.api.home import home
from gyre.config import JobSpec
from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError
from gyre.gpus import device_bytes
from gyre.graph.integrations import model_path, reads_sections
from gyre.graph.rollout_roles import is_instance, local_roles, rollouts_of
from gyre.graph.validate import collocated
from gyre.models.architecture import Architecture, read_architecture
from gyre.models.errors import ModelFolderError
from gyre.workloads.memory.engine import EngineNeed, engine_need
from gyre.workloads.memory.host import host_need
from gyre.workloads.memory.learners import Backend, ranks_of, width_of
from gyre.workloads.memory.passes import (
    CONTEXT,
    GIB,
    MARGIN,
    Need,
    largest_pass,
    need,
    tokens_of,
)
from gyre.workloads.memory.rank import Pass, Rank

_BACKENDS: dict[str, Backend] = {"gyre.workloads.megatron": "megatron", "gyre.workloads.fsdp": "fsdp"}
_KINDS = {"Actor": (True, False), "Critic": (True, True), "Reference": (False, False)}
"""By how the class's name ends: whether it trains, and whether its model has values. A reward model is of another
folder."""

_PARTS_SHOWN = 3

_OF_MACHINES = ("host", "disk")
"""How `where` begins of what is no device's."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table. `needs` in bytes, None where it is not known; `of` says of what, or why not."""

    role: str
    where: str
    needs: int | None
    of: str
    verdict: str = ""

    @property
    def on_device(self) -> bool:
        """Whether it is of a device's memory, rather than of a machine's or a disk's."""
        return not self.where.startswith(_OF_MACHINES)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What is foretold of a job. `device_bytes` is the memory of each device, None where it is not known."""

    lines: tuple[Line, ...] = ()
    findings: tuple[str, ...] = ()
    device_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"device_bytes": self.device_bytes, "lines": [asdict(line) for line in self.lines]}


@dataclass(frozen=True, slots=True)
class _Learner:
    """A role whose model one of Gyre's sharded back ends holds."""

    role: str
    backend: Backend
    shape: Architecture
    ranks: list[Rank]
    gang: int
    trains: bool
    values: bool
    on_gpu: bool

    @property
    def several(self) -> bool:
        return self.gang > 1 and self.trains


@dataclass
class _Job:
    spec: JobSpec
    settings: WorkloadSettings
    shape: Architecture | None
    why_not: str
    device: int | None
    learners: list[_Learner] = field(default_factory=list)
    host: int = 0
    disk: int = 0
    """What all ranks take of their machines' memory and of the checkpoints' disk."""

    @property
    def longest(self) -> int:
        return self.settings.sampling.max_new_tokens


def foresee(spec: JobSpec, *, here: bool) -> Foreseen:
    """Of a compiled job with a model's folder; nothing of another. Raises ConfigError where it cannot fit a device
    whose memory is known: `device_memory_gib`, or this machine's where the job runs `here`."""
    if not reads_sections(spec) or not model_path(spec):
        return Foreseen()
    settings = WorkloadSettings.read(spec.config)
    shape, why_not = _shape(settings.model_path)
    job = _Job(spec, settings, shape, why_not, None)
    found = [learner for role in spec.roles for learner in _learner(job, role)]
    engines = list(_engines(job))
    job.learners = [learner for learner in found if learner.on_gpu]
    if job.learners or engines:
        job.device = _device(spec, here)
    lines: list[Line] = []
    findings: list[str] = []
    for learner in found:
        lines += (
            _lines_of(job, learner, findings, dict(engines))
            if learner.on_gpu
            else _lines_of_host(job, learner)
        )
    for role in spec.roles:
        if shape is None and (_backend_of(spec, role) or is_instance(spec, role)):
            lines.append(Line(role, "", None, f"not known: {why_not}"))
    for role, engine in engines:
        lines.append(_line_of_engine(job, role, engine))
    if here:
        findings += _too_little_here(job)
    return Foreseen(tuple(lines), tuple(findings), job.device)


def _too_little_here(job: _Job) -> Iterator[str]:
    """Warnings of a job on this machine alone, whose memory or disk is less than what is foretold of learners."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if job.host > memory:
        yield JobWarning(
            f"roles.actor: the ranks' states and the weights that are published take {_gib(job.host)} of this "
            f"machine's memory, which is {_gib(memory)}. Lower config.*.memory_checkpoint_share, or take more machines."
        )
    place = next(one for one in (home().path, *home().path.parents) if one.exists())
    free = shutil.disk_usage(place).free
    if job.disk > free:
        yield JobWarning(
            f"run.checkpoint_every: two checkpoints and one being written take {_gib(job.disk)}, and the disk of "
            f"{place} has {_gib(free)} free. Make room, or set GYRE_HOME to a folder on another disk."
        )


def _shape(folder: str) -> tuple[Architecture | None, str]:
    """The model's, or why it is not known."""
    path = Path(folder)
    if not path.is_dir():
        return None, f"the model's folder {folder} is not on this machine"
    try:
        return read_architecture(path), ""
    except ModelFolderError:
        return None, "only of Qwen2, Qwen3 and Llama without experts it is foretold"


def _device(spec: JobSpec, here: bool) -> int | None:
    if spec.device_memory_gib is not None:
        return int(spec.device_memory_gib * GIB)
    return device_bytes() if here else None


def _backend_of(spec: JobSpec, role: str) -> Backend | None:
    entrypoint = spec.roles[role].entrypoint
    if entrypoint is None or not any(entrypoint.name.endswith(kind) for kind in _KINDS):
        return None
    return next((name for module, name in _BACKENDS.items() if entrypoint.module.startswith(module)), None)


def _learner(job: _Job, role: str) -> Iterator[_Learner]:
    """The role's, where it is of a back end whose memory is foretold. On CPUs that is what it has for checkpoints."""
    spec, settings = job.spec, job.settings
    backend = _backend_of(spec, role)
    if backend is None or job.shape is None:
        return
    section = settings.megatron if backend == "megatron" else settings.fsdp
    on_gpu = section.device == "cuda" or (section.device == "auto" and spec.device_type == "GPU")
    if on_gpu and backend == "fsdp" and settings.fsdp.attention != "auto":
        return
    entrypoint = spec.roles[role].entrypoint
    assert entrypoint is not None
    trains, values = next(kind for end, kind in _KINDS.items() if entrypoint.name.endswith(end))
    gang = spec.roles[role].total
    ranks = ranks_of(backend, job.shape, settings, ranks=gang, trains=trains, values=values, on_gpu=on_gpu)
    yield _Learner(role, backend, job.shape, ranks, gang, trains, values, on_gpu)


def _engines(job: _Job) -> Iterator[tuple[str, EngineNeed]]:
    if job.shape is None:
        return
    for role in job.spec.roles:
        own = rollouts_of(job.spec, role)
        if is_instance(job.spec, role) and own.engine == "sglang":
            found = engine_need(job.shape, own.engine_args)
            if found is not None:
                yield role, found


# -- learners -------------------------------------------------------------------------------------------


def _lines_of(
    job: _Job, learner: _Learner, findings: list[str], engines: dict[str, EngineNeed]
) -> Iterator[Line]:
    where = "each device" if learner.trains else "the device of each"
    tokens, why = _tokens(job, learner, engines)
    if not tokens:
        yield Line(learner.role, where, None, why)
        yield from _lines_of_host(job, learner)
        return
    found = need(learner.ranks, Pass.of(max(tokens, job.longest), job.longest), several=learner.several)
    beside = _beside(job, learner.role, engines)
    whole = Need({**found.parts, **beside})
    said = f"{_largest(whole)}; passes of {tokens} tokens" + (f" ({why})" if why else "")
    verdict = "" if job.device is None else _judged(job, learner, whole, tokens, bool(why), beside, findings)
    yield Line(learner.role, where, whole.total, said, verdict)
    yield from _lines_of_host(job, learner)


def _lines_of_host(job: _Job, learner: _Learner) -> Iterator[Line]:
    if not learner.trains:
        return
    section = job.settings.megatron if learner.backend == "megatron" else job.settings.fsdp
    host = host_need(
        learner.backend,
        learner.shape,
        job.settings,
        ranks=learner.gang,
        width=width_of(section, on_gpu=learner.on_gpu),
        values=learner.values,
    )
    job.host += host.by_rank * learner.gang + host.first_rank
    job.disk += host.on_disk
    yield Line(learner.role, "host, each rank", host.by_rank, "copies of its state")
    if host.first_rank:
        yield Line(learner.role, "host, first rank besides", host.first_rank, "weights that are published")
    yield Line(
        learner.role,
        "disk",
        host.on_disk,
        f"two checkpoints and one being written, {_gib(host.checkpoint)} each",
    )


def _tokens(job: _Job, learner: _Learner, engines: dict[str, EngineNeed]) -> tuple[int, str]:
    """How large its passes are, and why where the job leaves that open; 0 where it is not known. Raises ConfigError for
    `auto` on a device that is shared, of which a rank would take all."""
    section = job.settings.megatron if learner.backend == "megatron" else job.settings.fsdp
    if section.pass_tokens == "auto" and job.device is None:
        return 0, "not known: pass_tokens is auto, and takes what a device has"
    beside = _beside(job, learner.role, engines)
    if section.pass_tokens == "auto" and beside:
        assert job.device is not None
        most = _most(job, learner, beside, (1.0 - MARGIN) * job.device)
        raise ConfigError(
            f"config.{learner.backend}.pass_tokens: auto given, but {', '.join(beside)} shares the devices of "
            f"{learner.role}, which a rank does not see.",
            hint=f"Give {most}." if most else "Give a number.",
        )
    return tokens_of(
        section.pass_tokens, learner.ranks, job.device, longest=job.longest, several=learner.several
    )


def _beside(job: _Job, role: str, engines: dict[str, EngineNeed]) -> dict[str, int]:
    """Bytes of what other roles have on this one's devices while it computes, by role."""
    group = next((group for group in collocated(job.spec) if role in group), [])
    found: dict[str, int] = {}
    for other in group:
        if other == role:
            continue
        engine = engines.get(other)
        if engine is not None:
            # Between its windows a local engine has its weights alone; any other has all that it took.
            local = other in local_roles(job.spec)
            taken = (engine.fraction or 0.0) * (job.device or 0)
            found[other] = int(max(engine.weights, 0 if local else taken)) + CONTEXT
        for learner in job.learners:
            if learner.role == other:
                found[other] = need(
                    learner.ranks, Pass.of(job.longest, job.longest), several=learner.several
                ).total
    return found


def _most(job: _Job, learner: _Learner, beside: dict[str, int], room: float) -> int:
    return largest_pass(
        learner.ranks, room - sum(beside.values()), longest=job.longest, several=learner.several
    )


def _judged(
    job: _Job,
    learner: _Learner,
    whole: Need,
    tokens: int,
    is_auto: bool,
    beside: dict[str, int],
    findings: list[str],
) -> str:
    """Whether it fits, in a word. Raises ConfigError where it does not."""
    assert job.device is not None
    if whole.total > job.device:
        raise _does_not_fit(job, learner, whole, tokens, beside)
    left = job.device - whole.total
    if left < MARGIN * job.device and not is_auto:
        most = _most(job, learner, beside, (1.0 - MARGIN) * job.device)
        findings.append(
            JobWarning(
                f"config.{learner.backend}.pass_tokens: passes of {tokens} tokens leave {_gib(left)} of a device of "
                f"{learner.role} free by what is foretold. Give {most} or less, so that what is not foretold has room."
            )
        )
        return "fits barely"
    return "fits"


def _does_not_fit(
    job: _Job, learner: _Learner, whole: Need, tokens: int, beside: dict[str, int]
) -> ConfigError:
    assert job.device is not None
    key = f"config.{learner.backend}.pass_tokens"
    device, largest = _gib(job.device), whole.largest
    most = _most(job, learner, beside, job.device)
    said = (
        f"which needs {_gib(whole.total)} of each device of {learner.role}, {_gib(whole.parts[largest])} of it for "
        f"{largest}; a device has {device}."
    )
    if most >= max(1, min(job.longest, tokens)):
        again = (
            "" if _recomputes(job, learner) else f" config.{learner.backend}.recompute makes larger ones fit."
        )
        return ConfigError(f"{key}: {tokens} given, {said}", hint=f"At most {most} fits.{again}")
    least = need(learner.ranks, Pass.of(job.longest, job.longest), several=learner.several)
    least = Need({**least.parts, **beside})
    smallest = -(-least.total // GIB)
    return ConfigError(
        f"roles.{learner.role}.total: {learner.gang} given, and a pass of {job.longest} tokens, the longest sample, "
        f"needs {_gib(least.total)} of each device, {_gib(least.parts[least.largest])} of it for {least.largest}; a "
        f"device has {device}.",
        hint=f"Give it more ranks or devices of {smallest} GiB"
        + ("." if _recomputes(job, learner) else f", or set config.{learner.backend}.recompute."),
    )


def _recomputes(job: _Job, learner: _Learner) -> bool:
    section = job.settings.megatron if learner.backend == "megatron" else job.settings.fsdp
    return section.recompute


# -- engines --------------------------------------------------------------------------------------------


def _line_of_engine(job: _Job, role: str, engine: EngineNeed) -> Line:
    by_token = f"{engine.by_token / 1024:g} KiB of KV memory a token"
    tokens = engine.tokens(job.device) if job.device is not None else None
    if engine.fraction is None:
        return Line(role, "each device", engine.weights, f"weights; {by_token}, how many SGLang chooses")
    if job.device is None:
        return Line(role, "each device", engine.weights, f"weights; {by_token}")
    if not tokens:
        raise ConfigError(
            f"rollouts.engine_args: --mem-fraction-static {engine.fraction:g} of {_gib(job.device)} given, and the "
            f"weights of an instance of {role} take {_gib(engine.weights)} of each device.",
            hint="Raise it, or give --tp a number of devices.",
        )
    taken = int(engine.fraction * job.device)
    return Line(
        role, "each device", taken, f"weights {_gib(engine.weights)}; {tokens} tokens, {by_token}", "fits"
    )


# -- words ----------------------------------------------------------------------------------------------


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _largest(found: Need) -> str:
    parts: Sequence[tuple[str, int]] = sorted(found.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts[:_PARTS_SHOWN])


def summary(found: Foreseen) -> Iterator[str]:
    """Notes on the table: what it was judged by."""
    if found.device_bytes is None and any(line.on_device for line in found.lines):
        yield Note(
            "device_memory_gib: is not given, and this machine does not say; so it is not known whether the job fits."
        )
