"""Checkpoints of each back end, as far as it takes to see whose they are."""

from __future__ import annotations

from pathlib import Path

from gyre.workloads.gang.state_files import sealed, write_json


def write_beginnings(folder: Path) -> dict[str, Path]:
    """A folder of each back end below `folder`, in which everything else is missing."""
    from gyre.workloads.fsdp.formats import FORMAT as FSDPS
    from gyre.workloads.megatron.checkpoints.formats import FORMAT as MEGATRONS

    found: dict[str, Path] = {one: folder / f"of {one}" for one in ("torch", "megatron", "fsdp")}
    for path in found.values():
        path.mkdir(parents=True)
    (found["torch"] / "rank_00000.pt").write_bytes(b"")
    write_json(found["megatron"] / "actor.json", sealed({"format": MEGATRONS}))
    write_json(found["fsdp"] / "actor.json", sealed({"format": FSDPS}))
    return found
