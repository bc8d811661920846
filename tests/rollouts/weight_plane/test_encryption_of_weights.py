"""With `weights.encrypt` nothing travels in clear, and nobody in between goes unnoticed."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest

from gyre.config import WeightsSpec
from gyre.errors import Unauthorized
from gyre.rollouts.protocol.frames import Loaded, LoadFailed
from gyre.weights.transfer.protocol import TLS_BLOCK, Stalled, dial
from tests.rollouts.weight_plane.far_instance import CONFIG, TOKEN, Make, policy
from tests.waits import GENEROUS_S


async def test_with_encryption_nothing_goes_in_clear(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    said = bytearray()
    plane = far(encrypt=True, codec="none")
    address = plane.source.address

    class Tap:
        """Stands between the two and reads."""

        def __init__(self) -> None:
            import threading

            self.listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
            threading.Thread(target=self.accept, daemon=True).start()

        def accept(self) -> None:
            import threading

            while True:
                try:
                    theirs, _ = self.listener.accept()
                except OSError:
                    return
                host, _, port = address.rpartition(":")
                ours = socket.create_connection((host, int(port)))
                for one, other in ((theirs, ours), (ours, theirs)):
                    threading.Thread(target=self.pass_on, args=(one, other), daemon=True).start()

        def pass_on(self, one: socket.socket, other: socket.socket) -> None:
            try:
                while data := one.recv(1 << 16):
                    said.extend(data)
                    other.sendall(data)
            except OSError:
                pass
            for side in (one, other):
                side.close()

    tap = Tap()
    monkeypatch.setattr(plane.source.server, "address", tap.address)
    try:
        loaded = await plane.load(1)
        assert isinstance(loaded, Loaded)
        content = (plane.folders[-1] / "model.safetensors").read_bytes()
        assert len(said) > len(content)
        assert b"gyre-weights" not in said
        assert b"safetensors" not in said
        assert content[-4096:-2048] not in said
    finally:
        tap.listener.close()


async def test_an_end_that_encrypts_says_nothing_to_one_that_does_not(far: Make) -> None:
    plane = far(encrypt=True)
    plane.source.publish(policy(1), CONFIG, version=1, step=1)
    with pytest.raises((Stalled, OSError)):
        dial(plane.source.address, TOKEN, stall_s=0.3)


async def test_an_instance_that_encrypts_takes_nothing_in_clear(far: Make) -> None:
    plane = far(WeightsSpec(encrypt=True), gives_up_s=0.5)
    failed = await plane.load(1)
    assert isinstance(failed, LoadFailed)
    assert plane.source.server.sent_bytes == 0


async def test_what_is_encrypted_goes_in_small_blocks_so_that_a_slow_link_is_seen_to_move(
    far: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A send over TLS ends when all of it has gone, and counts as standing still until then."""
    sizes: list[int] = []
    send = ssl.SSLSocket.send

    def spy(link: ssl.SSLSocket, data: Any, flags: int = 0) -> int:
        sizes.append(len(data))
        return send(link, data, flags)

    monkeypatch.setattr(ssl.SSLSocket, "send", spy)
    loaded = await far(encrypt=True, codec="none", stall_timeout_s=60.0).load(1)
    assert isinstance(loaded, Loaded)
    assert sum(sizes) > 800_000
    assert max(sizes) <= TLS_BLOCK


def test_a_process_in_between_without_the_token_is_noticed() -> None:
    """It shows either end a certificate of its own, and passes on what they prove to each other."""
    import threading

    from gyre.weights.transfer.encryption import Encryption
    from gyre.weights.transfer.protocol import receive_caller

    source, receiver, between = Encryption(), Encryption(), Encryption()
    outcome: list[str] = []

    def accept(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        link, _ = listener.accept()
        try:
            serve(link)
        except (Unauthorized, OSError) as error:
            outcome.append(type(error).__name__)

    def in_between(link: socket.socket) -> None:
        theirs = between.accept(link, 5.0)
        ours = between.dial(socket.create_connection(real.getsockname()), 5.0)
        try:
            theirs.sendall(ours.recv(4096))  # the real source's hello
            ours.sendall(theirs.recv(4096))  # the receiver's proof
            theirs.sendall(ours.recv(4096))
        finally:
            theirs.close()
            ours.close()

    with socket.create_server(("127.0.0.1", 0)) as real, socket.create_server(("127.0.0.1", 0)) as false:
        threads = [
            threading.Thread(
                target=accept,
                args=(
                    real,
                    lambda link: receive_caller(link, TOKEN, stall_s=5.0, encryption=source).close(),
                ),
            ),
            threading.Thread(target=accept, args=(false, in_between)),
        ]
        for thread in threads:
            thread.start()
        port = false.getsockname()[1]
        with pytest.raises((Unauthorized, OSError)):
            dial(f"127.0.0.1:{port}", TOKEN, stall_s=5.0, encryption=receiver)
        for thread in threads:
            thread.join(GENEROUS_S)
    assert "Unauthorized" in outcome  # the real source has noticed
