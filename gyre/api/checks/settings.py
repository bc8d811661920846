"""What a job must have besides a graph that can run: settings without a default, its classes' own sections, and files.

`gyre plan` and every submission check them before any process starts.

A file that a job reads must be on the machines that run it. Where that is this machine alone (one node, and no cluster
but the one that is started here), a missing file is a mistake. Otherwise it may be there without being here: then it is
a note.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gyre.api.checks import agents, data, engines, evaluation, learning, machine, models, rewards
from gyre.api.checks.findings import as_findings
from gyre.config import JobSpec
from gyre.errors import ConfigError
from gyre.graph.integrations import check_complete, reads_sections

_PATHS = ("path", "model_path", "held_out")
"""Keys whose text is a path even where it looks like a word."""


def check_settings(spec: JobSpec, *, here: bool) -> list[str]:
    """Whether a compiled job's `config` is complete, what it needs is installed, and its files are here. Returns notes
    and warnings. Raises ConfigError, one sentence, for the first mistake. `here`: it runs on this machine alone."""
    if not reads_sections(spec):
        return [*engines.check(spec, here=here), *machine.check(spec, here=here)]
    found: list[str] = []
    check_complete(spec)
    with _folder_named(spec):
        # In this order: what a later one says of, an earlier one has found in order.
        for subject in (data, models, rewards, evaluation, learning, agents):
            found += as_findings(subject.check(spec, here=here))
    return [*found, *engines.check(spec, here=here), *machine.check(spec, here=here)]


def runs_here(spec: JobSpec, ray_address: str | None = None) -> bool:
    """Whether the job's processes will all be on this machine, as far as is known before the cluster is asked."""
    ray = sys.modules.get("ray")
    connected = ray is not None and ray.is_initialized()
    address = ray_address or os.environ.get("RAY_ADDRESS") or "local"
    return spec.node_num in (None, 1) and address == "local" and not connected


@contextmanager
def _folder_named(spec: JobSpec) -> Iterator[None]:
    """An error of a relative path that leads nowhere says where it was looked up. A column's name is no path."""
    try:
        yield
    except ConfigError as error:
        value: Any = spec
        for part in error.message.partition(": ")[0].split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        path = Path(value.partition(":")[0]) if isinstance(value, str) and value else None
        if path is not None and part not in _PATHS and "/" not in value and not path.suffix:
            path = None
        here = str(Path.cwd())
        if path is not None and not path.is_absolute() and not path.exists() and here not in str(error):
            error.hint = f"It was looked up in {here}. {error.hint}".strip()
        raise
