"""Megatron as a back end's record. This module must not import torch: it is read wherever a job is planned."""

from __future__ import annotations

from collections.abc import Iterator

from gyre.config.sections import WorkloadSettings
from gyre.graph.backends import Backend
from gyre.models.architecture import Architecture
from gyre.models.support import BEYOND_DECODER
from gyre.workloads.learner.checkpoint_identity import METADATA

_PACKAGE = "gyre.workloads.megatron"


def unfit(architecture: Architecture) -> str:
    """Why Megatron does not train a model; "" where it does."""
    if architecture.out_bias != architecture.mlp_bias:
        return (
            "a bias in attention's output but not in the MLP, or the other way round (attention_bias, mlp_bias), is "
            "not trained by Megatron, which has one switch for the two"
        )
    return ""


def _unfit_layout(architecture: Architecture, settings: WorkloadSettings) -> Iterator[str]:
    layout = settings.megatron
    return layout_problems(
        architecture, tensor_parallel=layout.tensor_parallel, pipeline_parallel=layout.pipeline_parallel
    )


def layout_problems(
    architecture: Architecture, *, tensor_parallel: int, pipeline_parallel: int
) -> Iterator[str]:
    """How a layout of Megatron's ranks does not fit a model, each a sentence that names the key. The vocabulary is
    padded, and fits any."""
    for what, size, parts, name in (
        ("num_key_value_heads", architecture.kv_heads, tensor_parallel, "tensor_parallel"),
        ("intermediate_size", architecture.mlp, tensor_parallel, "tensor_parallel"),
        ("num_hidden_layers", architecture.layers, pipeline_parallel, "pipeline_parallel"),
    ):
        if size % parts:
            yield f"config.megatron.{name}: {parts} does not divide the model's {what} ({size})."


def _copy_of(settings: WorkloadSettings) -> int:
    return settings.megatron.tensor_parallel * settings.megatron.pipeline_parallel


MEGATRON = Backend(
    classes={role: f"{_PACKAGE}.{role}:Megatron{role.title()}" for role in ("actor", "critic", "reference")},
    reads_model=frozenset(("critic", "reference")),
    name="megatron",
    package=_PACKAGE,
    needs={"megatron.core": "megatron-core"},
    extra=("megatron", "to train a model's folder with Megatron"),
    section="megatron",
    shards=True,
    lacks=BEYOND_DECODER | {"attention_bias"},
    unfit=unfit,
    unfit_layout=_unfit_layout,
    copy_of=_copy_of,
    writer="Megatron's ranks",
    checkpoints=(METADATA, ""),
    memory="gyre.workloads.memory.megatron",
    export=f"{_PACKAGE}.checkpoints.conversion:export_checkpoint",
    model_in=f"{_PACKAGE}.checkpoints.formats:model_in",
)
