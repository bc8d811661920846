"""Every check of a job, in the order in which the cause comes before what follows from it: `gyre plan`, `run`, `submit`
and `resume` ask this one function.

The graph comes first, for all else is asked of a compiled job; then what `config` lacks, what files say, and what is
not installed; then the user's own code, whose import may take long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gyre.api.checks.code import check_code, check_graphs_code
from gyre.api.checks.findings import ELSEWHERE, JobWarning, Note
from gyre.api.checks.machine import check_room, trains_elsewhere
from gyre.api.checks.memory import Foreseen, foresee, summary
from gyre.api.checks.settings import check_settings, runs_here
from gyre.config import JobSpec
from gyre.errors import GyreError
from gyre.graph.compile import CompiledJob, compile_job


@dataclass(frozen=True, slots=True)
class Judged:
    """A job that can run, as far as can be known before anything is started."""

    compiled: CompiledJob
    findings: tuple[str, ...]
    """Warnings first, then notes."""
    memory: Foreseen

    @property
    def warnings(self) -> list[str]:
        return [each for each in self.findings if isinstance(each, JobWarning)]

    @property
    def notes(self) -> list[str]:
        return [each for each in self.findings if not isinstance(each, JobWarning)]

    @property
    def because(self) -> str:
        """Why it can run, as far as is known: where, whether its devices have the memory, what else was found."""
        return "; ".join(self._reasons())

    def _reasons(self) -> Iterator[str]:
        plan = self.compiled.plan
        vertices, machines = len(plan.placements), plan.node_num
        yield f"{vertices} vertices on {_count(machines, 'machine')}"
        lines = [line for line in self.memory.lines if line.on_device]
        if lines and all(line.verdict for line in lines) and self.memory.device_bytes:
            fullest = max(lines, key=lambda line: line.needs or 0)
            of = self.memory.device_bytes / 2**30
            yield (
                f"it fits: of the {of:.1f} GiB of a device {fullest.role} takes the most, "
                f"{(fullest.needs or 0) / 2**30:.1f}"
            )
        elif self.compiled.spec.device_type == "GPU":
            yield "whether it fits its GPUs is not known"
        if any(note.endswith(ELSEWHERE) for note in self.notes):
            yield "if its machines have what the notes name"
        if self.warnings:
            yield _count(len(self.warnings), "warning")


def why_not(error: GyreError) -> str:
    """Why a job cannot run, for a line beside the error's own sentence: the key that this begins with."""
    key = next((part for part in error.message.split(": ")[:-1] if re.fullmatch(r"[a-z_][\w.]*", part)), "")
    return f"{key} must be mended first" if key else "see the error"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def judge(
    spec: JobSpec,
    ray_address: str | None = None,
    *,
    must_import: bool = False,
    before_code: Callable[[CompiledJob], None] = lambda compiled: None,
) -> Judged:
    """Everything that can be known of a job without its store and its cluster. Raises ConfigError and GraphError, one
    sentence with the key, for the first mistake.

    With `must_import` the job is submitted: the user's code must import on this machine, also if the job runs on
    others. A job that is only planned is for other machines where this installation lacks the torch that it needs.
    `before_code` is called when only the user's own code is left to be looked into.
    """
    check_graphs_code(spec)
    compiled = compile_job(spec)
    here = runs_here(compiled.spec, ray_address) and (must_import or not trains_elsewhere(compiled.spec))
    found = check_settings(compiled.spec, here=here)
    check_room(compiled, here=here)
    memory = foresee(compiled.spec, here=here)
    found += [*memory.findings, *summary(memory)]
    before_code(compiled)
    found += check_code(compiled.spec, here=here, must_import=must_import)
    found += map(Note, compiled.plan.notes)
    warnings = [each for each in found if isinstance(each, JobWarning)]
    notes = [each for each in found if not isinstance(each, JobWarning)]
    return Judged(compiled, tuple(warnings + notes), memory)
