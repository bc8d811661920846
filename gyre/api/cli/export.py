"""`export`: write a checkpoint of a job's actor as a model folder. Needs no running job; of Megatron's ranks Megatron,
of FSDP2's transformers."""

from __future__ import annotations

import os
from pathlib import Path

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import remark, write_json
from gyre.errors import NotFound


@verb()
@click.argument("checkpoint", metavar="JOB|CHECKPOINT", shell_complete=job_names)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Type of the weights to write; by default the checkpoint's.",
)
@click.option(
    "--trust",
    is_flag=True,
    help="Read a checkpoint in Megatron's own format, which can run code when it is read.",
)
@click.option("--adapter", is_flag=True, help="Write the adapter of config.lora alone, in PEFT's layout.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON object.")
def export(
    session: CliContext,
    checkpoint: str,
    out: Path,
    dtype: str | None,
    trust: bool,
    adapter: bool,
    as_json: bool,
) -> None:
    """Write the actor's weights as the folder OUT, in Hugging Face's layout.

    They come from a job's last checkpoint, or from CHECKPOINT, a folder such as
    GYRE_HOME/jobs/JOB/checkpoints/step_00000100. Any layout of ranks may have written it. An adapter
    is added to its model.
    """
    folder = _folder_of(session, checkpoint)
    from gyre.api.saved_policies import export_saved
    from gyre.workloads.learner.checkpoint_identity import METADATA, written_by
    from gyre.workloads.torch.saved_policy import checkpoint_file

    back_end = written_by(folder)
    if back_end is None:
        raise NotFound(
            f"{folder} is no checkpoint: it has neither {checkpoint_file(folder, 0).name} nor {METADATA}.",
            hint=_near(folder),
        )
    written = export_saved(folder, out, back_end, dtype=dtype or "", trust=trust, adapter=adapter)
    if as_json:
        write_json(written)
    else:
        click.echo(
            f"step {written['step']}: {written['tensors']} tensors, {written['size_bytes']} bytes, {written['dtype']}"
        )
        remark(f"wrote {os.fspath(out)}")


def _folder_of(session: CliContext, checkpoint: str) -> Path:
    """The folder of that path, or the last checkpoint of the job of that name or id. Raises NotFound."""
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        return folder
    if "/" in checkpoint or not session.has_store():
        raise NotFound(
            f"There is no folder {folder.absolute()}.", hint="`gyre ls --all` has the names of jobs."
        )
    from gyre.api.first_weights import find_source
    from gyre.store import open_store

    with open_store(session.store_url, create=False, read_only=True) as store:
        return find_source(store, session.home, checkpoint).folders[0]


def _near(folder: Path) -> str:
    """What may be meant: a checkpoint in the folder, or above it."""
    inside = sorted(path.name for path in folder.glob("step_*") if path.is_dir())
    if inside:
        return f"Give one of the checkpoints in it, such as {folder / inside[-1]}."
    return "A checkpoint is a folder such as GYRE_HOME/jobs/JOB/checkpoints/step_00000100."
