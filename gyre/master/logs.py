"""A page of a job's logs, and whose logs are not to be had here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre.logs.reading import LogQuery, list_parts, read_page

MISSING_TOLD = 50


def logs_page(
    folder: Path,
    vertices: Callable[[], Sequence[Mapping[str, Any]]],
    query: LogQuery,
    *,
    after: Mapping[str, int],
    tail: int | None,
    limit_bytes: int,
) -> dict[str, Any]:
    """`gyre.logs.reading.read_page`, and `missing`: in a first page, a sentence for each wanted vertex of the view
    whose log is not in this folder."""
    page = read_page(folder, query, after=after, tail=tail, limit_bytes=limit_bytes)
    return {**page, "missing": [] if after else missing_logs(folder, vertices(), query)}


def missing_logs(folder: Path, vertices: Sequence[Mapping[str, Any]], query: LogQuery) -> list[str]:
    """A sentence for each wanted vertex of the view that should have a log in this folder, and has none."""
    parts = list_parts(folder, query)
    processes = {(part.vertex, part.incarnation) for part in parts}
    with_logs = {part.vertex for part in parts}
    told = []
    for vertex in vertices:
        name, phase = vertex["id"], vertex["phase"]
        if not query.wants(name):
            continue
        if phase == "running" and (name, vertex["incarnation"]) not in processes:
            machine = f" ({node})" if (node := str(vertex.get("node") or "")[:12]) else ""
            told.append(
                f"The log of {name} is not here: it lies in {folder} on its machine{machine}, which does not share "
                "that folder."
            )
        elif phase == "stopped" and name not in with_logs:
            told.append(
                f"There is no log of {name} here: it never ran, or its machine does not share {folder} with this one."
            )
    more = len(told) - MISSING_TOLD
    return [*told[:MISSING_TOLD], f"Nor are those of {more} more."] if more > 0 else told
