"""What a job must have besides a graph that can run. `gyre plan`, `gyre run` and every submission ask before any
process starts.

Each module has one subject and a `check(spec, *, here)`: it yields warnings, each a sentence, and raises ConfigError or
GraphError, one sentence with the key, for the first mistake. `here` says whether the job runs on this machine alone, so
that a file which is missing is a mistake; otherwise it may be on the machines that run the job.

Invariant *plan is the judge*: what can be known from files is said here, and found out nowhere later.
"""

from __future__ import annotations

from gyre.api.checks.settings import check_class_sections, check_plugins, check_settings, runs_here

__all__ = ["check_class_sections", "check_plugins", "check_settings", "runs_here"]
