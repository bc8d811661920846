"""FSDP2 as a back end's record. This module must not import torch: it is read wherever a job is planned."""

from __future__ import annotations

from gyre.graph.backends import Backend
from gyre.models.support import BEYOND_TRANSFORMERS
from gyre.workloads.learner.checkpoint_identity import METADATA

_PACKAGE = "gyre.workloads.fsdp"

FSDP = Backend(
    classes={role: f"{_PACKAGE}.{role}:Fsdp{role.title()}" for role in ("actor", "critic", "reference")},
    reads_model=frozenset(("critic", "reference")),
    name="fsdp",
    package=_PACKAGE,
    needs={"transformers": "transformers", "torch": "torch"},
    extra=("fsdp", "to train causal language models of transformers with FSDP2"),
    section="fsdp",
    shards=True,
    trains_adapters=True,
    by_transformers=True,
    lacks=BEYOND_TRANSFORMERS,
    writer="FSDP2's ranks",
    checkpoints=(METADATA, "fsdp-"),
    memory="gyre.workloads.memory.fsdp",
    export=f"{_PACKAGE}.conversion:export_checkpoint",
    model_in=f"{_PACKAGE}.formats:model_in",
)
