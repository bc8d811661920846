"""Every check of a job, in the order in which the cause comes before what follows from it: `gyre plan`, `run`, `submit`
and `resume` ask this one function.

The graph comes first, for all else is asked of a compiled job; then what `config` lacks, what files say, and what is
not installed; then the user's own code, whose import may take long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gyre.api.checks.code import check_code, check_graphs_code
from gyre.api.checks.findings import JobWarning, Note
from gyre.api.checks.machine import check_room, trains_elsewhere
from gyre.api.checks.memory import Foreseen, foresee, summary
from gyre.api.checks.settings import check_settings, runs_here
from gyre.config import JobSpec
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
