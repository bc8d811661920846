"""What a job must have besides a graph that can run. `gyre plan`, `gyre run` and every submission ask before any
process starts.

`judge` asks all of them. A subject's module has a `check(spec, *, here)`: it yields warnings, each a sentence (a `Note`
for what is information alone), and raises ConfigError or GraphError, one sentence with the key, for the first mistake.
`here` says whether the job runs on this machine alone, so
that a file which is missing is a mistake; otherwise it may be on the machines that run the job.

Invariant *plan is the judge*: what can be known from files is said here, and found out nowhere later.
"""

from __future__ import annotations

from gyre.api.checks.examine import check_class_sections, check_plugins
from gyre.api.checks.findings import JobWarning, Note, line_of
from gyre.api.checks.judge import Judged, judge, why_not
from gyre.api.checks.settings import check_settings, runs_here

__all__ = [
    "JobWarning",
    "Judged",
    "Note",
    "check_class_sections",
    "check_plugins",
    "check_settings",
    "judge",
    "line_of",
    "runs_here",
    "why_not",
]
