"""A page of a job's logs, and whose logs are not to be had here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre.logs.reading import LogQuery, list_parts, read_page

_RUNS = frozenset({"running", "stopping"})
"""Phases of a vertex that has opened its log, if it could."""

MISSING_TOLD = 50


def logs_page(
    folder: Path,
    vertices: Sequence[Mapping[str, Any]],
    query: LogQuery,
    *,
    after: Mapping[str, int],
    tail: int | None,
    limit_bytes: int,
) -> dict[str, Any]:
    """`gyre.logs.reading.read_page`, and `missing`, a sentence for each wanted vertex of the view that runs and has no
    log in this folder."""
    page = read_page(folder, query, after=after, tail=tail, limit_bytes=limit_bytes)
    return {**page, "missing": missing_logs(folder, vertices, query)}


def missing_logs(folder: Path, vertices: Sequence[Mapping[str, Any]], query: LogQuery) -> list[str]:
    there = {(part.vertex, part.incarnation) for part in list_parts(folder, query)}
    missing = [
        vertex
        for vertex in vertices
        if vertex["phase"] in _RUNS
        and query.wants(vertex["id"])
        and (vertex["id"], vertex["incarnation"]) not in there
    ]
    told = [
        f"The log of {vertex['id']} is not here: it lies in {folder} on its machine"
        f"{f' ({node})' if (node := str(vertex.get('node') or '')[:12]) else ''}, which does not share that folder."
        for vertex in missing[:MISSING_TOLD]
    ]
    if len(missing) > MISSING_TOLD:
        told.append(f"The logs of {len(missing) - MISSING_TOLD} more vertices are not here either.")
    return told
