"""What rank processes do in the tests of exports: checkpoints as an actor writes them, and folders opened by
transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.fsdp.work import Rows, _said_by, _step, backend_on, passes_of


def save_trained(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], path: Path, rows: Rows
) -> Any:
    """A step, and a checkpoint with what an actor says in it of its model; what the model then says of the rows."""
    from gyre.weights.version.manifest import checksum_of_weights

    with backend_on(rank, ranks, port, folder, config) as backend:
        _step(backend, rows, ranks)
        weights = dict(backend.weights())
        digest = checksum_of_weights(weights) if weights else None
        model = {
            "config": json.loads((folder / "config.json").read_text()),
            "decoder": None,
            "path": str(folder),
            "dtype": backend.dtype,
            "seed": 0,
        }
        backend.save(path, {"step": 7, "model": model}, lambda: digest)
        said = [part.numpy() for part in backend.forward([passes_of([row])[0] for row in rows])]
        assert backend.saved(wait=True)
        return np.concatenate(said)


def exported(rank: int, ranks: int, port: int, arguments: list[str]) -> tuple[int, str, str]:
    """`gyre export`: its exit status and what it printed."""
    from click.testing import CliRunner

    from gyre.api.cli import main

    result = CliRunner().invoke(main, ["export", *arguments])
    return result.exit_code, result.stdout, result.stderr


def largest_in_memory(rank: int, ranks: int, port: int, path: Path, out: Path, shard_bytes: int) -> int:
    """An export in files of at most so many bytes; the most bytes of tensors that were there at a time."""
    import weakref

    from gyre.workloads.fsdp import conversion

    save, tensors, most = conversion.save_model_folder, conversion.FsdpStoredWeights.tensors, 0
    given: list[Any] = []

    def watched(self: Any) -> Any:
        nonlocal most
        for name, tensor in tensors(self):
            given.append(weakref.ref(tensor))
            most = max(most, sum(one.nbytes for held in given if (one := held()) is not None))
            yield name, tensor
            del tensor

    conversion.FsdpStoredWeights.tensors = watched
    conversion.save_model_folder = lambda *given, **named: save(*given, **named, shard_bytes=shard_bytes)
    try:
        conversion.export_checkpoint(path, out)
    finally:
        conversion.FsdpStoredWeights.tensors, conversion.save_model_folder = tensors, save
    return most


def opened(rank: int, ranks: int, port: int, out: Path, rows: Rows) -> dict[str, Any]:
    """What transformers says of a folder, asked for nothing but its path."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    dtype = str(model.dtype)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    with torch.no_grad():
        generated = model.generate(
            torch.tensor([[3, 4, 5]]), min_new_tokens=4, max_new_tokens=4, do_sample=False
        )
        said = [_said_by(model.eval(), passes_of([row])[0])[0].float().numpy() for row in rows]
    return {
        "said": np.concatenate(said),
        "problems": {name: sorted(map(str, found)) for name, found in info.items() if found},
        "dtype": dtype,
        "tied": head is embedding,
        "generated": generated.shape[1],
        "ends": model.generation_config.eos_token_id,
    }


def begins_with(rank: int, ranks: int, port: int, config: dict[str, Any]) -> dict[str, Any]:
    """The weights that FSDP2's ranks of a job with this `config` begin with. Empty but on the first."""
    from gyre.workloads.base import WorkloadContext
    from gyre.workloads.fsdp.actor import FsdpActor
    from tests.fsdp.work import on_host

    actor = FsdpActor()
    actor.context = WorkloadContext(
        "j", "actor", rank, ranks, config=config, master_addr="127.0.0.1", master_port=port
    )
    actor.setup()
    try:
        assert (actor.warm_start()["steps"], actor.step) == (0, 0)
        return on_host(actor.weights())
    finally:
        actor.teardown()
