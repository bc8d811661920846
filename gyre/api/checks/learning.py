"""Settings with which a job cannot learn, or with which it is not seen whether it learns."""

from __future__ import annotations

from collections.abc import Iterator

from gyre.config import JobSpec


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields warnings; raises ConfigError or GraphError for the first mistake."""
    yield from ()
