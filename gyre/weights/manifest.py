"""One version of a policy's weights as a flat buffer and the manifest that describes it.

Invariants:
- *exact bytes*: packing and unpacking give back the same bits, in any dtype;
- *verified before served*: `unpack_weights` reads no tensor of a buffer whose size and checksum are not the
  manifest's;
- *tied tensors once*: names that share storage, shape and strides share their bytes in the buffer.

torch is imported inside functions: whoever only handles manifests does not need it. This module must not know
how a buffer travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from gyre.errors import GyreError

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 16


class WeightMismatch(GyreError):
    """The bytes are not those that the manifest describes, or not for this model."""

    code = "weights.mismatch"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's place in the buffer: `nbytes` from `offset`. `dtype` is torch's name, such as `bfloat16`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Policy `version`, made at optimizer step `step` from version `base` (None for the first).

    `checksum` is the xxh3-128 of the whole buffer in hexadecimal; `size_bytes` is the buffer's length.
    """

    version: int
    base: int | None
    step: int
    tensors: tuple[TensorSpec, ...]
    size_bytes: int
    checksum: str

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, for JSON and msgpack."""
        plain = asdict(self)
        plain["tensors"] = [{**asdict(spec), "shape": list(spec.shape)} for spec in self.tensors]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> WeightManifest:
        """The inverse of `to_dict`. Raises WeightMismatch where fields are missing or unknown."""
        try:
            tensors = tuple(
                TensorSpec(**{**spec, "shape": tuple(int(size) for size in spec["shape"])})
                for spec in plain["tensors"]
            )
            return cls(**{**plain, "tensors": tensors})
        except (KeyError, TypeError) as error:
            raise WeightMismatch(f"this is not a weight manifest: {error}.") from error


def pack_weights(
    state: Mapping[str, torch.Tensor], *, version: int, step: int, base: int | None = None
) -> tuple[WeightManifest, bytes]:
    """The tensors, in the order of their names, as one buffer with its manifest."""
    import torch

    specs: list[TensorSpec] = []
    parts: list[bytes] = []
    placed: dict[tuple[Any, ...], int] = {}
    end = 0
    for name in sorted(state):
        tensor = state[name].detach().cpu()
        nbytes = tensor.numel() * tensor.element_size()
        identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        offset = placed.get(identity) if nbytes else end
        if offset is None:
            padding = -end % _ALIGNMENT
            offset = end + padding
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            parts += [bytes(padding), raw]
            end = offset + nbytes
            if state[name].device.type == "cpu":
                placed[identity] = offset
        specs.append(
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset, nbytes)
        )
    buffer = b"".join(parts)
    manifest = WeightManifest(version, base, step, tuple(specs), len(buffer), _checksum(buffer))
    return manifest, buffer


def verify(manifest: WeightManifest, buffer: bytes | bytearray | memoryview) -> None:
    """Raises WeightMismatch unless `buffer` is, byte for byte, what `manifest` describes."""
    size_bytes = memoryview(buffer).nbytes
    if size_bytes != manifest.size_bytes:
        raise WeightMismatch(
            f"version {manifest.version} came with {size_bytes} bytes, its manifest says {manifest.size_bytes}.",
            hint="Fetch it again.",
        )
    found = _checksum(buffer)
    if found != manifest.checksum:
        raise WeightMismatch(
            f"version {manifest.version} came damaged: checksum {found}, its manifest says {manifest.checksum}.",
            hint="Fetch it again.",
        )
    for spec in manifest.tensors:
        if spec.offset < 0 or spec.nbytes < 0 or spec.offset + spec.nbytes > size_bytes:
            raise WeightMismatch(f"tensor {spec.name} of version {manifest.version} lies outside the buffer.")


def unpack_weights(
    manifest: WeightManifest, buffer: bytes | bytearray | memoryview
) -> dict[str, torch.Tensor]:
    """The tensors by name, after `verify`. They share one copy of the buffer's memory; tied names share bytes."""
    import torch

    verify(manifest, buffer)
    memory = bytearray(buffer)
    tensors: dict[str, torch.Tensor] = {}
    for spec in manifest.tensors:
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightMismatch(f"tensor {spec.name} has dtype {spec.dtype!r}, which torch does not know.")
        count = 1
        for size in spec.shape:
            count *= size
        if count * dtype.itemsize != spec.nbytes:
            raise WeightMismatch(
                f"tensor {spec.name}: {spec.nbytes} bytes do not make {spec.dtype} {spec.shape}."
            )
        if count:
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=spec.offset)
        else:
            flat = torch.empty(0, dtype=dtype)
        tensors[spec.name] = flat.view(spec.shape)
    return tensors


def _checksum(buffer: bytes | bytearray | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(buffer)
