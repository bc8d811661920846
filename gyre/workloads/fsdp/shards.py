"""This rank's shards of a model's tensors: taken from whole tensors, and gathered to whole ones.

A rank has consecutive rows of each parameter, and all of each buffer.

Invariants:
- *one bundle at a time*: beside the shards, never more than the tensors that are converted together are whole;
- *all of it or nothing*: `load` changes no tensor before all ranks have read all of theirs.

This module must not know about steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from gyre.models.errors import ModelFolderError
from gyre.models.finite import is_finite, refuse_not_finite
from gyre.models.safetensors_files import ANOTHER_MODEL
from gyre.models.safetensors_folder import TensorSource
from gyre.models.tensor_names import is_harmless
from gyre.weights.version.manifest import WeightMismatch
from gyre.workloads.fsdp.file_names import FileNames, TensorBundle
from gyre.workloads.fsdp.ranks import FsdpRanks
from gyre.workloads.fsdp.token_model import TokenModel

_OF_CAUSAL = "causal."
_OF_ADAPTERS = (".lora_A", ".lora_B")


class TensorNames(Protocol):
    """Both ways between tensors' own names and those in files: see `FileNames`."""

    bundles: list[TensorBundle]

    def apart(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def together(self, files: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class Shards:
    """Of a `model` before it is sharded. `bind` once it is."""

    def __init__(self, model: TokenModel, ranks: FsdpRanks) -> None:
        self._ranks = ranks
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self.named(model).items()}
        self._names = self.file_names(model)
        self._passed_over: list[str] = list(model.causal._keys_to_ignore_on_load_unexpected or ())
        self.tensors: dict[str, Any] = {}
        """Parameters and persistent buffers by the model's own names, tied ones once."""
        self.rank = ranks.rank

    @staticmethod
    def named(model: TokenModel) -> dict[str, Any]:
        """Those of the model's tensors that these are shards of, by their own names."""
        return named_tensors(model)

    def file_names(self, model: TokenModel) -> TensorNames:
        """Their names in files."""
        return FileNames(model.causal, self._shapes)

    def bind(self, model: TokenModel) -> None:
        self.tensors = self.named(model)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole tensors, by their own names."""
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._shapes[name]

    def local(self, name: str) -> Tensor:
        """What this rank has of a tensor: the memory itself."""
        return local_of(self.tensors[name])

    def rows(self, name: str) -> tuple[int, int]:
        """Which rows of the whole tensor this rank has."""
        count = self._shapes[name][0] if self._shapes[name] else 0
        if not _is_sharded(self.tensors[name]):
            return 0, count
        size = -(-count // self._ranks.world_size)
        start = min(self._ranks.rank * size, count)
        return start, min(start + size, count)

    def refuse_unknown(self, held: Collection[str]) -> None:
        """Raises WeightMismatch where files hold a tensor that the model does not have, and that transformers, too,
        would not pass over."""
        wanted = {name for bundle in self._names.bundles for name in bundle.files}
        passed_over = [re.compile(one) for one in self._passed_over]
        unknown = sorted(
            name
            for name in set(held) - wanted
            if not is_harmless(name, wanted) and not any(one.search(name) for one in passed_over)
        )
        if unknown:
            raise WeightMismatch(
                f"the folder holds {len(unknown)} tensors that its model does not have, {unknown[0]} among them.",
                hint=ANOTHER_MODEL,
            )

    # -- in --------------------------------------------------------------------------------------------

    def take_first(self, source: TensorSource) -> None:
        """Fill the shards, which have nothing yet. Raises as `load`. A call of all ranks."""
        problem: WeightMismatch | ModelFolderError | None = None
        try:
            for name, mine in self._read(source):
                self._copy(name, mine)
            refuse_not_finite([name for name in self.tensors if not is_finite(self.local(name))])
        except (WeightMismatch, ModelFolderError) as error:
            problem = error
        self._refuse_together(problem)

    def load(self, source: TensorSource) -> None:
        """Replace the shards. Raises WeightMismatch or ModelFolderError, also for what is not finite, on all ranks
        together, and then nothing has changed. A call of all ranks."""
        taken: dict[str, Tensor] = {}
        problem: WeightMismatch | ModelFolderError | None = None
        try:
            taken = {name: mine.clone() for name, mine in self._read(source)}
            refuse_not_finite([name for name, mine in taken.items() if not is_finite(mine)])
        except (WeightMismatch, ModelFolderError) as error:
            problem = error
        self._refuse_together(problem)
        for name, mine in taken.items():
            self._copy(name, mine)

    def _refuse_together(self, problem: WeightMismatch | ModelFolderError | None) -> None:
        if self._ranks.any(problem is not None):
            raise problem or WeightMismatch("another rank cannot take the weights; its log says why.")

    def _read(self, source: TensorSource) -> Iterator[tuple[str, Tensor]]:
        """Every tensor's name with this rank's rows of it; they may be views of a whole one."""
        for bundle in self._names.bundles:
            files = {name: _checked(source, name, shape) for name, shape in bundle.files.items()}
            for name, whole in self._names.together(files).items():
                if tuple(whole.shape) != self._shapes[name]:
                    raise WeightMismatch(
                        f"{name}, made of {', '.join(bundle.files)}, would be {tuple(whole.shape)}, the model's is "
                        f"{self._shapes[name]}."
                    )
                start, end = self.rows(name)
                yield name, whole[start:end] if whole.ndim else whole

    def _copy(self, name: str, mine: Tensor) -> None:
        with torch.no_grad():
            self.local(name).copy_(mine)

    # -- out -------------------------------------------------------------------------------------------

    def gathered(
        self, dtype: torch.dtype, *, change: Callable[[str, Tensor], Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors by the names in files, parameters in `dtype`, on the device, on the first rank; nothing on
        others. A later step may change them. `change` makes another whole tensor of one by its own name, on every rank.
        A call of all ranks: each exhausts it."""
        for bundle in self._names.bundles:
            whole = {name: self._whole(name, dtype) for name in bundle.names}
            if change is not None:
                whole = {name: change(name, one) for name, one in whole.items()}
            if self._ranks.rank == 0:
                for name, one in self._names.apart(whole).items():
                    yield name, one.contiguous()

    def _whole(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor: Any = self.tensors[name].detach()
        if not _is_sharded(tensor):
            whole: Tensor = tensor
        elif self._ranks.world_size == 1:
            whole = local_of(tensor).to(dtype)
        else:
            whole = tensor.to(dtype).full_tensor()
        return whole

    def fingerprint(self) -> str:
        """Of the tensors, rounded to bfloat16: the same in every layout. A call of all ranks."""
        mine = {
            name: bit_sum(self.local(name))
            for name in self.tensors
            if _is_sharded(self.tensors[name]) or self.rank == 0
        }
        everybodys = [json.loads(blob) for blob in self._ranks.exchange(json.dumps(mine).encode())]
        sums = {name: sum(one.get(name, 0) for one in everybodys) for name in self.tensors}
        return fingerprint_of(sums, self._shapes)


def bit_sum(tensor: Tensor) -> int:
    """The sum of the elements' bits in bfloat16, which does not depend on their order."""
    return int(tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).sum(dtype=torch.int64))


def fingerprint_of(sums: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Of tensors by their own names, from the `bit_sum` of each."""
    told = [[name, list(shapes[name]), sums[name]] for name in sorted(sums)]
    return xxhash.xxh3_128_hexdigest(json.dumps(told).encode())


def local_of(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor: the memory itself."""
    with torch.no_grad():  # else each of a DTensor's calls goes through autograd
        local: Tensor = tensor.to_local() if _is_sharded(tensor) else tensor
        return local.detach()


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")


def named_tensors(model: TokenModel, *, adapter: bool = False) -> dict[str, Any]:
    """Parameters and persistent buffers by the names that they have in the causal model; the value head's by its own.
    With `adapter` those of its adapter, and else all others."""
    found: dict[str, Any] = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True).keys()
    found |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {
        name.removeprefix(_OF_CAUSAL): tensor
        for name, tensor in found.items()
        if name.endswith(_OF_ADAPTERS) == adapter
    }


def _checked(source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
    try:
        tensor = source(name)
    except KeyError as error:
        raise WeightMismatch(f"there is no tensor {name}.", hint=ANOTHER_MODEL) from error
    if tuple(tensor.shape) != shape:
        raise WeightMismatch(
            f"tensor {name} is {tuple(tensor.shape)}, the model's is {shape}.", hint=ANOTHER_MODEL
        )
    return tensor
