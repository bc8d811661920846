"""Publishing at the door: a folder on the manager's machine, or a source on the weight plane, becomes a version.

The manager has a part in the weight plane for folders: it links the version's files into a folder of its own and serves
their chunks, so that instances on other machines find them. A publisher that serves its versions itself is told what a
peer of the plane needs, and has the manager dial it first.

Invariants:
- *published means durable*: `publish` returns after the commit that holds the version;
- *one number, one policy*: the same number with other bytes is refused; the same again is answered as the first time.

This module must not know about HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from gyre.config import WeightsSpec
from gyre.errors import GyreError
from gyre.request_body import refused
from gyre.rollouts.manager.door.words import ModelWords, words_of
from gyre.rollouts.plane.settings import Tokenizer
from gyre.rollouts.plane.versions import PolicyVersions
from gyre.rollouts.protocol.codec import checked
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import Publish
from gyre.rollouts.weight_peer import WeightPeer
from gyre.weights.owned_dirs import default_root
from gyre.weights.transfer.address import is_address, parse_address
from gyre.weights.transfer.chunk_transports import Source, TcpTransport
from gyre.weights.transfer.encryption import Encryption
from gyre.weights.transfer.protocol import is_allowed
from gyre.weights.version.manifest import MANIFEST
from gyre.weights.version.model_folder import ModelFolder, list_model_folder

SERVE_WITHIN_S = 600.0
"""For linking or copying a version's files."""

DURABLE_WITHIN_S = 60.0
"""For the commit; a full disk is waited for longer, and then the client asks again."""

DIAL_WITHIN_S = 5.0
"""For a source to answer the manager: it is asked for one manifest, and has nothing else to do."""

MOST_SOURCES = 16
"""That are dialled for one publish."""

_KEYS = frozenset({"version", "path", "checksum", "sources", "model", "dial"})


class PlaneKey:
    """What a peer of the weight plane needs: `key` is the weights key, `weights` the plane's settings. Who has it may
    fetch every version, and serve what its checksum proves; a `publish` key decides what all instances load anyway."""

    def __init__(self, key: str, weights: WeightsSpec) -> None:
        self._key, self._weights = key, weights
        self._encryption = Encryption() if weights.encrypt else None

    def told(self) -> dict[str, Any]:
        return {"key": self._key, "weights": self._weights.model_dump(mode="json")}

    def dial(self, sources: Sequence[str], checksum: str) -> str:
        """Why nobody at these addresses serves the version: "" where one does."""
        found = []
        for source in sources:
            if not (why := self._why_not(source, checksum)):
                return ""
            found.append(f"{source} {why}")
        return "; ".join(found)

    def _why_not(self, source: str, checksum: str) -> str:
        try:
            if not is_allowed(parse_address(source).host, self._weights.sender_networks):
                return "is in none of weights.sender_networks"
        except ValueError:  # a name, whose address is not known before it is dialled
            return "is no IP address, and weights.sender_networks has networks"
        until = time.monotonic() + DIAL_WITHIN_S
        transport = TcpTransport(
            source,
            self._key,
            stall_s=DIAL_WITHIN_S,
            abandoned=lambda: time.monotonic() > until,
            encryption=self._encryption,
        )
        try:
            reply = transport.ask({"op": "manifest", "checksum": checksum})
        except (OSError, GyreError, ValueError) as error:  # whatever it says instead of an answer
            return f"does not answer the manager: {str(error)[:200] or type(error).__name__}"
        finally:
            transport.close()
        return "" if reply.get("status") == "ok" else "has no version with this checksum"


class FolderServer:
    """The manager's part in the weight plane, made with the first folder. `key` is the weights key, `url` where the
    manager listens."""

    def __init__(self, purpose: str, key: str, weights: WeightsSpec, *, root: Path | None = None) -> None:
        self._purpose, self._key, self._weights = purpose, key, weights
        self._root = root or default_root()
        self._peer: WeightPeer | None = None

    def serve(self, folder: ModelFolder, url: str) -> str:
        """Serve the folder's chunks; returns the address, host:port. Raises GyreError and OSError."""
        if self._peer is None:
            self._peer = WeightPeer(self._root, self._purpose, self._key, self._weights, url=url)
        receiver = self._peer.receiver(give_up_s=SERVE_WITHIN_S)
        receiver.fetch(
            folder.manifest,
            lambda: [Source("", str(folder.path))],
            serving=None,
            superseded=lambda: False,
            verify_links=False,
        )
        self._peer.settle()
        return self._peer.server.address

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()


class TakesVersions(Protocol):
    def take(self, frame: Publish, model: str) -> None:
        """Publish this version of the policy of `model`, a fingerprint. Raises FrameError."""


class Publishing:
    """What a client publishes is taken by `owner`; `server` serves folders, None where that is left to shared disks.
    `plane` is for publishers that serve their versions themselves.
    `context_length` bounds what the model takes, None for its own limit. What is published lies below one of
    `folders`, unless there are none."""

    def __init__(
        self,
        versions: PolicyVersions,
        owner: TakesVersions,
        *,
        server: FolderServer | None = None,
        plane: PlaneKey | None = None,
        tokenizer: Tokenizer | None = None,
        context_length: int | None = None,
        folders: Sequence[Path] = (),
    ) -> None:
        self.words = ModelWords((), context_length, tokenizer)
        """Of the newest version whose folder could be read."""
        self.url = ""
        self._versions = versions
        self._owner = owner
        self._server = server
        self._plane = plane
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._folders = folders
        self._turn = asyncio.Lock()
        """Publishes one after another."""
        self._committed = asyncio.Event()

    def committed(self) -> None:
        """A batch is in the ledger."""
        self._committed.set()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def again(self) -> None:
        """After a restart: serve the newest version's folder, if it is there still, from where this manager listens."""
        newest = self._versions.published
        if newest is None or not newest.local_path:
            return
        with contextlib.suppress(
            GyreError, OSError, ValueError
        ):  # instances have it, or a newer one is published
            folder = await asyncio.to_thread(ModelFolder.read, Path(newest.local_path))
            if folder.checksum == newest.checksum:
                await self._publish_folder(folder, newest.version)

    async def publish(self, told: Any) -> dict[str, Any]:
        """Publish what a client says: `version`, and `path`, or `checksum` and `sources`. Raises RequestRefused."""
        if not isinstance(told, dict):
            raise refused(422, "invalid", "Expected an object with version, and path or sources.")
        if strange := sorted(told.keys() - _KEYS):
            raise refused(
                422, "invalid", f"{strange[0][:60]!r} is not known; known are {', '.join(sorted(_KEYS))}."
            )
        version, path = told.get("version"), told.get("path")
        if type(version) is not int or not 0 <= version < 2**31:
            raise refused(422, "invalid", f"version: {version!r:.60} given, expected a number from 0.")
        async with self._turn:
            self._check_newer(version)
            if path is not None:
                checksum = await self._of_folder(version, path, told)
            else:
                checksum = await self._of_sources(version, told)
            await self._durable(version)
        return {"version": version, "checksum": checksum}

    def _check_newer(self, version: int) -> None:
        if version < self._versions.newest:
            raise refused(
                409,
                "policy_old",
                f"Version {version} is older than {self._versions.newest}, which is published.",
            )

    async def _of_folder(self, version: int, path: Any, told: dict[str, Any]) -> str:
        if not isinstance(path, str) or not path.startswith("/") or "\0" in path or len(path) > 4096:
            raise refused(422, "invalid", f"path: {path!r:.60} given, expected an absolute path.")
        if told.get("sources") or told.get("checksum"):
            raise refused(422, "invalid", "Expected path, or checksum and sources, not both.")
        return await self.publish_folder(version, Path(path))

    async def publish_folder(self, version: int, path: Path) -> str:
        """Publish a folder in Hugging Face's layout, and return its checksum. Raises RequestRefused."""
        try:
            folder = await asyncio.to_thread(_listed, path, version, self._folders)
        except (GyreError, OSError, ValueError) as error:
            raise refused(
                422,
                "no_policy",
                f"{path} cannot be published: {str(error)[:500]}",
                "Expected a folder with config.json and safetensors that the manager may read, and write gyre.json to.",
            ) from None
        await self._publish_folder(folder, version)
        return folder.checksum

    async def _publish_folder(self, folder: ModelFolder, version: int) -> None:
        """Raises RequestRefused."""
        sources = []
        if self._server is not None:
            try:
                sources = [await asyncio.to_thread(self._server.serve, folder, self.url)]
            except (GyreError, OSError, ValueError) as error:
                raise refused(
                    500, "not_served", f"{folder.path} cannot be served: {str(error)[:500]}", "Try it again."
                ) from None
        self._check_newer(version)
        self._offer(version, folder.checksum, str(folder.path), sources, folder.fingerprint())
        self.learn(folder.path)

    async def _of_sources(self, version: int, told: dict[str, Any]) -> str:
        sources, checksum = told.get("sources"), told.get("checksum")
        if not sources or not isinstance(checksum, str):
            raise refused(422, "invalid", "Expected path, or checksum and sources (a list of host:port).")
        if told.get("dial"):
            await self._dial(sources, checksum)
            self._check_newer(version)
        self._offer(version, checksum, "", sources, told.get("model", ""))
        return checksum

    async def _dial(self, sources: Any, checksum: str) -> None:
        """Raises RequestRefused where no source has the version for the manager."""
        if self._plane is None:
            raise refused(422, "unsupported", "This manager dials no sources.", "Leave dial out.")
        if not isinstance(sources, list) or len(sources) > MOST_SOURCES or not all(map(is_address, sources)):
            raise refused(422, "invalid", f"sources: expected at most {MOST_SOURCES} of host:port.")
        if why := await asyncio.to_thread(self._plane.dial, sources, checksum):
            raise refused(
                422,
                "not_reachable",
                f"No source can be fetched from: {why}.",
                "Is the publisher's address the one that instances reach? weights.bind says where it listens.",
            )

    def plane(self) -> dict[str, Any]:
        """What a publisher needs to serve its versions itself. Raises RequestRefused."""
        if self._plane is None:
            raise refused(422, "unsupported", "This manager has no weight plane for publishers.")
        return self._plane.told()

    def _offer(self, version: int, checksum: str, path: str, sources: Any, model: Any) -> None:
        """Raises RequestRefused."""
        try:
            frame = checked(
                Publish, version=version, checksum=checksum, path=path, sources=sources, model=model
            )
            self._owner.take(frame, frame.model)
        except FrameError as error:
            status = 409 if error.details.get("reason") == "checksum" else 422
            raise refused(status, "policy_refused", error.message) from None

    def learn(self, folder: Path) -> None:
        """Read what the folder says of the model."""
        found = words_of(folder, self._tokenizer)
        known = [one for one in (found.positions, self._context_length) if one is not None]
        self.words = ModelWords(found.stops, min(known, default=None), self._tokenizer)

    async def _durable(self, version: int) -> None:
        """Raises RequestRefused where the commit does not come in time."""
        try:
            async with asyncio.timeout(DURABLE_WITHIN_S):
                while self._versions.durable < version:
                    self._committed.clear()
                    await self._committed.wait()
        except TimeoutError:
            raise refused(
                504, "unfinished", f"Version {version} is not in the ledger yet.", "Ask again."
            ) from None


def _listed(path: Path, version: int, below: Sequence[Path]) -> ModelFolder:
    """The folder with a manifest of what it has now. Raises OSError, and ValueError where it is no model's, or not
    below."""
    if below:
        _check_below(path, below)
    if not (path / "config.json").is_file():
        raise ValueError("it has no config.json")
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ValueError("its config.json has no object of JSON")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ValueError("it has no safetensors")
    if missing := [file.name for file in weights if not file.is_file()]:
        raise ValueError(f"{missing[0]} is no file")
    if (path / MANIFEST).is_symlink():  # writing it would write elsewhere
        raise ValueError(f"its {MANIFEST} is a link")
    return list_model_folder(path, version=version)


def _check_below(path: Path, folders: Sequence[Path]) -> None:
    """Raises ValueError where the folder or one of its files lies elsewhere, links followed."""
    roots = [folder.resolve() for folder in folders]
    for one in (path, *path.iterdir()):
        if not any(one.resolve().is_relative_to(root) for root in roots):
            where = ", ".join(map(str, folders))
            raise ValueError(f"{one} is not below {where} (rollouts.door.policy_folders)")
