"""What is fixed about a job while it runs: its spec, and which of its vertices restart together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gyre.config import JobSpec

Regions = Callable[[str], frozenset[str]]
"""The region of a vertex: itself and its peers in a collective."""


@dataclass(frozen=True, slots=True)
class JobLayout:
    spec: JobSpec
    regions: Regions

    def split(self, vertices: Iterable[str]) -> list[list[str]]:
        """The vertices region by region, in the order in which the regions first appear."""
        given = list(vertices)
        members = set(given)
        seen: set[str] = set()
        out = []
        for vertex in given:
            if vertex in seen:
                continue
            region = sorted(self.regions(vertex) & members, key=role_and_rank)
            seen.update(region)
            out.append(region)
        return out


def role_and_rank(vertex: str) -> tuple[str, int]:
    """The key that sorts vertices by role, then by rank as a number."""
    role, _, rank = vertex.rpartition("-")
    return role, int(rank)
