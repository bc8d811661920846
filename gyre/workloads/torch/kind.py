"""Plain torch as a back end's record. This module must not import torch: it is read wherever a job is planned."""

from __future__ import annotations

from gyre.graph.backends import Backend
from gyre.models.support import BEYOND_DECODER

_PACKAGE = "gyre.workloads.torch"

TORCH = Backend(
    classes={role: f"{_PACKAGE}.{role}:Torch{role.title()}" for role in ("actor", "critic", "reference")},
    reads_model=frozenset(("critic", "reference")),
    name="torch",
    package=_PACKAGE,
    needs={"torch": "torch"},
    lacks=BEYOND_DECODER,
    writer="plain torch",
    checkpoints=("rank_00000.pt", ""),
    export=f"{_PACKAGE}.saved_policy:export_policy",
)
