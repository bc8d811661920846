"""Reader of the vertices' log files, `<vertex>.<incarnation>.log`, by offset, so that a follower continues where it
was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_logs(
    folder: Path, *, role: str | None, rank: int | None, after: Mapping[str, int], limit_bytes: int
) -> dict[str, Any]:
    """Returns `chunks` in the order of file names, and `next`, the offset to continue from in each file.

    At most `limit_bytes` are returned. A file that is first asked for is read from its last `limit_bytes`.
    """
    chunks: list[dict[str, Any]] = []
    offsets = dict(after)
    left = limit_bytes
    for path in sorted(folder.glob("*.log")):
        vertex, _, incarnation = path.stem.rpartition(".")
        named_role, _, named_rank = vertex.rpartition("-")
        if (role is not None and named_role != role) or (rank is not None and named_rank != str(rank)):
            continue
        size = path.stat().st_size
        start = after.get(path.name, max(0, size - limit_bytes))
        if start >= size or left <= 0:
            offsets.setdefault(path.name, start)
            continue
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(min(left, size - start))
        # Whole lines only, unless one line is longer than everything that may be returned.
        cut = data.rfind(b"\n") + 1
        if 0 < cut < len(data):
            data = data[:cut]
        left -= len(data)
        offsets[path.name] = start + len(data)
        chunks.append(
            {
                "vertex": vertex,
                "incarnation": int(incarnation) if incarnation.isdigit() else 0,
                "file": path.name,
                "offset": start,
                "text": data.decode("utf-8", "replace"),
            }
        )
    return {"chunks": chunks, "next": offsets}
