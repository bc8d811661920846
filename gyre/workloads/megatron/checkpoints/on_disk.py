"""Checkpoints of Megatron's ranks on the disk: written beside the training, loaded in any layout.

A checkpoint is a folder that its owner (the trainer) makes visible by renaming it when all of it is written:

    actor.json           step, trained ids, metrics, the model, its layout, its weights' digest: written last, by the
                         first rank
    rank_00000.state …   what each rank wrote of the state: see `gyre.workloads.gang.state_files`
    rank_00000.json …    what is where in it: see `parts`

Training stands while the state is copied to host memory, which is kept from one checkpoint to the next; then a thread
writes. Where the machine has no room for the copy, training stands until the state is written. The checkpoint of
weights that were just read from a folder, or drawn from the seed, has no weights in it: it says that they are those.

Invariants:
- *written from copies*: what is written is what the state was when the write began, whatever is trained meanwhile;
- *one at a time*: there is one copy, so a write that is not done is waited for, or stopped, before the next begins;
- *last is whole*: `actor.json` is there only when every rank's part is on the disk, and so are the names in the folder;
- *verified before used*: every byte is compared with its checksum before any tensor is changed; all ranks refuse
  together. The digest of the loaded weights is compared with the one that was written besides.

Transformer Engine's and Apex's optimizers have states of their own: with them a checkpoint is Megatron's, as all were
before (`megatron_format`). This module must not know what a step is made of, and must not be imported before
`seam.open_seam`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gyre.workloads.gang.host_buffer import HostBuffer, placed
from gyre.workloads.gang.state_files import StateDamaged, sealed, write_json, write_state
from gyre.workloads.learner.checkpoint_identity import METADATA
from gyre.workloads.learner.devices import page_locked
from gyre.workloads.learner.errors import CheckpointMismatch
from gyre.workloads.megatron.checkpoints import megatron_format
from gyre.workloads.megatron.checkpoints.formats import (
    FORMAT,
    MEGATRONS_FORMAT,
    read_metadata,
    refuse_broken,
)
from gyre.workloads.megatron.checkpoints.parts import (
    AdamState,
    Part,
    parts_of,
    random_parts,
    take_random,
    weights_of,
    written_by,
)
from gyre.workloads.megatron.checkpoints.stored import StoredState, state_path
from gyre.workloads.megatron.model.parallel import Ranks
from gyre.workloads.megatron.policy import MegatronPolicy

_FIRST_MODEL = "first_model"
MOST_RANKS = 1 << 20

Seam = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Copied:
    """Parts of a state in host memory: the bytes that are written one after another, and where in the file each of the
    `parts` begins. `release` says that nobody reads them any more."""

    pieces: Sequence[memoryview]
    parts: Sequence[Part]
    offsets: Sequence[int]
    release: Callable[[], None] = lambda: None


class CheckpointWriter:
    """One checkpoint on its way to the disk. `begin` and `is_written` are collectives of all ranks."""

    def __init__(self, policy: MegatronPolicy, seam: Seam) -> None:
        self._policy = policy
        self._ranks: Ranks = policy.ranks
        self._seam = seam
        pin = partial(page_locked, device=policy.device) if policy.device.type == "cuda" else None
        self._buffer = HostBuffer(pin=pin)
        self._is_prepared = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._finish: Callable[[], None] = lambda: None
        self._release: Callable[[], None] = lambda: None
        self._path = Path()
        self._metadata: dict[str, Any] = {}
        self._digest: Callable[[], str | None] = lambda: None
        self.hold_s = 0.0
        """Seconds that the last checkpoint took of the training's time."""

    def status(self) -> dict[str, Any]:
        """Facts for people: how long the last checkpoint held training up, and why it had to, where it had."""
        trouble = {"trouble": self._buffer.trouble} if self._buffer.trouble else {}
        return {"hold_s": round(self.hold_s, 4), **trouble}

    def prepare(self) -> None:
        """Begin to take the memory for copies, so that the first checkpoint need not wait for it. On a CPU there is
        nothing to be page-locked, and nothing to be gained."""
        if not self._is_prepared and self._policy.device.type == "cuda" and AdamState(self._policy).is_all:
            self._is_prepared = True
            mine = written_by(parts_of(self._policy), self._ranks)
            self._buffer.prepare(placed([part.tensor for part in mine])[1])

    def begin(
        self,
        path: Path,
        metadata: dict[str, Any],
        digest: Callable[[], str | None],
        *,
        is_first_model: bool = False,
        copied: Copied | None = None,
    ) -> None:
        """Copy what is to be written, and start to write it below `path`, which is there and empty. `metadata` is what
        the first rank's `actor.json` will hold, with what `digest` returns: it is called on a thread. The weights of
        the first model are not written. `copied` is this rank's state where it is in host memory already. One at a
        time: who begins another has seen this one written, or has abandoned it."""
        assert self._thread is None, "a checkpoint is being written"
        began = time.monotonic()
        self._path, self._digest, self._error = path, digest, None
        self._finish, self._release = lambda: None, lambda: None
        self._metadata = {"format": FORMAT, **metadata, _FIRST_MODEL: is_first_model}
        self._stop = threading.Event()
        at_once = False
        if is_first_model:
            write = self._state_write(random_parts(self._policy.device), copy=False)
        elif not AdamState(self._policy).is_all:
            self._metadata["format"] = MEGATRONS_FORMAT
            write, self._finish = megatron_format.begin_write(self._policy, self._seam, path)
        elif copied is not None:
            self._release = copied.release
            write = self._file_write(copied.pieces, copied.parts, copied.offsets)
        else:
            write = self._state_write(written_by(parts_of(self._policy), self._ranks), copy=True)
            at_once = bool(self._buffer.trouble)
        self._thread = threading.Thread(
            target=self._write, args=(write,), name="gyre-checkpoint", daemon=True
        )
        self._thread.start()
        if at_once:
            self._thread.join()  # ends with the disk's write; what is written is the state itself
        self.hold_s = time.monotonic() - began

    def _state_write(self, parts: Sequence[Part], *, copy: bool) -> Callable[[], None]:
        """What writes the parts: from a copy, or from themselves, which must then stay as they are."""
        tensors = [part.tensor for part in parts]
        copied = self._buffer.copy(tensors) if copy else None
        if copied is not None:
            return self._file_write([copied[0]], parts, copied[1])
        return self._file_write(_bytes_of(parts), parts, placed(tensors)[0], threads=1)

    def _file_write(
        self,
        pieces: Sequence[memoryview] | Iterator[memoryview],
        parts: Sequence[Part],
        offsets: Sequence[int],
        **options: Any,
    ) -> Callable[[], None]:
        content = {
            "place": self._ranks.tensor_rank,
            "parts": [
                [part.key, part.what, _dtype(part), list(part.shape), part.start, part.end, offset]
                for part, offset in zip(parts, offsets, strict=True)
            ],
        }
        path, stop = state_path(self._path, self._ranks.rank), self._stop
        return lambda: _write_files(path, pieces, content, stop, options)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
            if self._ranks.rank == 0:
                self._metadata["digest"] = self._digest()
        except Exception as error:  # told to whoever asks whether it is written
            self._error = error
        finally:
            self._digest = lambda: None  # it may hold memory that is wanted for the next step's weights
            self._release()

    def is_written(self, *, wait: bool) -> bool:
        """Whether all ranks have written, and the folder is whole. With `wait`, when they have. Raises what went wrong
        on any of them, on all of them."""
        if self._thread is None:
            return True
        if wait:
            self._thread.join()  # ends with the disk's write; the caller's own deadline is above it
        writing, failed = self._ranks.sum([self._thread.is_alive(), self._error is not None])
        if writing:
            return False
        self._thread.join()
        self._thread = None
        if failed:
            raise CheckpointMismatch(
                f"the checkpoint at {self._path} could not be written"
                + (f": {self._error}" if self._error is not None else " by another rank"),
                hint="See whether its disk is full.",
            ) from self._error
        self._finish()
        problem = ""
        if self._ranks.rank == 0:
            try:
                write_json(self._path / METADATA, sealed(self._metadata))
            except OSError as error:
                problem = str(error)
        if self._ranks.sum([float(bool(problem))])[0]:  # nobody says "written" before the first rank has
            raise CheckpointMismatch(
                f"the checkpoint at {self._path} could not be written{problem and ': ' + problem}.",
                hint="See whether its disk is full.",
            )
        return True

    def abandon(self) -> None:
        """Stop a write that nobody waits for. Its folder is not whole, and never will be."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()  # after the chunks that are being written: its memory is needed
            self._thread = None
        self._finish = lambda: None

    def close(self) -> None:
        """Stop what is being written, and give the memory back. Safe to call twice."""
        self.abandon()
        self._buffer.close()


def _write_files(
    path: Path,
    pieces: Sequence[memoryview] | Iterator[memoryview],
    content: dict[str, Any],
    stop: threading.Event,
    options: dict[str, Any],
) -> None:
    """Write a rank's files. A seam for tests, which let it wait."""
    write_state(path, pieces, content, stop=stop, **options)


# -- reading ------------------------------------------------------------------------------------------


def restore(
    policy: MegatronPolicy,
    seam: Seam,
    path: Path,
    *,
    load_first_model: Callable[[], None],
) -> dict[str, Any]:
    """Load weights, optimizer and random state of the checkpoint at `path`, written in whatever layout, and return its
    metadata. Where it is of the first model, `load_first_model` loads that, with an optimizer that knows of no step. A
    collective of all ranks. Raises CheckpointMismatch, on all of them, before anything is changed."""
    metadata = read_metadata(path)
    refuse_broken(path, metadata)
    if metadata["format"] == MEGATRONS_FORMAT:
        megatron_format.restore(policy, seam, path)
        return metadata
    is_first_model = bool(metadata.get(_FIRST_MODEL))
    parts = random_parts(policy.device) if is_first_model else parts_of(policy)
    stored = _verified(policy, path, metadata, parts)
    if is_first_model:
        load_first_model()
    stored.load(parts)
    take_random(parts)
    return metadata


def load_weights(
    policy: MegatronPolicy, seam: Seam, path: Path, *, load_first_model: Callable[[], None]
) -> None:
    """Load the weights of the checkpoint at `path`, written in whatever layout, and nothing else of it: the policy
    need not have an optimizer. A collective of all ranks. Raises CheckpointMismatch as `restore`."""
    metadata = read_metadata(path)
    refuse_broken(path, metadata)
    if metadata["format"] == MEGATRONS_FORMAT:
        megatron_format.load_weights(policy, seam, path)
    elif metadata.get(_FIRST_MODEL):
        load_first_model()
    else:
        parts = weights_of(policy)
        _verified(policy, path, metadata, parts).load(parts)


def _verified(
    policy: MegatronPolicy, path: Path, metadata: dict[str, Any], parts: Sequence[Part]
) -> StoredState:
    """The state at `path`, once its bytes are checked and it has all the parts. If one rank refuses it, all do."""
    ranks: Ranks = policy.ranks
    stored, problem = None, ""
    try:
        rank_count, tensor_parallel = _layout_of(metadata)
        stored = StoredState(
            path,
            rank_count=rank_count,
            tensor_parallel=tensor_parallel,
            ranks=ranks,
            architecture=policy.architecture,
        )
        stored.check(parts)
        problem = stored.problem()
    except StateDamaged as error:
        problem = str(error)
    if ranks.sum([float(bool(problem))])[0] or stored is None:
        raise CheckpointMismatch(
            f"the checkpoint at {path} is damaged: {problem or 'another rank says how'}.",
            hint="Is its disk failing? The checkpoint before it may be whole.",
        )
    return stored


def _layout_of(metadata: dict[str, Any]) -> tuple[int, int]:
    """How many ranks wrote it, and how many of them shared each layer. Raises StateDamaged where it does not say."""
    layout = metadata.get("layout")
    said = layout if isinstance(layout, dict) else {}
    for count in (said.get("ranks"), said.get("tensor_parallel")):
        if type(count) is not int or not 0 < count <= MOST_RANKS:
            raise StateDamaged(f"{METADATA} says that {layout!r:.100} wrote it")
    return int(said["ranks"]), int(said["tensor_parallel"])


# -- small parts --------------------------------------------------------------------------------------


def _bytes_of(parts: Sequence[Part]) -> Iterator[memoryview]:
    """The bytes of one part after another, as they are when they are asked for."""
    import torch

    for part in parts:
        flat = part.tensor.detach().cpu().contiguous().view(-1)
        yield memoryview(flat.view(torch.uint8).numpy().data)


def _dtype(part: Part) -> str:
    return str(part.tensor.dtype).removeprefix("torch.")
