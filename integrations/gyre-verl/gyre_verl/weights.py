"""verl's checkpoint engine, which puts each version where the fleet fetches it: in a folder that its manager can
read, or on the weight plane, served by the first rank itself.

Only `send_weights` is called: verl's own engines build a group of trainer and servers, and there is none here.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.torch_dtypes import PrecisionType

from gyre_verl.door import Door
from gyre_verl.plane import PlaneSource

KEPT = 3
"""Folders: the newest, the one that is loaded, and one that a pinned request may still need."""


class Place(Protocol):
    """Where the first rank puts versions."""

    def put(self, named: Mapping[str, torch.Tensor], version: int) -> dict[str, Any]:
        """What the door is told of the version, beside its number."""
        ...


class SharedFolder:
    """`folder` is on a disk that the fleet's manager has too; `model` has the model's `config.json`, which goes beside
    the tensors."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model

    def put(self, named: Mapping[str, torch.Tensor], version: int) -> dict[str, Any]:
        path, partial = self._folder / f"version-{version}", self._folder / f".version-{version}"
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in (path, partial):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir()
        for name in ("config.json", "generation_config.json"):
            if (self._model / name).exists():
                shutil.copy(self._model / name, partial / name)
        save_file(dict(named), partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(path)
        folders = sorted(self._folder.glob("version-*"), key=lambda one: int(one.name.rpartition("-")[2]))
        for old in folders[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return {"path": str(path)}


@CheckpointEngineRegistry.register("gyre")
class GyreWeights(CheckpointEngine):
    """`weights` says where versions go: into `folder`, or onto the plane of the fleet whose door is at `url`, for a
    `key` that may publish; `bind` and `ports` are then this machine's. `model_path` is the model's folder. Numbers are
    published in `dtype`, that of the engines, which is mostly half of what the trainer keeps."""

    def __init__(
        self,
        bucket_size: int,
        *,
        model_path: str,
        weights: str = "folder",
        folder: str = "",
        url: str = "",
        key: str = "",
        patience_s: float = Door.patience_s,
        bind: str | None = None,
        ports: str | None = None,
        dtype: str = "bfloat16",
        is_master: bool = False,
        **_: Any,
    ) -> None:
        self._is_master = is_master
        self._dtype = PrecisionType.to_dtype(dtype)
        self._place: Place | None = None
        if not is_master:
            return
        if weights == "plane":
            door = Door(url, key, float(patience_s))
            self._place = PlaneSource(door, Path(model_path), bind=bind, ports=ports)
        else:
            self._place = SharedFolder(Path(folder), Path(model_path))

    async def send_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,
    ) -> dict[str, Any]:
        """Every rank gives all tensors, for each is a collective; the first keeps them. `global_steps` is the fleet's
        version. Returns what is published."""
        began = time.monotonic()
        named = {}
        for name, tensor in weights:
            if self._is_master:
                dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
                named[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if self._place is None:
            return {}
        told = self._place.put(named, int(global_steps or 0))
        size = sum(tensor.nbytes for tensor in named.values())
        return {"gyre/told": told, "gyre/bytes": size, "gyre/seconds": time.monotonic() - began}

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
