"""The prepared data set that a job names: its folder, its digest, its tokenizer, its lengths, its held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator

from gyre.config import JobSpec


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields warnings; raises ConfigError or GraphError for the first mistake."""
    yield from ()
