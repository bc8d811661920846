"""One version of a policy's weights: which files, which tensors where in them, and the checksums of every chunk.

A version is a folder in Hugging Face's layout. Its tensors are in one safetensors file, whose header is a function of
names, dtypes and shapes alone: every version of a model has its tensors at the same places.

Invariants:
- *exact bytes*: packing and unpacking give back the same bits, in any dtype;
- *verified before served*: nothing reads a tensor of bytes whose size and checksums are not the manifest's;
- *tied tensors once*: names that share storage, shape and strides share their bytes in the file;
- *aligned without holes*: tensors stand in the order of the largest power of two, up to 256, that divides their size,
  so that each starts at a multiple of it, and safetensors (which permits no holes) reads the file as it is.

torch is imported inside functions: whoever only handles manifests does not need it. This module must not know how
bytes travel or where they lie.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from gyre.errors import GyreError

if TYPE_CHECKING:
    import torch
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

ALIGNMENT = 256

CHUNK_BYTES = 64 << 20
"""The unit of transfer, of verification and of retry."""

TENSOR_FILE = "model.safetensors"

MANIFEST = "gyre.json"
"""The file of a version that describes the others."""

MOST = 2**63 - 1
"""The largest number of a manifest."""

MOST_DIMENSIONS = 64
"""Of a tensor, as torch has it."""

DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
"""torch's name: safetensors' name and the element's bytes."""


class WeightMismatch(GyreError):
    """The bytes are not those that the manifest describes, or not for this model."""

    code = "weights.mismatch"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's place in the tensor file: `nbytes` from `offset`. `dtype` is torch's name, such as `bfloat16`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileSpec:
    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk `index` of a version: `nbytes` from `offset` of file number `file`, with xxh3-64 `digest` in hex."""

    index: int
    file: int
    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Policy `version`, made at optimizer step `step` from version `base` (None for the first).

    `digests` has the xxh3-64 of each chunk of `chunk_bytes` (a file's last chunk may be shorter), in the order of the
    files. `checksum` covers all bytes of the version: it is the xxh3-128 of sizes and digests, in hexadecimal.
    """

    version: int
    base: int | None
    step: int
    tensors: tuple[TensorSpec, ...]
    files: tuple[FileSpec, ...]
    chunk_bytes: int
    digests: tuple[str, ...]
    checksum: str

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def chunks(self) -> list[Chunk]:
        return list(cut(self.files, self.chunk_bytes, self.digests))

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, for JSON and msgpack."""
        plain = asdict(self)
        plain["tensors"] = [{**asdict(spec), "shape": list(spec.shape)} for spec in self.tensors]
        plain["files"] = [asdict(file) for file in self.files]
        plain["digests"] = list(self.digests)
        plain["size_bytes"] = self.size_bytes  # told with it, for those who only report
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> WeightManifest:
        """The inverse of `to_dict`. Raises WeightMismatch where fields are missing, unknown or of another type, a file
        has no plain name, or the checksum is not that of what is listed."""
        try:
            tensors = tuple(
                TensorSpec(**{**spec, "shape": tuple(int(size) for size in spec["shape"])})
                for spec in plain["tensors"]
            )
            files = tuple(FileSpec(str(file["name"]), int(file["size_bytes"])) for file in plain["files"])
            digests = tuple(str(digest) for digest in plain["digests"])
            fields = {key: value for key, value in plain.items() if key != "size_bytes"}
            made = cls(**{**fields, "tensors": tensors, "files": files, "digests": digests})
            _check_numbers(made)
            for spec in tensors:
                _check(spec, max((file.size_bytes for file in files if file.name == TENSOR_FILE), default=0))
            expected = sum(-(-file.size_bytes // made.chunk_bytes) for file in files)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WeightMismatch(f"this is not a weight manifest: {error}.") from error
        names = [file.name for file in files]
        if any(not is_plain(name) for name in names) or len(set(names)) != len(names):
            raise WeightMismatch(f"this is not a weight manifest: it names the files {names}.")
        if len(digests) != expected or made.checksum != checksum_of(files, made.chunk_bytes, digests):
            raise WeightMismatch(f"the manifest of version {made.version} does not have its own checksum.")
        return made


def _check_numbers(manifest: WeightManifest) -> None:
    """Raises ValueError where a number is none, or larger than a file system or a journal has room for."""
    base = manifest.base if manifest.base is not None else 0
    numbers = (manifest.version, base, manifest.step, manifest.chunk_bytes, manifest.size_bytes)
    if any(type(number) is not int or abs(number) > MOST for number in numbers):
        raise ValueError(f"its numbers are {numbers!r:.200}")
    if manifest.chunk_bytes < 1 or any(file.size_bytes < 0 for file in manifest.files):
        raise ValueError("a size is negative")


def _check(spec: TensorSpec, file_bytes: int) -> None:
    """Raises ValueError where a tensor's bytes are not what its shape and dtype say, or not within their file."""
    numbers = (*spec.shape, spec.offset, spec.nbytes)
    if type(spec.name) is not str or len(spec.shape) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(spec.shape)} dimensions is called {spec.name!r:.100}")
    if spec.dtype not in DTYPES or any(
        type(number) is not int or not 0 <= number <= MOST for number in numbers
    ):
        raise ValueError(f"tensor {spec.name!r} is {spec.shape} of {spec.dtype!r} at {spec.offset!r}")
    if spec.nbytes != math.prod(spec.shape) * DTYPES[spec.dtype][1] or spec.offset + spec.nbytes > file_bytes:
        raise ValueError(f"tensor {spec.name!r} has {spec.nbytes} bytes at {spec.offset} of {file_bytes}")


def is_plain(name: str) -> bool:
    """Whether this names a file in the folder itself, that nothing else of the folder is called."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    is_taken = name.startswith(".") or name == MANIFEST
    return bool(name) and not is_taken and "/" not in name and "\0" not in name and len(encoded) < 200


def cut(files: Sequence[FileSpec], chunk_bytes: int, digests: Sequence[str] | None = None) -> Iterator[Chunk]:
    """The chunks of these files in order; their digests are empty where none are given."""
    index = 0
    for number, file in enumerate(files):
        for offset in range(0, file.size_bytes, chunk_bytes):
            nbytes = min(chunk_bytes, file.size_bytes - offset)
            yield Chunk(index, number, offset, nbytes, digests[index] if digests is not None else "")
            index += 1


def checksum_of(files: Sequence[FileSpec], chunk_bytes: int, digests: Sequence[str]) -> str:
    listed = json.dumps([[file.name, file.size_bytes] for file in files] + [chunk_bytes, *digests])
    return xxhash.xxh3_128_hexdigest(listed.encode())


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors of a model stand in its tensor file: `header` is the file's first bytes."""

    tensors: tuple[TensorSpec, ...]
    header: bytes
    size_bytes: int

    @classmethod
    def plan(
        cls,
        shapes: Mapping[str, tuple[str, tuple[int, ...]]],
        tied: Mapping[str, str] | None = None,
    ) -> Layout:
        """`shapes` gives each name's dtype and shape; `tied` names that have no bytes of their own, and whose they
        have. Raises WeightMismatch for a dtype that safetensors has no name for."""
        sizes: dict[str, int] = {}
        for name, (dtype, shape) in shapes.items():
            if dtype not in DTYPES:
                raise WeightMismatch(f"tensor {name} has dtype {dtype}, which safetensors has no name for.")
            sizes[name] = math.prod(shape) * DTYPES[dtype][1]
        order = sorted(sizes, key=lambda name: (-_alignment(sizes[name]), name))
        entries: dict[str, Any] = {}
        starts: dict[str, int] = {}
        end = 0
        for name in order:
            dtype, shape = shapes[name]
            starts[name], begin = end, end
            end += sizes[name]
            entries[name] = {"dtype": DTYPES[dtype][0], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        owner = {**{name: name for name in shapes}, **dict(tied or {})}
        tensors = tuple(
            TensorSpec(name, shapes[own][1], shapes[own][0], len(header) + starts[own], sizes[own])
            for name, own in sorted(owner.items())
        )
        return cls(tensors, header, len(header) + end)

    def spec(self, name: str) -> TensorSpec:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise WeightMismatch(f"the model has no tensor {name}.")


def _alignment(nbytes: int) -> int:
    return min(ALIGNMENT, nbytes & -nbytes) if nbytes else ALIGNMENT


def layout_of(
    state: Mapping[str, torch.Tensor], *, floats: str | None = None
) -> tuple[Layout, dict[str, torch.Tensor]]:
    """The layout of these tensors, floating point ones as `floats` (None: as they are), and those that have bytes of
    their own, by name."""
    owners: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    own: dict[str, torch.Tensor] = {}
    for name in sorted(state):
        tensor = state[name]
        identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and identity in owners:
            tied[name] = owners[identity]
            continue
        owners[identity] = name
        own[name] = tensor
    shapes = {
        name: (
            floats if floats is not None and tensor.is_floating_point() else dtype_name(tensor),
            tuple(tensor.shape),
        )
        for name, tensor in own.items()
    }
    return Layout.plan(shapes, tied), own


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def pack_weights(
    state: Mapping[str, torch.Tensor], *, version: int, step: int, base: int | None = None
) -> tuple[WeightManifest, bytes]:
    """The tensors as the bytes of a safetensors file, with its manifest. They are copied once, and may be changed when
    this returns."""
    import torch

    layout, own = layout_of(state)
    parts: list[bytes | memoryview] = [layout.header]
    for spec in sorted(layout.tensors, key=lambda spec: spec.offset):
        if spec.name in own and spec.nbytes:
            parts.append(own[spec.name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    buffer = b"".join(parts)
    files = (FileSpec(TENSOR_FILE, layout.size_bytes),)
    return describe(files, [buffer], version=version, step=step, base=base, tensors=layout.tensors), buffer


def checksum_of_weights(state: Mapping[str, torch.Tensor]) -> str:
    """The checksum of the version that `pack_weights` makes of these tensors. They are not copied, and hashing lets
    other threads of the process run."""
    layout, own = layout_of(state)
    return _checksum(layout, own, own.__getitem__)


def checksum_of_read(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]], read: Callable[[str], torch.Tensor]
) -> str:
    """As `checksum_of_weights`, of tensors of which none is another's, by name: `shapes` gives the dtype and the shape
    of each, and `read` the tensor, which nobody keeps."""
    return _checksum(Layout.plan(shapes), shapes, read)


def _checksum(layout: Layout, own: Container[str], read: Callable[[str], torch.Tensor]) -> str:
    import torch

    digests: list[str] = []
    hasher, room = xxhash.xxh3_64(), CHUNK_BYTES

    def add(view: memoryview) -> None:
        nonlocal hasher, room
        while len(view):
            hasher.update(view[:room])
            view, room = view[room:], max(0, room - len(view))
            if not room:
                digests.append(hasher.hexdigest())
                hasher, room = xxhash.xxh3_64(), CHUNK_BYTES

    add(memoryview(layout.header))
    for spec in sorted(layout.tensors, key=lambda spec: spec.offset):
        if spec.name in own and spec.nbytes:
            flat = read(spec.name).detach().cpu().contiguous().view(-1)
            add(memoryview(flat.view(torch.uint8).numpy().data))
    if room < CHUNK_BYTES:
        digests.append(hasher.hexdigest())
    return checksum_of((FileSpec(TENSOR_FILE, layout.size_bytes),), CHUNK_BYTES, digests)


def describe(
    files: Sequence[FileSpec],
    contents: Sequence[bytes | bytearray | memoryview],
    *,
    version: int,
    step: int,
    base: int | None = None,
    tensors: Sequence[TensorSpec] = (),
    chunk_bytes: int = CHUNK_BYTES,
) -> WeightManifest:
    """The manifest of files with these contents."""
    views = [memoryview(content) for content in contents]
    digests = tuple(
        xxhash.xxh3_64_hexdigest(views[chunk.file][chunk.offset : chunk.offset + chunk.nbytes])
        for chunk in cut(files, chunk_bytes)
    )
    checksum = checksum_of(files, chunk_bytes, digests)
    return WeightManifest(version, base, step, tuple(tensors), tuple(files), chunk_bytes, digests, checksum)


def verify(manifest: WeightManifest, buffer: bytes | bytearray | memoryview) -> None:
    """Raises WeightMismatch unless `buffer`, the files one after the other, is what `manifest` describes."""
    view = memoryview(buffer)
    if view.nbytes != manifest.size_bytes:
        raise WeightMismatch(
            f"version {manifest.version} came with {view.nbytes} bytes, its manifest says {manifest.size_bytes}.",
            hint="Fetch it again.",
        )
    at = 0
    for chunk in manifest.chunks():
        found = xxhash.xxh3_64_hexdigest(view[at : at + chunk.nbytes])
        at += chunk.nbytes
        if found != chunk.digest:
            raise WeightMismatch(
                f"version {manifest.version} came damaged: chunk {chunk.index} has checksum {found}, its manifest "
                f"says {chunk.digest}.",
                hint="Fetch it again.",
            )


def unpack_weights(
    manifest: WeightManifest, buffer: bytes | bytearray | memoryview
) -> dict[str, torch.Tensor]:
    """The tensors by name, after `verify`; `buffer` starts with the tensor file. They share one copy of its memory;
    tied names share bytes."""
    import torch

    verify(manifest, buffer)
    memory = bytearray(buffer)
    tensors: dict[str, torch.Tensor] = {}
    for spec in manifest.tensors:
        if spec.offset < 0 or spec.nbytes < 0 or spec.offset + spec.nbytes > len(memory):
            raise WeightMismatch(f"tensor {spec.name} of version {manifest.version} lies outside the buffer.")
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightMismatch(f"tensor {spec.name} has dtype {spec.dtype!r}, which torch does not know.")
        count = math.prod(spec.shape)
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


MOST_THREADS = 8
"""And a quarter of the cores: the machine has other work. Four copy and hash 13 GB/s while a trainer and an engine use
the memory, too."""


def hashing_threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores // 4))


def first_wrong(
    chunks: Iterable[Chunk], is_right: Callable[[Chunk], bool], *, threads: int | None = None
) -> Chunk | None:
    """The first of `chunks` that is not right; None where all are. `is_right` is called on `threads` threads.

    One core hashes some seven gigabytes a second while nothing else uses the memory: half a second of a version of
    3.4 GB, for the publisher as for each receiver, before anybody serves it.
    """
    threads = threads or hashing_threads()
    if threads == 1:
        return next((chunk for chunk in chunks if not is_right(chunk)), None)
    every: Sequence[Chunk] = list(chunks)
    with ThreadPoolExecutor(threads, thread_name_prefix="gyre-hash") as pool:
        answers = zip(every, pool.map(is_right, every), strict=True)
        return next((chunk for chunk, right in answers if not right), None)
