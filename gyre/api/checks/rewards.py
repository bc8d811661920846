"""The reward function that a job names: its file, its signature, and the answers that it needs."""

from __future__ import annotations

from collections.abc import Iterator

from gyre.config import JobSpec


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields warnings; raises ConfigError or GraphError for the first mistake."""
    yield from ()
