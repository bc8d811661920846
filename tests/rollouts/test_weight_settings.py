"""What a job says of the weight plane is what publisher, servers and receivers do, and the journal hears of it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.config import WeightsSpec
from gyre.engines.errors import EngineRefused
from gyre.errors import ConfigError, Unauthorized
from gyre.rollouts import weight_peer
from gyre.rollouts.agent.agent import Agent, AgentSettings
from gyre.rollouts.agent.policy_loading import AgentWeights
from gyre.rollouts.manager import policy_versions as manager_weights
from gyre.rollouts.manager.policy_versions import PolicyVersions
from gyre.rollouts.protocol.frames import Frame, Loaded, LoadFailed, Weights, WeightsTrouble
from gyre.rollouts.weight_peer import check_transports, where_to_listen
from gyre.weights.codecs.fp8 import round_fp8
from gyre.weights.transfer.protocol import TLS_BLOCK, Stalled, dial
from gyre.workloads.gang.weight_source import WeightSource
from gyre.workloads.rollout_vertices import JOURNALLED
from tests.rollouts.plane import live_plane, until

TOKEN = "t"
URL = "http://127.0.0.1:1"
CONFIG = {"model_type": "qwen3"}
MATRIX = "model.layers.0.mlp.up_proj.weight"
NETWORK = "127.0.0.0/8"


def policy(version: int, *, size: int = 640, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Versions differ in a hundredth of their values."""
    values = torch.randn(size, size, generator=torch.Generator().manual_seed(7)) * 0.02
    for step in range(1, version + 1):
        changed = torch.rand(size, size, generator=torch.Generator().manual_seed(step)) < 0.01
        values = torch.where(changed, values * 1.1, values)
    return {MATRIX: values.to(dtype), "model.norm.weight": torch.ones(size, dtype=dtype)}


class Far:
    """A trainer that publishes, and an instance that fetches, as if on two machines unless `path` is told."""

    def __init__(
        self,
        tmp_path: Path,
        settings: WeightsSpec,
        theirs: WeightsSpec | None,
        *,
        gives_up_s: float,
        imports: str,
    ) -> None:
        self.source = WeightSource(
            tmp_path, lambda: (URL, TOKEN), root=tmp_path / "trainer", settings=settings
        )
        self.frames: list[Frame] = []
        self.folders: list[Path] = []
        self.instance = AgentWeights(
            tmp_path / "instance",
            serve=self._serve,
            is_serving=lambda: False,
            send=self.frames.append,
            fetch_timeout_s=gives_up_s,
            codec=imports,
        )
        self.instance.settle(theirs or settings)

    async def _serve(self, folder: Path, weights: Weights) -> None:
        self.folders.append(folder)

    async def load(self, version: int, *, here: bool = False, **options: Any) -> Loaded | LoadFailed:
        told = self.source.publish(policy(version, **options), CONFIG, version=version, step=version)
        weights = Weights(
            version=version,
            checksum=told["checksum"],
            sources=[told["source"]],
            local_path=told["path"] if here else "",
        )
        await self.instance.load(weights, URL, TOKEN)
        await asyncio.sleep(0)  # what threads told
        answer = next(frame for frame in reversed(self.frames) if isinstance(frame, Loaded | LoadFailed))
        if isinstance(answer, Loaded):
            name = "model.safetensors"
            assert (self.folders[-1] / name).read_bytes() == (Path(told["path"]) / name).read_bytes()
        return answer

    @property
    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.folders[-1] / "gyre.json").read_text()))

    def close(self) -> None:
        self.instance.close()
        self.source.close()


Make = Callable[..., Far]


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Make]:
    made: list[Far] = []

    def make(
        theirs: WeightsSpec | None = None, *, gives_up_s: float = 30.0, imports: str = "", **settings: Any
    ) -> Far:
        made.append(Far(tmp_path, WeightsSpec(**settings), theirs, gives_up_s=gives_up_s, imports=imports))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def free_ports(count: int) -> str:
    """A range of ports that nobody has now."""
    for first in range(23_000, 31_000, 50):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return f"{first}-{first + count - 1}"
    raise AssertionError("no free ports")


# -- by which way, in which form --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transports", "here", "way"),
    [
        ("auto", True, "linked"),
        ("auto", False, "tcp"),
        ("tcp", True, "tcp"),
        ("shm", True, "linked"),
        (["tcp", "shm"], True, "linked"),
    ],
)
async def test_the_transport_is_the_one_that_was_asked_for(
    far: Make, transports: Any, here: bool, way: str
) -> None:
    loaded = await far(transports=transports).load(1, here=here)
    assert isinstance(loaded, Loaded)
    assert loaded.way == way


async def test_shared_memory_alone_does_not_reach_another_machine(far: Make) -> None:
    failed = await far(transports="shm", gives_up_s=0.5).load(1)
    assert isinstance(failed, LoadFailed)
    assert "weights.transports" in failed.error


@pytest.mark.parametrize(
    ("codec", "first", "then", "bytes_less_than"),
    [
        ("none", "none", "none", 1.01),
        ("delta", "none", "delta", 0.1),
        ("planes", "planes", "planes", 0.8),
        ("fp8", "fp8", "delta", 0.1),
    ],
)
async def test_the_codec_is_the_one_that_was_asked_for(
    far: Make, codec: str, first: str, then: str, bytes_less_than: float
) -> None:
    plane = far(codec=codec, chunk_bytes="1MiB")
    for version, expected in ((1, first), (2, then)):
        loaded = await plane.load(version)
        assert isinstance(loaded, Loaded)
        assert loaded.codec == expected
    assert then in loaded.why
    size = plane.manifest["size_bytes"]
    assert int(loaded.fetched.split(" bytes")[0].rpartition(" ")[2]) < bytes_less_than * size


@pytest.mark.parametrize(
    ("imports", "expected"), [(True, "tests.workloads.own_plugins:deflate"), (False, "none")]
)
async def test_a_codec_of_the_jobs_own_is_used_where_the_instance_names_it_too(
    far: Make, imports: bool, expected: str
) -> None:
    """What only the manager names is not imported."""
    own = "tests.workloads.own_plugins:deflate"
    loaded = await far(codec=own, chunk_bytes="1MiB", imports=own if imports else "").load(1)
    assert isinstance(loaded, Loaded)
    assert loaded.codec == expected


async def test_fp8_rounds_what_instances_get_to_bfloat16_whatever_the_actor_trains_in(far: Make) -> None:
    from safetensors.torch import load_file

    plane = far(codec="fp8")
    await plane.load(1, dtype=torch.float32)
    found = load_file(plane.folders[-1] / "model.safetensors")
    exact = policy(1, dtype=torch.float32)
    assert torch.equal(found[MATRIX], round_fp8(exact[MATRIX]).to(torch.bfloat16))
    assert torch.equal(found["model.norm.weight"], exact["model.norm.weight"].to(torch.bfloat16))


@pytest.mark.parametrize(("dtype", "found"), [("trained", "float32"), ("bfloat16", "bfloat16")])
async def test_the_dtype_of_what_instances_get(far: Make, dtype: str, found: str) -> None:
    plane = far(dtype=dtype)
    await plane.load(1, dtype=torch.float32)
    assert {spec["dtype"] for spec in plane.manifest["tensors"]} == {found}


async def test_streams_chunks_and_stall_timers(far: Make) -> None:
    plane = far(streams=5, chunk_bytes="1MiB", stall_timeout_s=7.5)
    await plane.load(1, size=2000)
    assert plane.manifest["chunk_bytes"] == 1 << 20
    assert plane.instance._holdings is not None
    receiver = plane.instance._holdings.receiver
    assert (receiver.streams, receiver.stall_s) == (5, 7.5)
    assert plane.source.server._stall_s == 7.5


# -- where, and between whom ---------------------------------------------------------------------------------


async def test_each_listens_in_the_range_of_ports(far: Make) -> None:
    ports = free_ports(4)
    plane = far(ports=ports)
    loaded = await plane.load(1)
    assert isinstance(loaded, Loaded)
    first, last = map(int, ports.split("-"))
    found = {int(address.rpartition(":")[2]) for address in (plane.source.address, loaded.source)}
    assert len(found) == 2
    assert all(first <= port <= last for port in found)


def test_a_range_that_is_taken_is_named(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_peer, "PORT_WITHIN_S", 0.0)
    ports = free_ports(1)
    taken = socket.create_server(("127.0.0.1", int(ports.partition("-")[0])))
    with taken, pytest.raises(ConfigError, match=f"weights.ports: none of {ports}"):
        far(ports=ports)
    assert far(ports=ports).source.address.endswith(ports.partition("-")[0])


def test_a_port_that_becomes_free_is_waited_for(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = free_ports(1)
    taken = socket.create_server(("127.0.0.1", int(ports.partition("-")[0])))
    monkeypatch.setattr(weight_peer.time, "sleep", lambda seconds: taken.close())
    assert far(ports=ports).source.address.endswith(ports.partition("-")[0])


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("", ("127.0.0.1", "127.0.0.1")),
        ("127.0.0.1", ("127.0.0.1", "127.0.0.1")),
        (NETWORK, ("127.0.0.1", "127.0.0.1")),
        ("0.0.0.0", ("0.0.0.0", "127.0.0.1")),
    ],
)
def test_where_it_listens_and_how_others_reach_it(bind: str, expected: tuple[str, str]) -> None:
    assert where_to_listen(bind, URL) == expected


@pytest.mark.parametrize("bind", ["198.51.100.0/24", "198.51.100.7"])
def test_an_address_that_this_machine_has_not_is_named(far: Make, bind: str) -> None:
    with pytest.raises(ConfigError, match=r"weights\.bind"):
        far(bind=bind)


def test_a_machine_that_joins_has_its_own_address_and_ports(tmp_path: Path) -> None:
    one = AgentWeights(
        tmp_path,
        serve=lambda folder, weights: None,  # type: ignore[arg-type, return-value]
        is_serving=lambda: False,
        send=lambda frame: None,
        fetch_timeout_s=1.0,
        bind="127.0.0.1",
        ports="7100",
    )
    one.settle(WeightsSpec(bind="10.0.0.0/8", ports="1-9", streams=3))
    assert (one._plane.bind, one._plane.ports, one._plane.streams) == ("127.0.0.1", "7100", 3)


async def test_an_instance_that_cannot_listen_as_the_settings_say_leaves_and_says_why(tmp_path: Path) -> None:
    settings = AgentSettings(
        name="a", max_running=1, kv_tokens=1024, cache=tmp_path / "a", bind="198.51.100.7"
    )

    def never(folder: Path, version: str) -> Any:
        raise AssertionError("no policy was fetched")

    async with live_plane(tmp_path) as plane:
        await (await plane.trainer()).publish(0)
        with pytest.raises(
            ConfigError, match=r"weights\.bind: this machine has not the address 198\.51\.100\.7"
        ):
            await asyncio.wait_for(Agent(settings, lambda: (plane.url, "secret"), never).run(), 20.0)


async def test_of_what_was_held_before_nothing_is_left_where_there_is_nothing_new(far: Make) -> None:
    plane = far()
    await plane.load(1)
    plane.instance.settle(WeightsSpec(bind="198.51.100.7"))
    with pytest.raises(ConfigError):
        await plane.load(2)
    assert plane.instance.source == ""
    plane.instance.settle(WeightsSpec())
    assert isinstance(await plane.load(3), Loaded)


async def test_an_engine_that_rejects_a_version_serves_the_one_before_and_is_offered_the_next(
    far: Make,
) -> None:
    plane = far()
    assert isinstance(await plane.load(1), Loaded)
    serve = plane.instance._serve

    async def reject(folder: Path, weights: Weights) -> None:
        raise EngineRefused("the tensor w has another shape.")

    plane.instance._serve = reject
    failed = await plane.load(2)
    assert isinstance(failed, LoadFailed)
    assert (failed.version, "another shape" in failed.error) == (2, True)
    assert plane.instance.version == 1
    assert (plane.folders[-1] / "model.safetensors").exists()
    plane.instance._serve = serve
    assert isinstance(await plane.load(3), Loaded)
    assert plane.instance.version == 3


async def test_weights_come_from_the_networks_of_senders_alone(far: Make) -> None:
    plane = far(sender_networks=["10.0.0.0/8"], gives_up_s=0.5)
    assert isinstance(await plane.load(1), LoadFailed)
    await asyncio.sleep(0)
    (trouble, *_) = [frame for frame in plane.frames if isinstance(frame, WeightsTrouble)]
    assert "networks" in trouble.evidence
    assert plane.source.server.sent_bytes == 0


async def test_weights_go_to_the_networks_of_receivers_alone(far: Make) -> None:
    plane = far(receiver_networks=["10.0.0.0/8"], gives_up_s=0.5)
    assert isinstance(await plane.load(1), LoadFailed)
    assert plane.source.server.sent_bytes == 0


async def test_both_networks_permit_what_they_name(far: Make) -> None:
    assert isinstance(await far(sender_networks=[NETWORK], receiver_networks=[NETWORK]).load(1), Loaded)


# -- TLS --------------------------------------------------------------------------------------------------


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
            thread.join(20.0)
    assert "Unauthorized" in outcome  # the real source has noticed


# -- Mooncake where there is none ------------------------------------------------------------------------------


@pytest.fixture
def without_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)


@pytest.mark.usefixtures("without_mooncake")
@pytest.mark.parametrize("transports", ["mooncake", ["mooncake", "tcp"]])
def test_mooncake_by_name_where_it_is_not_installed_is_one_clear_error(far: Make, transports: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"weights\.transports: mooncake given, but .* cannot be imported"
    ) as told:
        far(transports=transports)
    assert "gyre-rl[mooncake]" in told.value.hint


@pytest.mark.usefixtures("without_mooncake")
async def test_an_instance_whose_machine_has_no_mooncake_leaves_and_says_why(tmp_path: Path) -> None:
    settings = AgentSettings(name="a", max_running=1, kv_tokens=1024, cache=tmp_path)

    def never(folder: Path, version: str) -> Any:
        raise AssertionError("no policy was published")

    async with live_plane(tmp_path, weights=WeightsSpec(transports=["mooncake"])) as plane:
        with pytest.raises(ConfigError, match="mooncake"):
            await asyncio.wait_for(Agent(settings, lambda: (plane.url, "secret"), never).run(), 20.0)


@pytest.mark.usefixtures("without_mooncake")
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "weights.trusted_network does not say"),
        ({"receiver_networks": [NETWORK]}, "weights.trusted_network does not say"),
        ({"trusted_network": True}, "cannot be imported"),
        ({"trusted_network": True, "encrypt": True}, "does not encrypt"),
    ],
)
async def test_auto_does_without_mooncake_and_says_why(far: Make, settings: Any, why: str) -> None:
    loaded = await far(**settings).load(1)
    assert isinstance(loaded, Loaded)
    assert loaded.way == "tcp"
    assert "mooncake not: " in loaded.why
    assert why in loaded.why


def test_a_party_that_cannot_be_set_up_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def refuse(settings: WeightsSpec, reach: str) -> Any:
        made.append(reach)
        raise ConfigError("no such device")

    monkeypatch.setattr(weight_peer, "_open_mooncake", refuse)
    monkeypatch.setattr(weight_peer, "PORT_WITHIN_S", 0.0)
    ports = free_ports(1)
    settings = WeightsSpec(ports=ports)
    with pytest.raises(ConfigError, match="no such device"):
        weight_peer.WeightPeer(tmp_path / "root", "a test", TOKEN, settings, url=URL)
    taken = socket.create_server(("127.0.0.1", int(ports.partition("-")[0])))
    with taken, pytest.raises(ConfigError, match=r"weights\.ports"):
        weight_peer.WeightPeer(tmp_path / "root", "a test", TOKEN, settings, url=URL)
    assert made == ["127.0.0.1"]  # no engine where there is no port
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_other_transports_need_no_mooncake(without_mooncake: None) -> None:
    for transports in (["auto"], ["tcp"], ["shm", "tcp"]):
        check_transports(WeightsSpec(transports=transports))


# -- the manager -------------------------------------------------------------------------------------------


def test_ways_that_take_turns_are_told_of_once_a_minute() -> None:
    versions, told = PolicyVersions(), []
    ways = [("tcp", "none"), ("here", "none"), ("tcp", "delta"), ("", ""), ("linked", "none")]
    for second in range(121):
        way, codec = ways[second % len(ways)]
        frame = Loaded(version=second, checksum="c", fetch_s=0.1, load_s=0.1, way=way, codec=codec)
        if versions.way_changed("a", frame, float(second)) is not None:
            told.append((second, way, codec))
    assert told == [(0, "tcp", "none"), (62, "tcp", "delta")]
    for second in (121, 122, 125):  # what it has come to is told in the end
        frame = Loaded(version=second, checksum="c", fetch_s=0.1, load_s=0.1, way="tcp", codec="none")
        if versions.way_changed("a", frame, float(second)) is not None:
            told.append((second, "tcp", "none"))
    assert told[2:] == [(122, "tcp", "none")]


async def test_the_manager_says_how_and_tells_the_journal_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_weights, "WAY_TOLD_EACH_S", 0.0)
    wanted = WeightsSpec(transports=["tcp"], codec="delta", streams=3, ports="7100-7107", encrypt=True)
    async with live_plane(tmp_path, weights=wanted) as plane:
        trainer = await plane.trainer()
        agent = await plane.agent("a")
        welcome = await agent.dial()
        assert welcome.plane == wanted
        for version, codec in enumerate(["none", "delta", "delta", "none"]):
            await trainer.publish(version)
            weights = await agent.wire.expect(Weights)
            await agent.wire.send(
                Loaded(
                    version=version,
                    checksum=weights.checksum,
                    fetch_s=0.1,
                    load_s=0.1,
                    way="tcp",
                    codec=codec,
                    why=f"{codec} was asked for",
                )
            )
        await until(lambda: len(plane.told("TransferChosen")) == 3)
        assert [(told["version"], told["codec"]) for told in plane.told("TransferChosen")] == [
            (0, "none"),
            (1, "delta"),
            (3, "none"),
        ]
        assert plane.told("TransferChosen")[1] == {
            "instance": "a",
            "version": 1,
            "transport": "tcp",
            "codec": "delta",
            "why": "delta was asked for",
        }
    assert "TransferChosen" in JOURNALLED
