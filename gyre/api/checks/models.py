"""The model folders that a job names, and which back ends can train them and engines serve them."""

from __future__ import annotations

from collections.abc import Iterator

from gyre.config import JobSpec


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields warnings; raises ConfigError or GraphError for the first mistake."""
    yield from ()
