"""Loader of new weights into a generating engine, which is paused only while they are copied.

A version is a folder in Hugging Face's layout that the engine's processes can read (in `/dev/shm`, say). In an SGLang
that Gyre started, Gyre's own loader (`path/gyre_weight_loader.py`) runs in each rank:

1. `prepare`, while the engine generates: each rank maps the files, verifies them, and brings tensors near its model;
2. pause, `begin_weight_update` if the engine has it, the copy, `end_weight_update`;
3. each rank reports the outcome; only then does the engine get the version's name, and go on.

Other engines, and versions that the loader cannot load, use `update_weights_from_disk` in the same pause.

Invariants:
- *the same tensors*: a version that lacks a tensor of the engine's model, or has one of another shape, is refused
  before anything stops: loading it would leave a mixture, and some mixtures kill SGLang;
- *whole or the old one*: if a copy fails, the whole version is read from the disk; if that is refused too, the previous
  version is; if that fails, the error says that nobody knows what the engine serves;
- *no prefix of older weights*: `cache_key` changes with each pause, and requests with different keys share no KV cache.
  With `keep=False` running requests are put back and every cached prefix is dropped, or nothing is loaded.

This module must not know about samples, or who publishes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gyre.engines.dialect import PauseMode
from gyre.engines.errors import EngineError, EngineRefused
from gyre.engines.http_client import EngineClient
from gyre.models.architecture import read_config
from gyre.models.errors import ModelFolderError
from gyre.models.safetensors_files import weight_files
from gyre.weights.version.manifest import DTYPES, WeightManifest, WeightMismatch

LISTING = "gyre.json"

LOADER = "gyre_weight_loader.load"
"""The loader that SGLang imports, from the folder `LOADER_PATH` on its PYTHONPATH."""

LOADER_PATH = Path(__file__).with_name("path")

LOADER_KEY = "GYRE_WEIGHT_LOADER"
LOADER_TURNS = "GYRE_KEEPS_TURNS"

NO_LOADER = "the engine was started without a weight loader"
"""Why versions are read from the disk where nothing else was meant."""

Stage = Literal["auto", "device", "pinned", "host"]
"""Where `prepare` brings a version: into the device's memory (`auto`: if there is room), into page-locked host memory,
or nowhere."""

_NOTHING = base64.b64encode(b"\x80\x04].").decode()
"""A pickled empty list, which SGLang wants as tensors. The loader learns over its own socket what to load."""

_FLUSHES = 3
"""Attempts to flush the cache before the load is given up: a request may come in between."""

_TORCH_DTYPES = {saved: name for name, (saved, _) in DTYPES.items()}
"""Torch's name of a dtype, by safetensors' name."""


@dataclass(frozen=True, slots=True)
class LoadableVersion:
    """A version on this machine, as the loader's messages describe it.

    `files` are absolute paths. A tensor is (name, torch's dtype, shape, number of its file, offset, bytes); a chunk is
    (number of its file, offset, bytes, checksum): xxh3-64 or xxh3-128 in hexadecimal.
    """

    path: Path
    files: tuple[str, ...]
    tensors: tuple[tuple[str, str, tuple[int, ...], int, int, int], ...]
    chunks: tuple[tuple[int, int, int, str], ...]
    tied: bool

    @classmethod
    def read(cls, path: Path, manifest: WeightManifest | None = None) -> LoadableVersion:
        """The version in `path`, with the checksums of `manifest`, else those of its `gyre.json`, else none. Raises
        WeightMismatch if the folder holds no version."""
        try:
            files = weight_files(path)
            if not files:
                raise ValueError("it has no safetensors file")
            tensors = [
                (entry.name, _TORCH_DTYPES[entry.dtype], entry.shape, number, entry.offset, entry.size_bytes)
                for number, entries in enumerate(files.values())
                for entry in entries
            ]
            numbers = {file.name: number for number, file in enumerate(files)}
            chunks = _chunks_of(manifest, numbers) if manifest is not None else _listed(path, numbers)
            config = read_config(path)
        except (ModelFolderError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise WeightMismatch(f"{path} holds no weights that can be loaded: {error}.") from error
        names = tuple(str(file.absolute()) for file in files)
        return cls(path, names, tuple(tensors), tuple(chunks), bool(config.get("tie_word_embeddings")))

    def message(self) -> dict[str, Any]:
        return {"files": self.files, "tensors": self.tensors, "chunks": self.chunks}

    def require(self, served: LoadableVersion) -> None:
        """Raises WeightMismatch unless this version can replace all tensors of `served`."""
        mine, theirs = self._shapes(), served._shapes()
        for what, names in (("lacks", theirs.keys() - mine.keys()), ("has", mine.keys() - theirs.keys())):
            if names:
                raise WeightMismatch(
                    f"{self.path} {what} {len(names)} tensors that the engine's own weights "
                    f"{'have' if what == 'lacks' else 'lack'}: {', '.join(sorted(names)[:3])} …",
                    hint="It must be a version of the model that the engine was started with.",
                )
        for name, shape in mine.items():
            if shape != theirs[name]:
                raise WeightMismatch(
                    f"{self.path} has {name} as {list(shape)}, and the engine has it as {list(theirs[name])}.",
                    hint="It must be a version of the model that the engine was started with.",
                )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that models load: without older files' buffers, and without a tied output layer."""
        return {
            name: shape
            for name, _, shape, *_ in self.tensors
            if "rotary_emb.inv_freq" not in name and not (self.tied and name == "lm_head.weight")
        }


def _chunks_of(manifest: WeightManifest, numbers: Mapping[str, int]) -> list[tuple[int, int, int, str]]:
    """The chunks of the files that hold tensors."""
    return [
        (numbers[name], chunk.offset, chunk.nbytes, chunk.digest)
        for chunk in manifest.chunks()
        if (name := manifest.files[chunk.file].name) in numbers
    ]


def _listed(path: Path, numbers: Mapping[str, int]) -> list[tuple[int, int, int, str]]:
    try:
        listing = json.loads((path / LISTING).read_text())
    except FileNotFoundError:
        return []
    if "digests" in listing:
        return _chunks_of(WeightManifest.from_dict(listing), numbers)
    return [
        (numbers[file["name"]], 0, file["size_bytes"], file["checksum"])
        for file in listing["files"]
        if file["name"] in numbers
    ]


@dataclass(slots=True)
class LoadReport:
    """How a version was loaded into an engine. Times are in seconds, those of the slowest rank."""

    version: str
    how: Literal["loader", "disk", "adapter"] = "disk"
    why_disk: str = ""
    """Why the loader was not used, or how it failed."""
    stage: str = ""
    note: str = ""
    """Why the version was brought no nearer than `stage`, if something failed."""
    size_bytes: int = 0
    map_s: float = 0.0
    verify_s: float = 0.0
    """Time to verify; 0 if the copying pass verified it."""
    pin_s: float = 0.0
    copy_s: float = 0.0
    """Time to copy to the device's memory."""
    prepare_s: float = 0.0
    """Time before the pause, while the engine generates, as the agent saw it."""
    load_s: float = 0.0
    """Time of the loader alone, by the engine's own clock."""
    pause_s: float = 0.0
    """From the request for the pause to the reply to its end: the engine is paused for less than this."""
    steps_s: dict[str, float] = field(default_factory=dict)
    """Time of each request during the pause."""

    def row(self) -> dict[str, Any]:
        return asdict(self)


class EngineLoader:
    """Loads versions into the engine behind `client`, which serves the model in `serves`.

    `key` is the loader's (`EngineCommand.loader_key`), "" for an engine that has none. One load at a time.
    """

    def __init__(
        self,
        client: EngineClient,
        serves: Path,
        *,
        key: str = "",
        stage: Stage = "auto",
        prepare_within_s: float = 600.0,
    ) -> None:
        """`prepare_within_s` covers the checksums and the copy to the device of one version."""
        self.why_not = "" if key else NO_LOADER
        """Why the loader is not used; "" while it is."""
        self._client = client
        self._key = key
        self._serves = serves
        self._loaded = self._read(serves, None) if serves.is_dir() else None
        self.stage = stage
        self._within_s = prepare_within_s
        self._ranks = 0
        self._has_sessions = False
        self._pauses = 0

    @property
    def cache_key(self) -> str:
        """The `GenerateRequest.cache_key` that requests must have from now on."""
        return str(self._pauses)

    async def arm(self) -> bool:
        """Make the ranks' loaders listen. Call it once, before the engine has work: it would wait for running requests.

        Returns False, and sets `why_not`, if that cannot be; versions are then read from disk. Raises EngineError if
        the engine died.
        """
        if self.why_not:
            return False
        try:
            info = await self._client.info()
            if info.replicas > 1 or info.nodes > 1 or info.drafts:
                raise _NoLoader("it loads one replica, of one model, on one machine")
            self._ranks = info.ranks
            self._has_sessions = await self._client.begin_weight_update()
            try:
                await self._copy()
            finally:
                if self._has_sessions:
                    await self._client.end_weight_update()
            await self._ask({"op": "hello"}, 10.0)
        except (EngineRefused, _NoLoader) as error:
            self.why_not = str(error)
        return not self.why_not

    async def load(
        self,
        version: str,
        folder: Path,
        manifest: WeightManifest | None = None,
        *,
        keep: bool = True,
        call_off: Callable[[], Awaitable[None]] | None = None,
        changed: Callable[[Mapping[str, int] | None], None] = lambda made: None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> LoadReport:
        """Serve the version in `folder`, which nobody may change meanwhile. Its bytes are compared with their checksums
        by the ranks' loaders, or by `check()`, where there is one and the engine is to read the folder itself.

        `changed` is called in the pause, when the weights are, or may be, the new ones. Its argument has, by request
        id, the number of tokens that older weights made; it is None if the engine cannot tell.

        With `keep` running requests go on as they are. Otherwise they are put back into the queue and computed anew,
        with nothing cached; if the engine cannot do that (SGLang 0.5.17 flushes no cache while requests wait),
        `call_off` must end all running requests.

        Raises what `check` does, WeightMismatch and EngineRefused if the engine goes on with its earlier version, and
        another EngineError if nobody knows what it serves now.
        """
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(None, self._read, folder, manifest)
        if found is not None and self._loaded is not None:
            found.require(self._loaded)
        report = LoadReport(version, why_disk=self.why_not)
        if found is not None and not self.why_not:
            await self._prepare(found, report)
        if report.how != "loader" and check is not None:
            await check()
        async with self._paused(report, keep=keep, call_off=call_off):
            if report.how == "loader":
                await self._by_loader(version, folder, report, changed)
            else:
                changed(None)
                await self._from_disk(version, folder, report)
        self._serves, self._loaded = folder, found
        return report

    def _read(self, path: Path, manifest: WeightManifest | None) -> LoadableVersion | None:
        """The version in `path`; None if Gyre cannot read it, and perhaps the engine can."""
        try:
            return LoadableVersion.read(path, manifest)
        except WeightMismatch:
            if self._key:
                raise
            return None

    # -- before the pause -----------------------------------------------------------------------------

    async def _prepare(self, found: LoadableVersion, report: LoadReport) -> None:
        """Prepare the version in all ranks. Raises WeightMismatch if a rank found other bytes than the manifest's. If a
        rank cannot map it at all, it is read from disk later."""
        began = time.perf_counter()
        asked = {"op": "prepare", "version": report.version, "slot": found.message(), "stage": self.stage}
        try:
            answers = await self._ask(asked, self._within_s)
        except _NoLoader as error:
            report.why_disk = str(error)
            return
        refused = [answer for answer in answers if not answer["ok"]]
        if refused:
            with contextlib.suppress(_NoLoader):
                await self._ask({"op": "forget"}, 10.0)
            report.why_disk = refused[0]["error"]
            wrong = [answer["error"] for answer in refused if answer["wrong"]]
            if wrong:
                raise WeightMismatch(f"The engine did not take version {report.version}: {wrong[0]}")
            return
        report.prepare_s = time.perf_counter() - began
        report.how, report.stage = "loader", answers[0]["stage"]
        report.size_bytes = answers[0]["size_bytes"]
        report.note = next((answer["note"] for answer in answers if answer["note"]), "")
        for name in ("map_s", "verify_s", "pin_s", "copy_s"):
            setattr(report, name, max(answer[name] for answer in answers))

    # -- in the pause ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _paused(
        self, report: LoadReport, *, keep: bool, call_off: Callable[[], Awaitable[None]] | None
    ) -> AsyncIterator[None]:
        began = time.perf_counter()
        self._pauses += 1
        async with _timed(report.steps_s, "pause"):
            await self._client.pause(PauseMode.IN_PLACE if keep else PauseMode.RETRACT)
        try:
            if not keep:
                async with _timed(report.steps_s, "flush"):
                    await self._flush(call_off)
            yield
        except (EngineRefused, WeightMismatch):
            await self._client.resume()  # the engine goes on with its earlier version
            raise
        async with _timed(report.steps_s, "resume"):
            await self._client.resume()
        report.pause_s = time.perf_counter() - began

    async def _flush(self, call_off: Callable[[], Awaitable[None]] | None) -> None:
        for turn in range(_FLUSHES):
            try:
                await self._client.flush_cache()
                return
            except EngineRefused:
                if turn == _FLUSHES - 1 or call_off is None:
                    raise
            await self._client.resume()
            await call_off()
            await self._client.pause(PauseMode.RETRACT)

    async def _by_loader(
        self,
        version: str,
        path: Path,
        report: LoadReport,
        changed: Callable[[Mapping[str, int] | None], None],
    ) -> None:
        try:
            if self._has_sessions:
                async with _timed(report.steps_s, "begin"):
                    await self._client.begin_weight_update()
            try:
                async with _timed(report.steps_s, "copy"):
                    await self._copy()
            finally:
                if self._has_sessions:
                    async with _timed(report.steps_s, "end"):
                        await self._client.end_weight_update()
            async with _timed(report.steps_s, "outcome"):
                outcomes = await self._ask({"op": "outcome"}, 10.0)
            broken = [outcome["error"] for outcome in outcomes if not outcome["ok"]]
        except (EngineRefused, _NoLoader) as error:
            outcomes, broken = [], [str(error)]
        changed(outcomes[0]["made"] if not broken else None)
        if broken:
            report.how, report.why_disk = "disk", broken[0]
            await self._from_disk(version, path, report)
            return
        report.load_s = max(outcome["load_s"] for outcome in outcomes)
        async with _timed(report.steps_s, "label"):
            await self._client.name_weights(version)

    async def _copy(self) -> None:
        await self._client.update_weights_from_tensor([_NOTHING] * self._ranks, load_format=LOADER)

    async def _from_disk(self, version: str, path: Path, report: LoadReport) -> None:
        """Load the whole version from disk, or the previous one if it is refused, so that no mixture is served."""
        try:
            async with _timed(report.steps_s, "disk"):
                await self._client.update_weights_from_disk(path, version, flush_cache=False)
        except EngineRefused as error:
            if not self._key:
                raise  # this engine promises to keep its earlier version
            try:
                before = (await self._client.info()).weight_version
                await self._client.update_weights_from_disk(self._serves, before, flush_cache=False)
            except EngineError as second:
                raise EngineError(
                    f"The engine took neither version {version} ({error}) nor the previous one ({second}).",
                    hint="Start it anew: it may serve parts of both.",
                ) from error
            raise

    # -- the ranks' loaders ---------------------------------------------------------------------------

    async def _ask(self, what: dict[str, Any], within_s: float) -> list[dict[str, Any]]:
        """The answers of all ranks, in their order. Raises _NoLoader if one does not answer."""
        line = json.dumps(what).encode() + b"\n"
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.gather(*(self._ask_rank(rank, line) for rank in range(self._ranks)))
        except TimeoutError:
            raise _NoLoader(
                f"the engine's weight loader did not answer {what['op']!r} within {within_s:g} s"
            ) from None

    async def _ask_rank(self, rank: int, line: bytes) -> dict[str, Any]:
        try:
            connection = _connected(f"\0gyre-{self._key}-{rank}")
            reader, writer = await asyncio.open_unix_connection(sock=connection, limit=1 << 20)
            try:
                writer.write(line)
                await writer.drain()
                answer = json.loads(await reader.readline())
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        except (OSError, ValueError) as error:
            raise _NoLoader(f"rank {rank} of the engine has no weight loader: {error}") from error
        return dict(answer)


class _NoLoader(Exception):
    """The loader cannot be used; the disk can."""


@contextlib.asynccontextmanager
async def _timed(steps_s: dict[str, float], name: str) -> AsyncIterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        steps_s[name] = steps_s.get(name, 0.0) + time.perf_counter() - began


def _connected(name: str) -> socket.socket:
    """A socket that is connected to this abstract name. Not every event loop can (uvloop), and the kernel does it at
    once or refuses. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(1.0)  # a listener whose queue is full
        connection.connect(name)
        connection.setblocking(False)
    except OSError:
        connection.close()
        raise
    return connection
