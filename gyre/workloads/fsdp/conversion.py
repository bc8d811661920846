"""Turns a checkpoint of FSDP2's ranks, however many wrote it, into a folder in Hugging Face's layout.

It runs in one process, on the CPU, with neither the job nor its ranks.

Invariants:
- *a file at a time*: beside the tensors of one of the folder's files, those of one bundle are in memory, such as the
  experts of a layer: never the model;
- *as the engines had it*: names, bytes and dtype are those that the policy was served in, which the digest of the
  weights says, unless another dtype is asked for.

This module must not know of jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gyre.errors import ConfigError
from gyre.models.adapters import PRINT, A, B, in_file, model_print
from gyre.models.architecture import architecture_of
from gyre.models.safetensors_folder import SafetensorsFolder
from gyre.models.saving import Written, refuse_taken, save_adapter_folder, save_model_folder
from gyre.models.tensor_names import from_names
from gyre.weights.version.manifest import checksum_of_weights
from gyre.workloads.fsdp.checkpoints import DAMAGED, StoredCheckpoint
from gyre.workloads.fsdp.file_names import FileNames
from gyre.workloads.fsdp.formats import ADAPTER
from gyre.workloads.fsdp.lora import merged, peft_config, read_otherwise_by_peft
from gyre.workloads.fsdp.model import build_causal
from gyre.workloads.fsdp.parts import WEIGHT, FsdpPart
from gyre.workloads.fsdp.shards import bit_sum, fingerprint_of, named_tensors
from gyre.workloads.fsdp.token_model import TokenModel
from gyre.workloads.gang.state_files import StateDamaged
from gyre.workloads.learner.errors import CheckpointMismatch, NoPolicy


def export_checkpoint(
    checkpoint: Path, out: Path, *, dtype: str = "", trust: bool = False, adapter: bool = False
) -> dict[str, Any]:
    """Write `out` from the folder `checkpoint`, which holds `actor.json`: its weights, in `dtype` (`float32`: the
    optimizer's own, `bfloat16`, or "" for that in which the policy was served), and of the folder that training began
    with, if it is still there, the tokenizer. Returns `{"step", "tensors", "size_bytes", "dtype"}`.

    An adapter is added to the weights of the folder that training began with, which must be there; with `adapter` it is
    written by itself, in PEFT's layout and in float32. `trust` says nothing here: nothing is unpickled.

    Raises CheckpointMismatch where it is no whole checkpoint of an actor, or its weights are not those that were
    written, and ConfigError where `out` is there or cannot be written, or transformers has no such model.
    """
    refuse_taken(out)
    stored = _opened(checkpoint)
    model, record = stored.metadata.get("model"), stored.metadata.get(ADAPTER)
    if model is None:
        raise NoPolicy.at(checkpoint)
    if adapter:
        if record is None:
            raise ConfigError(
                f"{checkpoint} is of a whole model, and has no adapter.", hint="Export without --adapter."
            )
        return _export_adapter(stored, checkpoint, out)
    said = dtype or model["dtype"]
    kind = getattr(torch, said)
    beside = Path(model["path"]) if model["path"] else None
    weights: FsdpStoredWeights | MergedWeights
    check: Callable[[Path], None] | None = None
    if record is not None:
        weights = MergedWeights(StoredAdapter(stored), model["config"], kind, beside)
        check = weights.refuse_another_base
    else:
        weights = FsdpStoredWeights(stored, model["config"], kind)
        if said == model["dtype"]:
            check = partial(_refuse_others, stored.metadata, checkpoint)
    _refuse_damaged(stored, weights, checkpoint)
    written = save_model_folder(out, model["config"], weights.tensors(), beside=beside, check=check)
    return _told(stored, written, said)


def _export_adapter(stored: StoredCheckpoint, checkpoint: Path, out: Path) -> dict[str, Any]:
    model = stored.metadata["model"]
    found = StoredAdapter(stored)
    _refuse_damaged(stored, found, checkpoint)
    if misread := read_otherwise_by_peft(found.layers, _Model(model["config"]).shapes):
        raise ConfigError(
            f"PEFT would take the adapter's part for {misread[0]}, and {len(misread) - 1} others, for parts of the "
            "model's experts, and leave them out.",
            hint="Export without --adapter, which adds the adapter to the model's weights, or train one whose "
            "config.lora.target_modules have none of these.",
        )
    config = peft_config(stored.metadata[ADAPTER], model["path"])
    if (Path(model["path"]) / "config.json").is_file():  # on the machine that exports, there may be none
        config[PRINT] = model_print(Path(model["path"]))
    written = save_adapter_folder(
        out,
        config,
        {in_file(name): tensor for name, tensor in found.tensors()},
        check=partial(_refuse_others, stored.metadata, checkpoint),
    )
    return _told(stored, written, "float32")


def _told(stored: StoredCheckpoint, written: Written, dtype: str) -> dict[str, Any]:
    return {
        "step": stored.metadata["step"],
        "tensors": written.tensors,
        "size_bytes": written.size_bytes,
        "dtype": dtype,
    }


class _Model:
    """The model of a `config.json` without its memory: its tensors, and their names in files. Raises ConfigError where
    transformers has no such model."""

    def __init__(self, hugging_face_config: dict[str, Any]) -> None:
        model = TokenModel(build_causal(hugging_face_config, "auto"), values=False)
        self.like = named_tensors(model)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.like.items()}
        self.names = FileNames(model.causal, self.shapes)

    def empty(self, name: str, dtype: torch.dtype) -> Tensor:
        """Memory for a tensor: `dtype` is that of parameters."""
        like = self.like[name]
        return torch.empty(like.shape, dtype=dtype if isinstance(like, nn.Parameter) else like.dtype)


class FsdpStoredWeights:
    """The weights in a checkpoint by the names that files have: the model is that of `hugging_face_config`, its
    parameters are given in `dtype`. Raises ConfigError where transformers has no such model."""

    def __init__(
        self, stored: StoredCheckpoint, hugging_face_config: dict[str, Any], dtype: torch.dtype
    ) -> None:
        self._stored = stored
        self._dtype = dtype
        self._model = _Model(hugging_face_config)

    def check(self) -> None:
        """Raises CheckpointMismatch unless the checkpoint has all of the model's tensors, and no others."""
        self._stored.check([_part(name, tensor.to("meta")) for name, tensor in self._model.like.items()])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """One after another, whole, in memory of their own."""
        for bundle in self._model.names.bundles:
            found = {name: self._model.empty(name, self._dtype) for name in bundle.names}
            self._stored.load([_part(name, tensor) for name, tensor in found.items()])
            yield from self._model.names.apart(found).items()


class StoredAdapter:
    """The adapter in a checkpoint. Raises CheckpointMismatch where its record is none."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored
        record = stored.metadata[ADAPTER]
        try:
            self.scale = float(record["alpha"]) / int(record["rank"])
            self.base = str(record["base"])
            self.layers = [str(layer) for layer in record["layers"]]
            self._names = [f"{layer}.{one}" for layer in self.layers for one in (A, B)]
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise CheckpointMismatch(f"it says of its adapter what cannot be: {error!r:.300}") from error

    def check(self) -> None:
        """Raises CheckpointMismatch unless the checkpoint has all of the adapter's tensors, and no others."""
        self._stored.check(
            [_part(name, torch.empty(self._shape(name), device="meta")) for name in self._names]
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each by its own name, in float32."""
        for name in self._names:
            yield name, self.read(name)

    def read(self, name: str) -> Tensor:
        found = torch.empty(self._shape(name))
        self._stored.load([_part(name, found)])
        return found

    def has(self, layer: str) -> bool:
        return f"{layer}.{A}" in self._names

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(name, WEIGHT)


class HeldAdapter:
    """An adapter in memory, by PEFT's names, with what a checkpoint says of it."""

    def __init__(self, named: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        self.scale = record["alpha"] / record["rank"]
        self.base = record["base"]
        self._named = named

    def check(self) -> None:
        """It is whole: it was never in a file."""

    def read(self, name: str) -> Tensor:
        return self._named[in_file(name)]

    def has(self, layer: str) -> bool:
        return in_file(f"{layer}.{A}") in self._named


class MergedWeights:
    """The weights of a model's folder with an adapter added to them, otherwise as `FsdpStoredWeights`. Raises
    ConfigError too where the folder is not there."""

    def __init__(
        self,
        adapter: StoredAdapter | HeldAdapter,
        hugging_face_config: dict[str, Any],
        dtype: torch.dtype,
        folder: Path | None,
    ) -> None:
        self._dtype = dtype
        self._adapter = adapter
        self._model = _Model(hugging_face_config)
        self._base = SafetensorsFolder(folder) if folder is not None and folder.is_dir() else None
        self._folder = folder
        if not self._base:
            raise ConfigError(
                f"The adapter was trained beside the model of {folder}, whose weights are not there.",
                hint="Bring that folder back, or give --adapter for the adapter by itself.",
            )
        self._sums: dict[str, int] = {}

    def check(self) -> None:
        """Raises CheckpointMismatch unless the checkpoint has all of the adapter's tensors, and no others."""
        self._adapter.check()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        assert self._base is not None
        for bundle in self._model.names.bundles:
            own = self._model.names.together({name: self._base(name) for name in bundle.files})
            found = {}
            for name in bundle.names:
                whole = self._model.empty(name, self._dtype).copy_(own[name])
                self._sums[name] = bit_sum(whole)
                found[name] = self._merged(name, own[name], whole)
            yield from self._model.names.apart(found).items()

    def _merged(self, name: str, base: Tensor, whole: Tensor) -> Tensor:
        layer = name.removesuffix(".weight")
        if layer == name or not self._adapter.has(layer):
            return whole
        a, b = (self._adapter.read(f"{layer}.{one}") for one in (A, B))
        return merged(base, a, b, self._adapter.scale, dtype=whole.dtype)

    def refuse_another_base(self, _: Path) -> None:
        """Raises CheckpointMismatch where the weights that were read are not those beside which it was trained."""
        if fingerprint_of(self._sums, self._model.shapes) != self._adapter.base:
            raise CheckpointMismatch(
                f"the adapter was trained beside other weights than {self._folder} has now.",
                hint="Bring back the folder that training began with.",
            )


def _part(name: str, whole: Tensor) -> FsdpPart:
    return FsdpPart(name, WEIGHT, whole, tuple(whole.shape), 0, whole.numel())


def _refuse_damaged(
    stored: StoredCheckpoint, found: FsdpStoredWeights | StoredAdapter | MergedWeights, checkpoint: Path
) -> None:
    """Raises CheckpointMismatch where tensors are missing, or a byte is not what was written."""
    try:
        found.check()
        problem = stored.damage()
    except CheckpointMismatch as error:
        problem = error.message
    if problem:
        raise CheckpointMismatch(f"the checkpoint at {checkpoint} cannot be read: {problem}.", hint=DAMAGED)


def _opened(checkpoint: Path) -> StoredCheckpoint:
    try:
        return StoredCheckpoint(checkpoint)
    except (StateDamaged, CheckpointMismatch) as error:
        raise CheckpointMismatch(
            f"the checkpoint at {checkpoint} cannot be read: {error.message}.", hint=DAMAGED
        ) from error


def _refuse_others(metadata: dict[str, Any], checkpoint: Path, folder: Path) -> None:
    """Raises CheckpointMismatch where the weights in the folder are not those whose digest the checkpoint has. The
    digest is over the small decoder's own names, where it trained that."""
    if not metadata.get("digest"):
        return
    model, found = metadata["model"], SafetensorsFolder(folder).tensors()
    if model["decoder"] and ADAPTER not in metadata:
        found = from_names(found, architecture_of(model["config"], str(checkpoint)))
    if checksum_of_weights(found) != metadata["digest"]:
        raise CheckpointMismatch(f"the weights in {checkpoint} are not those that were written.")
