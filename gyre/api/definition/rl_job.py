"""A job that is described but not yet running.

`RLJob` holds a `JobSpec` and nothing else: where it runs, and how it goes, the handle that `submit` returns says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gyre.config import JobSpec
from gyre.graph.compile import CompiledJob, compile_job

if TYPE_CHECKING:
    from gyre.api.definition.source import JobSource
    from gyre.api.handle import JobHandle


class RLJob:
    """What `RLJobBuilder.build` and `load_job_file` return."""

    def __init__(self, spec: JobSpec, source: JobSource | None = None) -> None:
        self.spec = spec
        self.source = source
        """Where the job's keys stand in the user's files, if it was written in some."""

    def plan(self) -> CompiledJob:
        """The graph, its checks and the placement, without a cluster. Raises GraphError."""
        return compile_job(self.spec)

    def submit(self, name: str | None = None, **options: Any) -> JobHandle:
        """Start the job on a Ray cluster. `name` replaces the spec's; options as in `gyre.api.submit.submit_job`."""
        from gyre.api.submit import submit_job

        return submit_job(self.spec, name, **options)

    def _repr_html_(self) -> str:
        """The job in a notebook: what runs, and how much of it."""
        from gyre.api.notebook import table_html

        run, roles = self.spec.run, self.spec.roles
        rows = [
            ("recipe", self.spec.recipe or "none"),
            ("roles", ", ".join(f"{name} × {role.total}" for name, role in roles.items())),
            ("steps", f"{run.steps}, {run.prompts_per_step} prompts each" if self.spec.recipe else ""),
        ]
        return table_html(f"job {self.spec.name}", rows)

    def __repr__(self) -> str:
        roles = ", ".join(f"{name} {role.total}" for name, role in self.spec.roles.items())
        return f"RLJob({self.spec.name!r}: {roles})"
