"""`export`: write a checkpoint of a job's actor as a model folder. Needs no running job; of Megatron's, Megatron."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from gyre.api.cli.output import remark, write_json
from gyre.errors import NotFound


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["", "float32", "bfloat16"]),
    default="",
    help="Type of the weights to write; by default that of the checkpoint.",
)
@click.option("--trust", is_flag=True, help="Read a checkpoint in Megatron's own format, which is unpickled.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written, as one object.")
def export(checkpoint: Path, out: Path, dtype: str, trust: bool, as_json: bool) -> None:
    """Write the actor's CHECKPOINT as the folder OUT, in Hugging Face's layout.

    CHECKPOINT is a folder such as GYRE_HOME/jobs/JOB/checkpoints/step_00000100, whatever layout wrote it.
    """
    if not checkpoint.is_dir():
        raise NotFound(
            f"there is no folder {checkpoint}.",
            hint="Checkpoints of a job are below GYRE_HOME/jobs/JOB/checkpoints; `gyre ls --all` has its id.",
        )
    from gyre.workloads.torch.saved_policy import checkpoint_file, export_policy

    told: dict[str, Any]
    if checkpoint_file(checkpoint, 0).is_file():
        told = export_policy(checkpoint, out, dtype=dtype)
    else:
        from gyre.workloads.megatron.checkpoints.conversion import export_checkpoint

        told = export_checkpoint(checkpoint, out, dtype=dtype, trust=trust)
    if as_json:
        write_json(told)
    else:
        click.echo(
            f"step {told['step']}: {told['tensors']} tensors, {told['size_bytes']} bytes, {told['dtype']}"
        )
        remark(f"wrote {os.fspath(out)}")
