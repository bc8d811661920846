"""What rank processes do in the tests of adapters: FSDP2's back end, and the same by hand over transformers' own
models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.fsdp.work import (
    CONFIG,
    COUNT,
    LR,
    Rows,
    _said_by,
    _step,
    backend_on,
    gradients,
    on_host,
    passes_of,
    state_of,
    token_loss,
)

LORA: dict[str, Any] = {"rank": 4, "alpha": 6.0}
LORA_CONFIG: dict[str, Any] = {**CONFIG, "lora": LORA}


def take_adapter_steps(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], steps: Sequence[Rows]
) -> dict[str, Any]:
    """Steps of the adapter, the rows of each dealt over the ranks; what came of it."""
    import torch

    with backend_on(rank, ranks, port, folder, config) as backend:
        told: dict[str, Any] = {"first": on_host(dict(backend.weights())), "losses": [], "norms": []}
        before = {name: one.clone() for name, one in _locals(backend)}
        for number, rows in enumerate(steps):
            mine = passes_of(rows[rank::ranks])
            backend.zero()
            lost = backend.backward(mine, token_loss)
            sums = [[float(one.loss), float(one.weight)] for one in lost]
            told["losses"].append(backend.ranks.sum(np.sum(np.array(sums).reshape(-1, 2), axis=0).tolist()))
            if number == len(steps) - 1:
                told["gradients"] = gradients(backend)
            told["norms"].append(backend.update(count=COUNT, lr=LR))
        parts = [passes_of([row])[0] for row in steps[0]]
        told["said"] = np.concatenate([one.numpy() for one in backend.forward(parts)])
        with backend.without_adapter():
            told["base said"] = np.concatenate([one.numpy() for one in backend.forward(parts)])
        told["said again"] = np.concatenate([one.numpy() for one in backend.forward(parts)])
        told["weights"] = on_host(dict(backend.weights()))
        told["merged"] = on_host(dict(backend.merged_weights()))
        told["frozen"] = all(torch.equal(one, before[name]) for name, one in _locals(backend))
        told["frozen dtypes"] = sorted({str(one.dtype) for _, one in _locals(backend)})
        told["trained dtypes"] = sorted({str(one.dtype) for one in backend._parameters.values()})
        told["with a gradient"] = sum(one.requires_grad for one in backend._model.parameters())
        return told


def _locals(backend: Any) -> list[tuple[str, Any]]:
    """This rank's shards of the model beside the adapter."""
    return [(name, backend._shards.local(name)) for name in backend._shards.tensors]


def take_plain_adapter_steps(
    rank: int, ranks: int, port: int, folder: Path, first: dict[str, Any], steps: Sequence[Rows]
) -> dict[str, Any]:
    """The same by hand: transformers' own model in one process, of whose linear layers each says
    `W x + alpha / rank * B (A x)` by a hook, each row by itself. `first` is the adapter, by PEFT's names."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.requires_grad_(False)
    trained = {name: torch.nn.Parameter(torch.from_numpy(one.copy())) for name, one in first.items()}
    scale = LORA["alpha"] / LORA["rank"]

    def adapted(a: Any, b: Any) -> Any:
        return lambda layer, given, said: said + scale * (given[0] @ a.T @ b.T)

    for name in {name.rpartition(".lora_")[0] for name in trained}:
        layer = model.get_submodule(name.removeprefix("base_model.model."))
        a, b = trained[f"{name}.lora_A.weight"], trained[f"{name}.lora_B.weight"]
        layer.register_forward_hook(adapted(a, b))
    optim = CONFIG["optim"]
    optimizer = torch.optim.AdamW(
        trained.values(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=optim["weight_decay"]
    )
    told: dict[str, Any] = {"losses": [], "norms": []}
    for rows in steps:
        optimizer.zero_grad()
        sums = np.zeros(2)
        for part in [passes_of([row])[0] for row in rows]:
            lost = token_loss(part, *_said_by(model, part))
            lost.loss.backward()
            sums += [float(lost.loss.detach()), float(lost.weight)]
        told["losses"].append(sums.tolist())
        told["gradients"] = {name: one.grad.numpy().copy() for name, one in trained.items()}
        for one in trained.values():
            one.grad /= COUNT
        told["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained.values(), optim["clip_norm"])))
        optimizer.step()
    with torch.no_grad():
        parts = [passes_of([row])[0] for row in steps[0]]
        told["said"] = np.concatenate([_said_by(model, part)[0].numpy() for part in parts])
    told["weights"] = {name: one.detach().numpy().copy() for name, one in trained.items()}
    return told


def train_and_save_adapter(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], path: Path, steps: Sequence[Rows]
) -> dict[str, Any]:
    """Two steps with a checkpoint between them, as an actor writes it; what the model says at the checkpoint."""
    from gyre.weights.version.manifest import checksum_of_weights

    with backend_on(rank, ranks, port, folder, config) as backend:
        _step(backend, steps[0], ranks)
        weights = dict(backend.weights())
        digest = checksum_of_weights(weights) if weights else None
        model = {
            "config": json.loads((folder / "config.json").read_text()),
            "decoder": None,
            "path": str(folder),
            "dtype": backend.dtype,
            "seed": 0,
        }
        backend.save(path, {"step": 1, "model": model}, lambda: digest)
        assert backend.saved(wait=True)
        parts = [passes_of([row])[0] for row in steps[0]]
        said = np.concatenate([one.numpy() for one in backend.forward(parts)])
        at = state_of(backend)
        norm = _step(backend, steps[1], ranks)
        return {"said": said, "weights": on_host(weights), "at": at, "norm": norm, "after": state_of(backend)}


def restore_adapter_and_step(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], path: Path, steps: Sequence[Rows]
) -> dict[str, Any]:
    with backend_on(rank, ranks, port, folder, config) as backend:
        _step(backend, steps[1], ranks)
        backend.restore(path)
        at = state_of(backend)
        norm = _step(backend, steps[1], ranks)
        return {"at": at, "norm": norm, "after": state_of(backend)}


def refused_adapters(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], path: Path
) -> tuple[str, bool]:
    """Why a checkpoint is not loaded, and whether everything is as it was."""
    from gyre.workloads.learner.errors import CheckpointMismatch

    with backend_on(rank, ranks, port, folder, config) as backend:
        before, said = state_of(backend), ""
        try:
            backend.restore(path)
        except CheckpointMismatch as error:
            said = str(error)
        after = state_of(backend)
        return said, all(np.array_equal(after[name], one) for name, one in before.items())


def load_adapter(
    rank: int, ranks: int, port: int, folder: Path, config: dict[str, Any], adapter: Path, rows: Rows
) -> Any:
    """What the model says with the adapter of a folder in PEFT's layout."""
    from safetensors.torch import load_file

    with backend_on(rank, ranks, port, folder, config) as backend:
        backend.load(load_file(adapter / "adapter_model.safetensors").__getitem__)
        said = [one.numpy() for one in backend.forward([passes_of([row])[0] for row in rows])]
        return np.concatenate(said)


def opened_by_peft(rank: int, ranks: int, port: int, base: Path, adapter: Path, rows: Rows) -> dict[str, Any]:
    """What PEFT makes of the folder beside its model: the tensors that found no place, and what the model says."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, of each other
        from peft import PeftModel
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, adapter).eval()
    there = {name.replace(".default", "") for name, _ in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        said = [_said_by(model, passes_of([row])[0])[0].float().numpy() for row in rows]
    left_out = sorted(set(load_file(adapter / "adapter_model.safetensors")) - there)
    return {"left out": left_out, "said": np.concatenate(said)}
