"""Whether a job fits its devices, and what it takes of its machines' memory and of the disk: foretold from the model's
shape and the settings, before anything starts.

Invariant *known or said*: what is not known here is reported as such, with the reason, and never guessed; and nothing
is refused for what is not known.

This module must not know how a number comes about: `gyre.workloads.memory` does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gyre.api.checks.findings import JobWarning, Note
from gyre.api.home import home
from gyre.config import JobSpec
from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError
from gyre.gpus import device_bytes
from gyre.graph.devices import Neighbour, neighbours_of
from gyre.graph.integrations import model_path, reads_sections
from gyre.graph.rollout_roles import is_instance, rollouts_of
from gyre.models.architecture import Architecture, read_architecture
from gyre.models.errors import ModelFolderError
from gyre.rollouts.engines import known_engine
from gyre.workloads.memory.beside import backend_of, beside, kind_of
from gyre.workloads.memory.choice import PassChoice, PassSettings, choose
from gyre.workloads.memory.engine import EngineNeed, engine_need
from gyre.workloads.memory.host import host_need
from gyre.workloads.memory.learners import is_foretold, ranks_of, section_of, width_of
from gyre.workloads.memory.passes import GIB, LEAST, MARGIN, MOST, Need, free_bytes, largest_pass, need
from gyre.workloads.memory.rank import PassSize, RankMemory

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
    """A role whose model one of Gyre's sharded back ends holds, and what its ranks choose: None where it takes a
    device's size to know."""

    role: str
    backend: str
    shape: Architecture
    ranks: list[RankMemory]
    gang: int
    trains: bool
    values: bool
    on_gpu: bool
    neighbours: list[Neighbour]
    choice: PassChoice | None = None

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
        return self.settings.longest_answer


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
    job.learners = [_chosen(job, learner) for learner in found if learner.on_gpu]
    for learner in job.learners:
        lines += _lines_of(job, learner, findings)
    for learner in found:
        if not learner.on_gpu:
            lines += _lines_of_host(job, learner)
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


def _backend_of(spec: JobSpec, role: str) -> str | None:
    entrypoint = spec.roles[role].entrypoint
    return None if entrypoint is None else backend_of(entrypoint.module, entrypoint.name)


def _learner(job: _Job, role: str) -> Iterator[_Learner]:
    """The role's, where it is of a back end whose memory is foretold. On CPUs that is what it has for checkpoints."""
    spec, settings = job.spec, job.settings
    backend = _backend_of(spec, role)
    if backend is None or job.shape is None:
        return
    section = section_of(backend, settings)
    on_gpu = section.device == "cuda" or (section.device == "auto" and spec.device_type == "GPU")
    if on_gpu and not is_foretold(backend, settings):
        return
    entrypoint = spec.roles[role].entrypoint
    assert entrypoint is not None
    trains, values = kind_of(entrypoint.name)
    gang = spec.roles[role].total
    ranks = ranks_of(backend, job.shape, settings, ranks=gang, trains=trains, values=values, on_gpu=on_gpu)
    yield _Learner(role, backend, job.shape, ranks, gang, trains, values, on_gpu, neighbours_of(spec, role))


def _chosen(job: _Job, learner: _Learner) -> _Learner:
    """With what its ranks choose. Raises ConfigError for passes by `auto` on a device that is shared with others that
    would take as much, or nobody knows how much."""
    section = section_of(learner.backend, job.settings)
    asked = PassSettings(section.pass_tokens, section.recompute if learner.trains else False)
    if job.device is None and asked.is_auto:
        return learner
    others = beside(learner.neighbours, learner.shape, job.settings, job.device)
    if asked.tokens == "auto":
        _refuse_shared(job, learner, others)
    choice = choose(
        asked,
        learner.ranks,
        job.device,
        longest=job.longest,
        several=learner.several,
        beside=others,
    )
    ranks = [replace(rank, recompute=choice.recompute) for rank in learner.ranks]
    return replace(learner, ranks=ranks, choice=choice)


def _engines(job: _Job) -> Iterator[tuple[str, EngineNeed]]:
    if job.shape is None:
        return
    for role in job.spec.roles:
        own = rollouts_of(job.spec, role)
        kind = known_engine(own.engine)
        if is_instance(job.spec, role) and kind is not None:
            found = engine_need(job.shape, own.engine_args, kind.memory)
            if found is not None:
                yield role, found


# -- learners -------------------------------------------------------------------------------------------


def _lines_of(job: _Job, learner: _Learner, findings: list[str]) -> Iterator[Line]:
    where = "each device" if learner.trains else "the device of each"
    choice = learner.choice
    if choice is None:
        yield Line(learner.role, where, None, f"not known: {_left_open(job, learner)}")
        yield from _lines_of_host(job, learner)
        return
    found = need(learner.ranks, _pass(job, choice.tokens), several=learner.several)
    beside = _beside(job, learner)
    whole = Need({**found.parts, **beside})
    why = f" ({choice.why_tokens})" if choice.why_tokens else ""
    said = f"{_largest(whole)}; passes of {choice.tokens} tokens{why}{_of_activations(choice)}"
    verdict = "" if job.device is None else _judged(job, learner, choice, whole, beside, findings)
    yield Line(learner.role, where, whole.total, said, verdict)
    yield from _lines_of_host(job, learner)


def _pass(job: _Job, tokens: int) -> PassSize:
    return PassSize.of(max(tokens, job.longest), job.longest)


def _left_open(job: _Job, learner: _Learner) -> str:
    """What a learner chooses by its device's size, which is not known."""
    tokens = section_of(learner.backend, job.settings).pass_tokens
    if tokens == "auto":
        return "pass_tokens is auto, and takes what a device has"
    sizes = [
        need(
            [replace(rank, recompute=again) for rank in learner.ranks],
            _pass(job, tokens),
            several=learner.several,
        ).total
        for again in (False, True)
    ]
    return (
        f"recompute is auto, and goes by what a device has; passes of {tokens} tokens take {_gib(sizes[0])} with "
        f"activations kept, {_gib(sizes[1])} computed again"
    )


def _of_activations(choice: PassChoice) -> str:
    """What `recompute: auto` comes to, with both sums; "" where the job itself says it."""
    if not choice.why:
        return ""
    if choice.kept is None or choice.again is None:
        return f"; activations computed again: {choice.why}"
    if not choice.recompute:
        return f"; activations kept ({_gib(choice.again)} if computed again)"
    smaller = f", which fits up to {choice.keeps_up_to} tokens" if choice.keeps_up_to else ""
    return f"; activations computed again ({_gib(choice.kept)} if kept{smaller})"


def _lines_of_host(job: _Job, learner: _Learner) -> Iterator[Line]:
    if not learner.trains:
        return
    section = section_of(learner.backend, job.settings)
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


def _refuse_shared(job: _Job, learner: _Learner, others: Mapping[str, int | None]) -> None:
    """Raises ConfigError where `pass_tokens` is `auto` beside others that nobody knows, or that would choose their own
    passes by what this one leaves."""
    unknown = {role for role, size in others.items() if size is None}
    passes = {one["role"] for one in learner.neighbours if backend_of(one["module"], one["name"])}
    found = [role for role, size in others.items() if role in unknown or (size and role in passes)]
    if found:
        most = None if unknown else _most_beside(job, learner)
        raise ConfigError(
            f"config.{learner.backend}.pass_tokens: auto given, but {', '.join(found)} shares the devices of "
            f"{learner.role}, and what it takes there is not known.",
            hint=f"Give {most}." if most else "Give a number.",
        )


def _most_beside(job: _Job, learner: _Learner) -> int | None:
    """The largest power of two that fits as `pass_tokens` of the learner and its neighbours alike."""
    assert job.device is not None
    tokens, section = MOST, section_of(learner.backend, job.settings)
    while tokens >= LEAST:
        own = section.model_copy(update={"pass_tokens": tokens})
        settings = job.settings.model_copy(update={learner.backend: own})
        others = beside(learner.neighbours, learner.shape, settings, job.device)
        room = free_bytes(job.device, sum(size or 0 for size in others.values()))
        if need(learner.ranks, _pass(job, tokens), several=learner.several).total <= room:
            return tokens
        tokens //= 2
    return None


def _beside(job: _Job, learner: _Learner) -> dict[str, int]:
    """Bytes of what other roles have on this one's devices while it computes, by role, as far as it is known."""
    chosen = {one.role: one.choice.recompute for one in job.learners if one.choice is not None}
    found = beside(learner.neighbours, learner.shape, job.settings, job.device, recompute=chosen)
    return {role: size for role, size in found.items() if size}


def _most(job: _Job, learner: _Learner, beside: dict[str, int], room: float) -> int:
    return largest_pass(
        learner.ranks, room - sum(beside.values()), longest=job.longest, several=learner.several
    )


def _judged(
    job: _Job,
    learner: _Learner,
    choice: PassChoice,
    whole: Need,
    beside: dict[str, int],
    findings: list[str],
) -> str:
    """Whether it fits, in a word. Raises ConfigError where it does not."""
    assert job.device is not None
    if whole.total > job.device:
        raise _does_not_fit(job, learner, choice, whole, beside)
    left = job.device - whole.total
    if left < MARGIN * job.device and not choice.why_tokens:
        most = _most(job, learner, beside, free_bytes(job.device))
        findings.append(
            JobWarning(
                f"config.{learner.backend}.pass_tokens: passes of {choice.tokens} tokens leave {_gib(left)} of a "
                f"device of {learner.role} free by what is foretold. Give {most} or less, so that what is not "
                "foretold has room."
            )
        )
        return "fits barely"
    return "fits"


def _does_not_fit(
    job: _Job, learner: _Learner, choice: PassChoice, whole: Need, beside: dict[str, int]
) -> ConfigError:
    assert job.device is not None
    key = f"config.{learner.backend}.pass_tokens"
    device, largest = _gib(job.device), whole.largest
    most = _most(job, learner, beside, job.device)
    said = (
        f"which needs {_gib(whole.total)} of each device of {learner.role}, {_gib(whole.parts[largest])} of it for "
        f"{largest}; a device has {device}."
    )
    if most >= max(1, min(job.longest, choice.tokens)):
        again = "" if choice.recompute else f" config.{learner.backend}.recompute makes larger ones fit."
        return ConfigError(f"{key}: {choice.tokens} given, {said}", hint=f"At most {most} fits.{again}")
    least = need(learner.ranks, _pass(job, job.longest), several=learner.several)
    least = Need({**least.parts, **beside})
    smallest = -(-least.total // GIB)
    return ConfigError(
        f"roles.{learner.role}.total: {learner.gang} given, and a pass of {job.longest} tokens, the longest sample, "
        f"needs {_gib(least.total)} of each device, {_gib(least.parts[least.largest])} of it for {least.largest}; a "
        f"device has {device}.",
        hint=f"Give it more ranks or devices of {smallest} GiB"
        + ("." if choice.recompute else f", or set config.{learner.backend}.recompute."),
    )


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
