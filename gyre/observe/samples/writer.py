"""The thread that writes the samples of steps: the trainer hands groups over, and goes on.

Invariants:
- *after the ledger*: a step is handed over when it is recorded;
- *never in the way*: handing over takes no time, and a disk that is full, slow or broken ends nothing. What the queue
  has no room for, and what cannot be written, is left out and counted, and said once;
- *whole or absent*: a file has its name when all of it is there;
- *once*: a step that is written again replaces its file, with equal content;
- *the job comes first*: nothing is written where it would leave the disk without room for what the job needs.

This module must not know how a step is made.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gyre.config.spec import SamplesSpec
from gyre.observe.samples.held_out import RIGHT_BY, RIGHT_FROM
from gyre.observe.samples.names import (
    EVALUATED,
    HELD_OUT_FOLDER,
    PARTIAL,
    QUARANTINED,
    TRAINED,
    held_out_file,
    held_out_of,
    quarantined_file,
    step_file,
    step_of,
)
from gyre.observe.samples.texts import Texts
from gyre.rollouts.samples import Group

if TYPE_CHECKING:
    from gyre.observe.samples.table import Advantages, Observed

WAITING_STEPS = 4
"""Steps that may wait to be written: they are kept in memory."""

MOST_DROPPED = 1024
"""Groups that were not trained, of one step, that are kept until the step is written; the newest."""

SPARE_BYTES = 256 << 20
"""Bytes that stay free on the disk, or a quarter of it, if that is less."""

WAITING_SETS = 64
"""Evaluations of held-out sets that may wait to be written beside those steps: all sets of a version end together."""

ROWS_TOGETHER = 512
"""Samples that are read together: a page of a step of thousands does not read all their texts."""

WORTH_PARTS_BYTES = 4 << 20
"""What a smaller table has is read together: to open one more part takes as long."""


Logprobs = Callable[[], Mapping[tuple[int, int], NDArray[np.float32]]]
"""The trainer's own log-probs of a step's samples, float32 `[t]`, by group and sample, as far as they are known. May
take a while; called on the writer's thread."""


@dataclass(frozen=True, slots=True)
class _Step:
    step: int
    observed: tuple[tuple[Group, str, str], ...]
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class _HeldOut:
    step: int
    """The version that answered: the step that made it."""
    set: str
    groups: tuple[Group, ...]
    right_from: float | None
    right_by: str


@dataclass(frozen=True, slots=True)
class _Quarantined:
    step: int
    group: Group
    evidence: str


_Work = _Step | _Quarantined | _HeldOut


class SampleWriter:
    """Writes into `folder`, which it makes. `say` tells people something, once for each kind of problem."""

    def __init__(
        self,
        folder: Path,
        settings: SamplesSpec,
        *,
        texts: Texts | None = None,
        advantages: Advantages = lambda groups: [None] * len(groups),
        say: Callable[[str], None] = lambda text: None,
        spare_bytes: int = SPARE_BYTES,
    ) -> None:
        self.written = 0
        """Files that were written."""
        self.left_out = 0
        """Files that were not: the queue was full, or the disk would not take them."""
        self._folder = folder
        self._settings = settings
        self._texts = texts or Texts()
        self._advantages = advantages
        self._say = say
        self._spare_bytes = spare_bytes
        self._said: set[str] = set()
        self._untrained: deque[tuple[Group, str, str]] = deque(maxlen=MOST_DROPPED)
        self._queue: queue.Queue[_Work | None] = queue.Queue()
        self._room = {
            kind: threading.Semaphore(count)
            for kind, count in (
                (_Step, WAITING_STEPS),
                (_Quarantined, WAITING_STEPS),
                (_HeldOut, WAITING_SETS),
            )
        }
        """For how many more of each kind the queue has room."""
        self._sizes: dict[int, int] = {}
        """The bytes of each step that is there."""
        self._held_out: dict[str, dict[int, int]] = {}
        """The bytes of each version that is there, by the set."""
        self._kept_bytes = 0
        """Those of files that are never given up."""
        self._earlier: list[_Step] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    # -- the trainer's side ---------------------------------------------------------------------------

    def begin(self, earlier: Mapping[int, Sequence[Group]] | None = None) -> None:
        """Start the thread. `earlier` are steps that an earlier trainer recorded, and may have died before it wrote
        them: those that are not there are written now."""
        for step, groups in (earlier or {}).items():
            if self.wants(step) and not (self._folder / step_file(step)).exists():
                chosen = groups[: self._settings.groups]
                self._earlier.append(_Step(step, tuple((group, TRAINED, "") for group in chosen)))
        self._thread = threading.Thread(target=self._run, name="gyre-samples", daemon=True)
        self._thread.start()

    def not_trained(self, group: Group, outcome: str, evidence: str = "") -> None:
        """A group of samples will not be trained: it is kept with the step that is being made."""
        self._untrained.append((group, outcome, evidence))

    def quarantined(self, step: int, group: Group, evidence: str) -> None:
        """A group is quarantined while `step` is being made: it is written now, whatever the settings."""
        self._put(_Quarantined(step, group, evidence))

    def step_recorded(
        self, step: int, groups: Sequence[Group], outcome: str = TRAINED, *, logprobs: Logprobs | None = None
    ) -> None:
        """The ledger has the step. Its groups must not change any more."""
        untrained, self._untrained = tuple(self._untrained), deque(maxlen=MOST_DROPPED)
        if self.wants(step):
            most = self._settings.groups
            chosen = [*((group, outcome, "") for group in groups[:most]), *untrained[:most]]
            self._put(_Step(step, tuple(chosen), logprobs))

    def evaluated(
        self,
        version: int,
        name: str,
        groups: Sequence[Group],
        *,
        right_from: float | None = None,
        right_by: str = "",
    ) -> None:
        """A version's answers to the held-out set of this name are scored; the first of them are kept. A group's id is
        its place in the set. `right_from`: the reward from which on an answer is right; or `right_by`: the number
        beside the reward, `reward.NAME`, that says it."""
        if self._settings.every and self._settings.held_out != 0:
            self._put(_HeldOut(version, name, tuple(groups[: self._settings.held_out]), right_from, right_by))

    def end(self, *, within_s: float) -> bool:
        """Let the thread end when it has written what waits. Whether it has within this time."""
        if self._thread is None:
            return True
        self._ended.set()
        self._queue.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def wants(self, step: int) -> bool:
        """Whether the step is to be kept."""
        every = self._settings.every
        return every > 0 and (step == 1 or step % every == 0)

    def _put(self, work: _Work) -> None:
        if self._room[type(work)].acquire(blocking=False):
            self._queue.put(work)
        else:
            self.left_out += 1
            self._tell(
                "slow",
                f"the samples of {_named(work)} are not kept: writing them takes longer than making steps. "
                "observe.samples.every or groups asks for fewer.",
            )

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(ImportError):  # the first file says it
            importlib.import_module("gyre.observe.samples.table")  # slow: now, and not when there are samples
        self._look()
        for step in self._earlier:
            self._try(step)
        self._earlier.clear()
        while not (self._ended.is_set() and self._queue.empty()):
            if (work := self._queue.get()) is None:
                return
            self._room[type(work)].release()
            self._try(work)
            self._queue.task_done()

    def _try(self, work: _Work) -> None:
        try:
            self._write(work)
            self.written += 1
        except Exception as error:  # whatever it is, the job goes on without its samples
            self.left_out += 1
            why = str(error) if isinstance(error, OSError) else repr(error)
            kind = f"{type(error).__name__} {getattr(error, 'errno', '')}"
            self._tell(kind, f"the samples of {_named(work)} are not kept: {why}. Training goes on.")

    def _look(self) -> None:
        """See what earlier trainers wrote, and remove what they left half written."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder):
                if entry.name == HELD_OUT_FOLDER:
                    self._look_at_held_out()
                elif entry.name.endswith(PARTIAL):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                elif (step := step_of(entry.name)) is not None:
                    self._sizes[step] = entry.stat().st_size
                else:
                    self._kept_bytes += entry.stat().st_size

    def _look_at_held_out(self) -> None:
        """Raises OSError."""
        for entry in os.scandir(self._folder / HELD_OUT_FOLDER):
            if entry.name.endswith(PARTIAL):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
            elif (found := held_out_of(entry.name)) is not None:
                self._held_out.setdefault(found[0], {})[found[1]] = entry.stat().st_size

    def _write(self, work: _Work) -> None:
        from gyre.observe.samples.table import Observed

        if isinstance(work, _Quarantined):
            of = [Observed(work.group, QUARANTINED, work.evidence)]
            self._kept_bytes += self._write_file(quarantined_file(work.group.id), work.step, of)
            return
        if isinstance(work, _HeldOut):
            self._write_held_out(work)
            return
        observed = [Observed(*one) for one in work.observed]
        observed.sort(
            key=lambda one: one.group.id
        )  # a stable order: trained ones before others of their number
        logprobs = work.logprobs() if work.logprobs is not None else {}
        self._sizes[work.step] = self._write_file(step_file(work.step), work.step, observed, logprobs)
        self._thin()

    def _write_held_out(self, work: _HeldOut) -> None:
        from gyre.observe.samples.table import Observed

        told = {} if work.right_from is None else {RIGHT_FROM: repr(work.right_from)}
        told |= {RIGHT_BY: work.right_by} if work.right_by else {}
        self._make_folder()
        (self._folder / HELD_OUT_FOLDER).mkdir(mode=0o700, exist_ok=True)
        name = f"{HELD_OUT_FOLDER}/{held_out_file(work.set, work.step)}"
        observed = [Observed(group, EVALUATED) for group in work.groups]
        versions = self._held_out.setdefault(work.set, {})
        versions[work.step] = self._write_file(name, work.step, observed, metadata=told)
        most = self._settings.held_out_versions
        for version in given_up(dict.fromkeys(versions, 1), most, newest=max(1, most // 2)):
            with contextlib.suppress(OSError):
                (self._folder / HELD_OUT_FOLDER / held_out_file(work.set, version)).unlink(missing_ok=True)
            del versions[version]
        self._thin()

    def _make_folder(self) -> None:
        """In a job's directory, which is there while the job is. Raises OSError."""
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def _write_file(
        self,
        name: str,
        step: int,
        observed: Iterable[Observed],
        logprobs: Mapping[tuple[int, int], NDArray[np.float32]] = MappingProxyType({}),
        *,
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> int:
        """Write the file and return its size. Raises OSError."""
        import pyarrow as pa

        from gyre.observe.samples.table import table_of

        table = table_of(step, observed, self._texts, self._advantages, logprobs)
        if metadata:
            table = table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata})
        if self._texts.problem:
            self._tell("text", f"some samples have no text: {self._texts.problem}")
        self._make_folder()
        self._check_room(table.nbytes)
        path = self._folder / name
        partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
        try:
            write_table(table, partial)
            size = partial.stat().st_size
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        finally:
            del table
            pa.default_memory_pool().release_unused()
        return size

    def _check_room(self, needed: int) -> None:
        """Raises OSError where the disk has no room beside what the job needs. `needed` is before compression."""
        usage = shutil.disk_usage(self._folder)
        spare = min(self._spare_bytes, usage.total // 4)
        if usage.free - needed < spare:
            raise OSError(
                f"{self._folder} has {usage.free >> 20} MiB left, and samples leave {spare >> 20} MiB to the job"
            )

    def _thin(self) -> None:
        held_out = sum(sum(versions.values()) for versions in self._held_out.values())
        for step in given_up(self._sizes, self._settings.at_most_bytes - self._kept_bytes - held_out):
            with contextlib.suppress(OSError):
                (self._folder / step_file(step)).unlink(missing_ok=True)
            del self._sizes[step]

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)


def _named(work: _Work) -> str:
    if isinstance(work, _HeldOut):
        return f"version {work.step} of the held-out set {work.set}"
    return f"step {work.step}"


def write_table(table: Any, path: Path) -> None:
    """Write a step's samples as Parquet, with what filters and sorts of them at the file's end. Raises OSError."""
    import pyarrow.parquet as pq

    from gyre.observe.samples.narrow import KEY, narrow_of, packed
    from gyre.observe.samples.table import TEXTS

    rows = ROWS_TOGETHER if table.nbytes > WORTH_PARTS_BYTES else max(table.num_rows, 1)
    with pq.ParquetWriter(
        path,
        table.schema,
        compression="zstd",
        use_dictionary=list(TEXTS),
        write_statistics=["step", "group", "sample", "outcome", "reward", "tokens"],
    ) as file:
        file.write_table(table, row_group_size=rows)
        file.add_key_value_metadata({KEY: packed(narrow_of(table, None))})


NEWEST_KEPT = 50
"""Steps at the end of the run that are kept, however large they are."""


def given_up(sizes: Mapping[int, int], at_most_bytes: int, *, newest: int = NEWEST_KEPT) -> list[int]:
    """The steps to give up so that the rest takes at most so many bytes, in the order in which they go. `sizes` are the
    bytes of each step that is there. The rest takes more where the steps that are never given up do: the first and the
    newest.

    Of the old steps first every second is kept, then every fourth, and so on, the oldest first: a long run keeps a view
    of all of it, and the dense one of what it does now. A step goes before one whose number can be halved more often,
    so that what is left is spread evenly whatever was given up before.
    """
    steps = sorted(sizes)
    excess = sum(sizes.values()) - at_most_bytes
    candidates = steps[1 : max(1, len(steps) - newest)]
    found: list[int] = []
    for step in sorted(candidates, key=lambda step: (_halvings(step), step)):
        if excess <= 0:
            break
        found.append(step)
        excess -= sizes[step]
    return found


def _halvings(step: int) -> int:
    """How often the number can be halved: 0 if it is odd."""
    return (step & -step).bit_length() - 1 if step else 64
