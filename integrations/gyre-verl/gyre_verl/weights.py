"""verl's checkpoint engine, which writes the weights as a folder that the fleet's manager can read.

Only `send_weights` is called: verl's own engines build a group of trainer and servers, and there is none here.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

KEPT = 3
"""Folders: the newest, the one that is loaded, and one that a pinned request may still need."""


@CheckpointEngineRegistry.register("gyre")
class GyreWeights(CheckpointEngine):
    """`folder` is where versions are written, on a disk that the fleet's manager has too; `model_path` has the model's
    `config.json`, which goes beside the tensors."""

    def __init__(
        self, bucket_size: int, *, folder: str, model_path: str, is_master: bool = False, **_: Any
    ) -> None:
        self._folder, self._model, self._is_master = Path(folder), Path(model_path), is_master

    async def send_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,
    ) -> dict[str, Any]:
        """Every rank gives all tensors, for each is a collective; the first writes them. Returns what is published."""
        began = time.monotonic()
        named = {}
        for name, tensor in weights:
            if self._is_master:
                named[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if not self._is_master:
            return {}
        path = self._write(named, int(global_steps or 0))
        size = sum(tensor.nbytes for tensor in named.values())
        return {"gyre/path": str(path), "gyre/bytes": size, "gyre/seconds": time.monotonic() - began}

    def _write(self, named: dict[str, torch.Tensor], step: int) -> Path:
        path, partial = self._folder / f"step-{step}", self._folder / f".step-{step}"
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in (path, partial):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir()
        for name in ("config.json", "generation_config.json"):
            if (self._model / name).exists():
                shutil.copy(self._model / name, partial / name)
        save_file(named, partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(path)
        folders = sorted(self._folder.glob("step-*"), key=lambda one: int(one.name.rpartition("-")[2]))
        for old in folders[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return path

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a Gyre fleet fetches weights by itself")

    def init_process_group(self, **_: Any) -> None:
        raise NotImplementedError("a Gyre fleet fetches weights by itself")

    def finalize(self) -> None:
        """There is no group."""

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        raise NotImplementedError("a Gyre fleet fetches weights by itself")
