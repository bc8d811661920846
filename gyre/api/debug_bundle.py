"""A job in one archive, for a report: `gyre debug JOB` writes it.

    view.json  spec.json  graph.json  events.jsonl  steps.jsonl  machine.json  logs/<vertex>.<incarnation>.log
    README.txt

Invariants:
- *no secret leaves*: of the configuration what `spec_of` shows, and wherever a secret stands in a log, an error or an
  event, `***` is put (`gyre.redaction`);
- *bounded*: the newest events, and the end of each log, so that the archive can be attached to a report;
- *what cannot be read is said*: a part that fails is a line in README.txt, and the others are there.
"""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from gyre.api.cli.output import finite
from gyre.api.reader import JobReader
from gyre.config import parse_job
from gyre.config.secrets import secret_values
from gyre.errors import GyreError
from gyre.graph import as_dict, compile_job
from gyre.graph.backends import back_ends
from gyre.master.master_api import spec_of
from gyre.redaction import HIDDEN, Secrets
from gyre.rollouts.engines import engines

MOST_EVENTS = 20_000
LOG_BYTES = 512 << 10
"""Of the end of each file."""
_PACKAGES = ("gyre", "ray", "mooncake", "sqlalchemy", "fastapi")


def _packages() -> tuple[str, ...]:
    """How the names of the distributions begin whose versions may tell why a job behaves as it does."""
    named = {name for one in back_ends() for name in one.needs.values()} | {
        kind.package for kind in engines()
    }
    return (*_PACKAGES, *sorted(named))


def write_bundle(
    reader: JobReader, job_id: str, file: Path, *, secrets: Sequence[str] = (), logs: Path | None = None
) -> dict[str, Any]:
    """Write the archive (gzipped tar). `secrets` are blackened with those of the configuration, `logs` is the folder of
    the vertices' logs. Returns `file`, `bytes`, `parts` and `missing` (by part, why)."""
    raw = reader.spec(job_id)
    hidden = Secrets((*secret_values(raw, os.environ), *((value, True) for value in secrets)))
    missing: dict[str, str] = {}
    parts: dict[str, bytes] = {}

    def add(name: str, make: Callable[[], Any]) -> None:
        try:
            parts[name] = make()
        except (GyreError, OSError, ValueError) as error:
            missing[name] = hidden.text(f"{type(error).__name__}: {error}")

    add("view.json", lambda: _json(hidden.data(reader.view(job_id))))
    add("spec.json", lambda: _json(hidden.data(spec_of(parse_job(raw)))))
    add("graph.json", lambda: _json(hidden.data(as_dict(compile_job(parse_job(raw))))))
    add("events.jsonl", lambda: _lines(hidden.data(_newest_events(reader, job_id))))
    add("steps.jsonl", lambda: _lines(hidden.data(reader.steps(job_id))))
    add("machine.json", lambda: _json(hidden.data(machine())))
    for path in sorted((*logs.glob("*.log"), *logs.glob("*.log.*"))) if logs is not None else ():
        if path.is_symlink() or not path.is_file():  # what it leads to is no log of this job
            missing[f"logs/{path.name}"] = "it is no file, but a link or a pipe"
            continue
        add(f"logs/{path.name}", lambda path=path: _shown(_end_of(path), hidden))  # type: ignore[misc]
    if logs is None:
        missing["logs/"] = "They lie in the GYRE_HOME of the machine that ran the job."
    parts["README.txt"] = _readme(job_id, missing).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as archive:
        for name, data in parts.items():
            entry = tarfile.TarInfo(f"{file.name.removesuffix('.tar.gz')}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    file.chmod(0o600)
    return {"file": str(file), "bytes": file.stat().st_size, "parts": sorted(parts), "missing": missing}


def _shown(log: bytes, hidden: Secrets) -> bytes:
    return hidden.text(log.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def machine() -> dict[str, Any]:
    """What runs here: versions, cores, memory. No names and no environment."""
    import psutil

    found = {
        name: one.version
        for one in distributions()
        if (name := str(one.metadata["Name"]).lower()).startswith(_packages())
    }
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": dict(sorted(found.items())),
    }


def _newest_events(reader: JobReader, job_id: str) -> list[dict[str, Any]]:
    newest = int(reader.view(job_id)["seq"])
    return list(reader.history(job_id, after=max(newest - MOST_EVENTS, 0)))


def _end_of(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - LOG_BYTES, 0))
        return file.read(LOG_BYTES)


def _json(data: Any) -> bytes:
    return json.dumps(finite(data), indent=2, default=str).encode()


def _lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(finite(row), default=str).encode() + b"\n" for row in rows)


def _readme(job_id: str, missing: Mapping[str, str]) -> str:
    lines = [
        f"What Gyre knows of job {job_id}. Values of environment variables, passwords and tokens are {HIDDEN}.",
        "Prompts and answers are in it where a log, an error or an event quotes them: read it before you pass it on.",
        *(f"Not there: {name}: {why}" for name, why in missing.items()),
    ]
    return "\n".join(lines) + "\n"
