"""A peer of the weight plane, set up by a job's settings: a folder, its server, and its other transports.

The actor and each instance have one. A transport that the settings name must work here, or there is no peer; if `auto`
does without one, receivers report the reason.

Invariants:
- *all or nothing*: a peer that cannot be set up leaves no folder, no socket and no engine;
- *trusted by declaration*: `auto` opens Mooncake's port, which asks nobody for a token, only if the settings declare
  the network trusted; `receiver_networks` alone does not.

This module must not know whether it publishes or fetches.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gyre.config import WeightsSpec, port_range
from gyre.config.plugins import CODEC
from gyre.errors import ConfigError
from gyre.weights.codecs.brought import bring
from gyre.weights.codecs.encoding import Codec
from gyre.weights.owned_dirs import OwnedDir
from gyre.weights.transfer.encryption import Encryption
from gyre.weights.transfer.mooncake import MooncakeEngine, MooncakeMissing, load, memory_of, self_test
from gyre.weights.transfer.protocol import address_towards
from gyre.weights.transfer.receiver import HearsIncidents, Receiver
from gyre.weights.transfer.server import ChunkServer
from gyre.weights.version.arena import Arena

PORT_WITHIN_S = 10.0
"""How long to wait for a port of the settings: its previous owner may still be ending."""

CODECS: dict[str, tuple[Sequence[Codec], Sequence[Codec]]] = {
    "auto": (("none", "delta", "planes"), ()),
    "none": (("none",), ("none",)),
    "delta": (("none", "delta"), ("delta",)),
    "planes": (("none", "planes"), ("planes",)),
    "fp8": (("none", "delta", "fp8"), ("delta", "fp8")),
}
"""By setting: the codecs that a receiver may ask for, and those that it asks for wherever it can, in order of
preference. For weights that are rounded to fp8, deltas are even smaller."""


class WeightPeer:
    """One process's part in the weight plane.

    `root` and `purpose` are those of an OwnedDir, `held` is an Arena's. `url` is the rollout manager's: the peer
    listens on the address that faces it. Raises ConfigError if this machine cannot follow the settings.
    """

    def __init__(
        self, root: Path, purpose: str, token: str, settings: WeightsSpec, *, url: str, held: int = 2
    ) -> None:
        self.settings = settings
        if settings.codec not in CODECS:
            bring(settings.codec, CODEC.load(settings.codec))
        self._token = token
        self.encryption = Encryption() if settings.encrypt else None
        host, reach = where_to_listen(settings.bind, url)
        with contextlib.ExitStack() as undo:
            self._owned = OwnedDir(root, purpose)
            undo.callback(self._owned.close)
            self.arena = Arena(self._owned.path, held=held)
            undo.callback(self.arena.close, remove=False)
            self.server = _listen(
                settings.ports,
                host,
                lambda port: ChunkServer(
                    self.arena,
                    token,
                    host=host,
                    port=port,
                    networks=settings.receiver_networks,
                    stall_s=settings.stall_timeout_s,
                    reach=reach,
                    encryption=self.encryption,
                ),
            )
            undo.callback(self.server.close)
            self.mooncake, self.without = _open_mooncake(settings, reach)  # last: an engine cannot be closed
            undo.pop_all()
        self._receivers: list[Receiver] = []
        self.server.no_memory = self.without.get("mooncake", "")
        if self.mooncake is not None:
            self.server.memory = memory_of(self.mooncake, self.arena)

    def receiver(self, *, give_up_s: float, listener: HearsIncidents | None = None) -> Receiver:
        """A receiver that fetches into this peer's folder and serves others from there."""
        settings = self.settings
        codecs, forced = CODECS.get(settings.codec) or (("none", settings.codec), (settings.codec,))
        receiver = Receiver(
            self.arena,
            self._token,
            server=self.server,
            address=self.server.address,
            streams=settings.streams,
            stall_s=settings.stall_timeout_s,
            give_up_s=give_up_s,
            codecs=codecs,
            forced_codec=forced,
            listener=listener,
            mooncake=self.mooncake,
            transports=settings.transports,
            networks=settings.sender_networks,
            encryption=self.encryption,
        )
        receiver.broken.update(self.without)
        self._receivers.append(receiver)
        return receiver

    def settle(self) -> None:
        """Deregister, after a fetch, the memory of versions that made room from Mooncake."""
        if self.mooncake is not None:
            self.mooncake.keep(view for one in self.arena.all_versions() for _, view in one.mapped())

    def unlink(self) -> None:
        """Remove the folder, because the process is about to be ended; receivers go on. Callable from any thread."""
        self._owned.unlink()

    def close(self, *, keep: bool = False) -> None:
        """Close the peer; with `keep` a successor of the same purpose gets the folder."""
        for receiver in self._receivers:
            receiver.close()
        self.server.close()
        if self.mooncake is not None:
            self.mooncake.keep(())
        self.arena.close(remove=False)
        self._owned.close(keep=keep)


def check_transports(settings: WeightsSpec) -> None:
    """Raises ConfigError if the settings name a transport that this machine does not have."""
    if "mooncake" not in settings.transports:
        return
    try:
        load()
    except MooncakeMissing as error:
        raise ConfigError(
            f"weights.transports: mooncake given, but {error.message}",
            hint=error.hint + " Or leave mooncake out of weights.transports.",
        ) from None


def _open_mooncake(settings: WeightsSpec, reach: str) -> tuple[MooncakeEngine | None, dict[str, str]]:
    """The tested engine, or the reason why there is none. Raises ConfigError if the settings name it."""
    if "mooncake" in settings.transports:
        check_transports(settings)
    elif "auto" not in settings.transports:
        return None, {}
    elif settings.encrypt:
        return None, {"mooncake": "it does not encrypt"}
    elif not settings.trusted_network:
        return None, {"mooncake": "weights.trusted_network does not say that the network is to be trusted"}
    try:
        engine = MooncakeEngine(reach, protocol=settings.mooncake_protocol, device=settings.mooncake_device)
        self_test(engine)
    except MooncakeMissing as error:
        if "mooncake" not in settings.transports:
            return None, {"mooncake": error.message.rstrip(".")}
        raise ConfigError(
            f"weights.transports: mooncake given with weights.mooncake_protocol {settings.mooncake_protocol}, but "
            f"{error.message}",
            hint=error.hint or "Is there such a device? Else take tcp.",
        ) from None
    return engine, {}


def where_to_listen(bind: str, url: str) -> tuple[str, str]:
    """The address to listen on, and the address at which others reach it. Raises ConfigError for a network that this
    machine is not in."""
    if "/" in bind:
        network = ipaddress.ip_network(bind)
        some = str(network[min(1, network.num_addresses - 1)])
        own = address_towards(f"http://[{some}]" if ":" in some else f"http://{some}")
        if ipaddress.ip_address(own) not in network:
            raise ConfigError(
                f"weights.bind: this machine has no address in {bind}; its address on the way there is {own}.",
                hint="Give a network that every machine of the job is in, or leave it out.",
            )
        return own, own
    if bind in ("", "0.0.0.0", "::"):
        own = address_towards(url)
        return bind or own, own
    return bind, bind


def _listen(ports: str, host: str, make: Callable[[int], ChunkServer]) -> ChunkServer:
    first, last = port_range(ports) if ports else (0, 0)
    until = time.monotonic() + PORT_WITHIN_S
    while True:
        for port in range(first, last + 1):
            try:
                return make(port)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise ConfigError(
                        f"weights.bind: this machine has not the address {host}.",
                        hint="Give a network in CIDR notation, or leave it out.",
                    ) from None
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                taken = error
        if time.monotonic() > until or taken.errno == errno.EACCES:
            raise ConfigError(
                f"weights.ports: none of {ports} can be listened on at {host}: {taken.strerror}.",
                hint="The actor and each instance on a machine take one: give a wider range.",
            )
        time.sleep(0.1)
